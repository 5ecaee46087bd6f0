"""On how many of the target's images a model has the class that the mean of all models has.

No prediction crosses the wire for this. Where the sites are simulated, the command reads the models
that its trainings saved, and the target's images. On a server the target does that: with each
training's last numbers it says how far that one's model and those of the trainings before agree
with their mean (`run.beside`); its last steps have left them there.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedda import models
from fedda.data import Reading
from fedda.data.load import load_target
from fedda.errors import ModelError
from fedda.maths.validators import subset
from fedda.models import refined
from fedda.refining import agreed
from fedda.results.read import model_file
from fedda.train import generator

BATCH = 64


class Images:
    """Some of the target's images, read once, and without their labels.

    Args:
        data: the target's folder or file.
        reading: how its files are read.
        chosen: which of its training images; None: at most 1,000, drawn at random.
    """

    def __init__(self, data: Path, reading: Reading, chosen: Sequence[int] | None = None) -> None:
        self._data = data
        self._reading = reading
        self._chosen = chosen
        self._known: dict[str, Tensor] = {}

    def inputs(self, network: models.Model, about: models.Meta) -> Tensor:
        """What a model takes; a frozen part, which is alike in all models, computes only once."""
        form = json.dumps([about.inputs, about.config.model_dump(mode="json")])
        if form not in self._known:
            x = load_target(self._data, **self._reading.form(about.inputs)).x
            some = subset(len(x), generator("agreement")) if self._chosen is None else self._chosen
            x = x[torch.as_tensor(some)]
            if network.backbone is not None:
                x = _outputs(network.backbone, x)
            self._known[form] = x
        return self._known[form]


def predicted(folder: Path, stays: bool, images: Images) -> Tensor | None:
    """What a finished training's model predicts for the target's images -> (N, C), or None.

    Args:
        folder: of its run; without a model there it is None.
        stays: whether the adapted model is not the run's: it is at the target then, as what its
            last step has refined.
        images: the target's.
    """
    try:
        if not stays:
            network, about = models.load(model_file(folder))
            return models.predict(network, images.inputs(network, about))
        if (found := refined_model(folder)) is None:
            return None
        network, about = models.load(found)
        return models.predict(refined.members_of(network)[-1], images.inputs(network, about))
    except ModelError:
        return None


def refined_model(folder: Path) -> Path | None:
    """The file of what the target's last step has made of a finished training; None without one."""
    return next((folder / "sites").glob("*/*.refined.safetensors"), None)


def here(
    folders: Sequence[tuple[Path, bool]], methods: Sequence[str], images: Images
) -> list[float | None]:
    """How far each model agrees with the mean of all, where the target's images lie here.

    Args:
        folders: of finished trainings, each with whether its model stays at the target. One without
            a model has no part in it.
        methods: of each.
        images: the target's.
    """
    predictions = [predicted(folder, stays, images) for folder, stays in folders]
    known = [i for i, p in enumerate(predictions) if p is not None]
    found: list[float | None] = [None] * len(folders)
    if known:
        p = torch.stack([p for p in predictions if p is not None])
        for i, share in zip(known, agreed(p, [methods[i] for i in known]), strict=True):
            found[i] = share
    return found


@torch.no_grad()
def _outputs(backbone: models.Backbone, x: Tensor) -> Tensor:
    """A frozen part's outputs for images (N, channels, H, W) -> (N, *out)."""
    device = next(backbone.parameters()).device
    return torch.cat([backbone(models.as_inputs(part, device)) for part in x.split(BATCH)])
