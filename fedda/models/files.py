"""A finished model on disk: safetensors for the weights, JSON inside it for what they are."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

import fedda
from fedda.config import ModelConfig
from fedda.errors import ModelError
from fedda.files import replacing

from .mixture import Mixture
from .networks import Model, blank

_KEY = "fedda"


@dataclass(frozen=True)
class Meta:
    """What a model file says about its weights."""

    config: ModelConfig
    shape: tuple[int, ...]  # of one input
    classes: tuple[str, ...]  # the name of each output
    version: str  # of the fedda that wrote the file


def save(
    path: str | Path,
    model: Model,
    *,
    config: ModelConfig,
    shape: Sequence[int],
    classes: Sequence[str],
) -> None:
    """Write a model that `load` can use alone; a crash never leaves half a file."""
    path = Path(path)
    if len(classes) != model.head.out_features:
        raise ModelError(
            f"There are {len(classes)} class names for a model of {model.head.out_features} "
            "classes; give one name per class."
        )
    about = {
        "config": config.model_dump(mode="json"),
        "shape": list(shape),
        "classes": list(classes),
        "version": fedda.__version__,
    }
    if isinstance(model.head, Mixture):
        about["mixture"] = model.head.heads
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            safetensors.torch.save_file(tensors, part, metadata={_KEY: json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot write the model to '{path}' ({error}); free or choose another place."
        ) from error


def load(path: str | Path) -> tuple[Model, Meta]:
    """A model that `save` wrote, on the CPU in evaluation mode, and what it is."""
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get(_KEY)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"Cannot read '{path}' as a model ({error}); give a .safetensors file saved by fedda."
        ) from error
    if about is None:
        raise ModelError(
            f"'{path}' is a safetensors file, but not a model saved by fedda; to start training "
            "from such weights set model.weights to its path."
        )
    try:
        meta = _meta(about)
        model = blank(meta.config, meta.shape, len(meta.classes))
        if heads := json.loads(about).get("mixture"):
            model.head = Mixture(heads, model.width, len(meta.classes))
        model.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, ValidationError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ModelError(
            f"'{path}' is damaged or from another version of fedda ({problem}); "
            "save the model again."
        ) from error
    return model.eval(), meta


def _meta(about: str) -> Meta:
    found = json.loads(about)
    return Meta(
        config=ModelConfig.model_validate(found["config"]),
        shape=tuple(found["shape"]),
        classes=tuple(found["classes"]),
        version=found["version"],
    )
