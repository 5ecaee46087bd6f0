"""A finished model on disk: the weights as safetensors, with a description as JSON inside."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import safetensors.torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

import fedda
from fedda.config import NETWORKS, ModelConfig
from fedda.config.inputs import REFUSE, Inputs, Missing, Resize, window_of
from fedda.errors import ModelError, reason
from fedda.files import keeping, unprotected

from .arithmetic import plain_modes
from .backbone import backbone
from .extension import Extension
from .networks import Model, blank
from .ready import has_weights

_KEY = "fedda"
_MOST_VALUES = 2**26  # in one input: 4096 x 4096 pixels of 4 channels
_MOST_LETTERS = 2**20  # of all names
_FROZEN = "backbone."  # prefix of the weights that do not learn


@dataclass(frozen=True)
class Meta:
    """The description of a model that its file holds."""

    config: ModelConfig
    inputs: Inputs  # what it takes, and how images and vectors come to it
    classes: tuple[str, ...]  # the name of each output
    version: str  # of the fedda that wrote the file
    extension: Extension | None = None  # the layers that a method added

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.inputs.shape


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a file takes them: those that share memory, as tied weights, are copies."""
    found, places = dict(tensors), set[int]()
    for name, tensor in tensors.items():
        if (place := tensor.untyped_storage().data_ptr()) in places:
            found[name] = tensor.clone()
        places.add(place)
    return found


def save(
    path: str | Path,
    model: Model,
    config: ModelConfig,
    inputs: Inputs,
    classes: Sequence[str],
) -> None:
    """Write a model file that `load` needs nothing else for; a crash never leaves half a file."""
    path = Path(path)
    if path.exists() and not path.is_file():  # safetensors would replace a pipe or a device
        raise ModelError(f"'{path}' is no file; give one to write the model to.")
    if len(classes) != model.head.out_features:
        raise ModelError(
            f"There are {len(classes)} class names for a model of {model.head.out_features} "
            "classes; give one name per class."
        )
    about = {
        "config": config.model_dump(mode="json"),
        "shape": list(inputs.shape),
        "classes": list(classes),
        "version": fedda.__version__,
    }
    about |= inputs.changed
    if model.extension is not None:
        about["extension"] = asdict(model.extension)
    parts: dict[str, nn.Module] = {"": model}
    if config.freezes:
        assert model.backbone is not None, "a model file stands alone, so it needs the frozen part"
        parts[_FROZEN] = model.backbone
    tensors = {
        f"{prefix}{name}": tensor.detach().cpu().contiguous()
        for prefix, part in parts.items()
        for name, tensor in part.state_dict().items()
    }
    try:
        unprotected(path)
        with keeping(path) as part:
            safetensors.torch.save_file(apart(tensors), part, metadata={_KEY: json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot write the model to '{path}' ({reason(error)}); make room or choose "
            "another place."
        ) from error


@plain_modes()
def load(path: str | Path) -> tuple[Model, Meta]:
    """Read a model that `save` wrote, on the CPU in evaluation mode, and its description.

    Raises:
        ModelError: the file cannot be read, or needs a package that is not installed here.
    """
    meta, tensors = _read(path, weights=True)
    if meta.extension is not None and not meta.extension.known:
        raise ModelError(
            f"'{path}' holds a model with layers of the method {meta.extension.method}, which is "
            "not installed here; install the package that adds this method."
        )
    with _damaged(path):
        try:
            _check_size(meta, tensors)
            model = blank(meta.config, meta.shape, len(meta.classes), meta.extension)
        except ModelError as error:
            raise ModelError(f"'{path}' cannot be loaded. {error}") from error
        model.load_state_dict({n: t for n, t in tensors.items() if not n.startswith(_FROZEN)})
        if meta.config.freezes:
            made = backbone(meta.config, meta.shape, weights=False)
            held = {n.removeprefix(_FROZEN): t for n, t in tensors.items() if n.startswith(_FROZEN)}
            made.load_state_dict(held)
            model.attach(made)
    return model.eval(), meta


def describe(path: str | Path) -> Meta:
    """Read the description of a model that `save` wrote, without its weights.

    Raises:
        ModelError: the file cannot be read.
    """
    return _read(path, weights=False)[0]


def _read(path: str | Path, weights: bool) -> tuple[Meta, dict[str, Tensor]]:
    if Path(path).exists() and not Path(path).is_file():  # a pipe would never end
        raise ModelError(
            f"Cannot read '{path}' as a model (it is no regular file); give a .safetensors file "
            "saved by fedda."
        )
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get(_KEY)
            names = file.keys() if weights else ()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot read '{path}' as a model ({reason(error)}); give a .safetensors "
            "file saved by fedda."
        ) from error
    if about is None:
        raise ModelError(
            f"'{path}' is a safetensors file, but not a model saved by fedda; to start training "
            "from such weights set model.weights to its path."
        )
    with _damaged(path):
        return _meta(about), tensors


def _check_size(meta: Meta, tensors: dict[str, Tensor]) -> None:
    """Refuse a description of a larger model than the file holds, before any of it is built."""
    if meta.config.name not in NETWORKS and not has_weights(meta.config.name):
        return  # another package's network, which may build nothing without values
    extension = meta.extension if meta.extension and meta.extension.own else None
    outline = blank(meta.config, meta.shape, len(meta.classes), extension, "meta").state_dict()
    if sum(t.numel() for t in outline.values()) > sum(t.numel() for t in tensors.values()):
        raise ValueError("it describes a larger model than it holds")


_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, ValidationError)
_UNREADABLE += (RuntimeError, RecursionError, IndexError, MemoryError, AssertionError)


@contextmanager
def _damaged(path: str | Path) -> Iterator[None]:
    """Turn errors from a file's contents into a ModelError that says the file is damaged."""
    try:
        yield
    except _UNREADABLE as error:
        problem = " ".join(str(error).split())[:200]
        raise ModelError(
            f"'{path}' is damaged or from another version of fedda ({problem}); "
            "save the model again."
        ) from error


def _meta(about: str) -> Meta:
    facts = json.loads(about)
    resize, window = facts.get("resize", "stretch"), facts.get("window", "")
    missing = facts.get("missing", REFUSE)
    if (
        resize not in get_args(Resize)
        or missing not in get_args(Missing)
        or not all(isinstance(each, str) for each in (window, facts["version"]))
    ):
        raise ValueError("resize, window, missing or version is none")
    window_of(window)  # or it raises
    columns = _names("columns", facts.get("columns", []))
    extension = facts.get("extension")
    if extension is not None and not isinstance(extension["method"], str):
        raise ValueError("extension names no method")
    return Meta(
        config=ModelConfig.model_validate(facts["config"]),
        inputs=Inputs(_shape(facts["shape"]), resize, window, missing, columns),
        classes=_names("classes", facts["classes"]),
        version=facts["version"],
        extension=None if extension is None else Extension(**extension),
    )


def _shape(found: Any) -> tuple[int, ...]:
    """The shape of one input, if an input can have it; a ValueError if not."""
    numbers = isinstance(found, list) and all(type(each) is int and each > 0 for each in found)
    if not numbers or len(found) not in (1, 3) or math.prod(found) > _MOST_VALUES:
        raise ValueError(f"shape is {str(found)[:80]}, and no shape of an input")
    return tuple(found)


def _names(what: str, found: Any) -> tuple[str, ...]:
    """The names of classes or columns, if they are different texts; a ValueError if not."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{what} is no list of names")
    if len(set(found)) < len(found) or sum(map(len, found)) > _MOST_LETTERS:
        raise ValueError(f"{what} names one twice, or is too long")
    return tuple(found)
