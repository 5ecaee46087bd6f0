"""A model in the layout of a repository on the Hugging Face Hub; nothing is sent anywhere.

    model.safetensors   the run's own file, which `fedda predict` and `fedda.models.load` read
    config.json         network, shape of an input, names of the classes
    README.md           the run's model card, below the head that the Hub reads

`fedda export --hf DIR` writes it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from fedda.config import REFUSE
from fedda.errors import ModelError
from fedda.models import load

from .card import CARD
from .read import MODEL

TAGS = ("domain-adaptation", "federated-learning", "fedda")


def write(source: Path, folder: Path) -> None:
    """Write a model's repository into a new or empty folder.

    Args:
        source: the model's file; a model card beside it, or in the folder above, is taken along.
        folder: where to.

    Raises:
        ModelError: the model cannot be read, or the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there and not an empty folder; give a new one as --hf.")
    _, about = load(source)
    config: dict[str, Any] = {
        "model_type": "fedda",
        "architectures": [about.config.name],
        "input_shape": list(about.shape),
        "resize": about.resize,
        **({"window": about.window} if about.window else {}),
        **({"missing": about.missing} if about.missing != REFUSE else {}),
        "id2label": {str(i): name for i, name in enumerate(about.classes)},
        "label2id": {name: i for i, name in enumerate(about.classes)},
        "fedda_version": about.version,
        "network": about.config.model_dump(mode="json"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / MODEL)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (folder / "README.md").write_text(_head(len(about.shape) == 3) + _card(source))


def _head(images: bool) -> str:
    lines = ["---", "library_name: fedda", "tags:", *(f"- {tag}" for tag in TAGS)]
    lines += ["pipeline_tag: image-classification"] if images else []
    return "\n".join([*lines, "---", ""]) + "\n"


def _card(source: Path) -> str:
    for folder in (source.parent, source.parent.parent):
        if (folder / CARD).is_file():
            return (folder / CARD).read_text()
    return "# A model without a card\n\nNobody has written down how good this model is, or where.\n"
