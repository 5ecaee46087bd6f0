"""Load pretrained weights of torchvision's networks, by torchvision's name or from a file."""

import pickle
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedda.config import ModelConfig
from fedda.errors import ModelError

# The last linear layer of each network; the head replaces it.
LAST = {"resnet18": "fc", "resnet50": "fc", "resnet101": "fc", "alexnet": "classifier.6"}

# Mean and deviation of each colour, with which torchvision's ImageNet weights were trained.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_SUFFIXES = (".pth", ".pt", ".safetensors")


def load_pretrained(model: nn.Module, config: ModelConfig) -> None:
    """Fill a model with the weights that `model.weights` names.

    The head keeps its own weights if the pretrained network has another number of classes.

    Args:
        model: A model made from `config`, whose parameters are named `encoder.*` and `head.*`.
        config: Its `weights` is a name of torchvision, or a path ending in .pth, .pt or
            .safetensors.
    """
    last = LAST[config.name]
    # These share memory with the model's own weights.
    own = {_torchvision_name(name, last): t for name, t in model.state_dict().items()}
    given = _read(config)
    head = [f"{last}.weight", f"{last}.bias"]
    if any(name in given and given[name].shape != own[name].shape for name in head):
        for name in head:
            given[name] = own[name]
    _check_fit(own, given, config)
    for name, tensor in own.items():
        if name in given:
            tensor.copy_(given[name])


def _torchvision_name(name: str, last: str) -> str:
    half, _, rest = name.partition(".")
    return f"{last}.{rest}" if half == "head" else rest


def _check_fit(own: dict[str, Tensor], given: dict[str, Tensor], config: ModelConfig) -> None:
    # Old files lack the number of batches that BatchNorm has seen; it is not needed.
    missing = [n for n in own if n not in given and not n.endswith("num_batches_tracked")]
    unexpected = [n for n in given if n not in own]
    reshaped = [n for n in own if n in given and given[n].shape != own[n].shape]
    wrong = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    differences = "; ".join(f"{what}: {_few(names)}" for what, names in wrong.items() if names)
    if differences:
        raise ModelError(
            f"The weights '{config.weights}' do not fit {config.name} ({differences}); "
            f"give a state_dict of torchvision's {config.name}."
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read(config: ModelConfig) -> dict[str, Tensor]:
    if config.weights.endswith(_SUFFIXES):
        return _read_file(Path(config.weights).expanduser())
    return _download(config)


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(f"model.weights is '{path}', but there is no such file; correct the path.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ModelError(
            f"Cannot read weights from '{path}' ({_first_line(error)}); "
            "give a state_dict written by torch.save or safetensors."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        holds = (
            _few([str(key) for key in state]) if isinstance(state, dict) else type(state).__name__
        )
        raise ModelError(
            f"'{path}' holds {holds}, not a plain state_dict of tensors; "
            "write it with torch.save(model.state_dict(), path)."
        )
    return dict(state)


def _download(config: ModelConfig) -> dict[str, Tensor]:
    from torchvision.models import get_model_weights  # costly, see networks.py

    known = get_model_weights(config.name)
    short = config.weights.removeprefix(f"{known.__name__}.")
    if short not in known.__members__:
        raise ModelError(
            f"model.weights is '{config.weights}', which {config.name} does not have; choose none, "
            f"one of {', '.join(known.__members__)}, or a file ending in {', '.join(_SUFFIXES)}."
        )
    try:
        return dict(known[short].get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"Cannot download {config.weights} of {config.name} ({_first_line(error)}); fetch "
            f"{known[short].url} elsewhere and set model.weights to the path of that file."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
