"""On how many of the target's images two models predict the same class.

No prediction crosses the wire for this. Where the sites are simulated, the command reads the models
that its trainings saved, and the target's images. On a server the target does that: with each
training's last numbers it says on which share of its images that one's model agrees with those of
the trainings before (`run.beside`), which its last steps have left there.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedda import models
from fedda.data import Reading
from fedda.data.load import load_target
from fedda.errors import ModelError
from fedda.maths import choice
from fedda.maths.validators import subset
from fedda.models import refined
from fedda.results.read import model_file
from fedda.train import generator

BATCH = 64


class Images:
    """At most 1,000 of the target's images, read once, and without their labels.

    Args:
        data: the target's folder or file.
        reading: how its files are read.
    """

    def __init__(self, data: Path, reading: Reading) -> None:
        self._data = data
        self._reading = reading
        self._known: dict[str, Tensor] = {}

    def inputs(self, network: models.Model, about: models.Meta) -> Tensor:
        """What a model takes; a frozen part, which is alike in all models, computes only once."""
        form = json.dumps(
            [about.shape, about.resize, about.window, about.config.model_dump(mode="json")]
        )
        if form not in self._known:
            channels, size = about.shape[:2] if len(about.shape) > 1 else (0, 0)
            x = load_target(
                self._data,
                channels=channels,
                size=size,
                resize=about.resize,
                reading=self._reading.within(about.window),
            ).x
            x = x[subset(len(x), generator("agreement"))]
            if network.backbone is not None:
                x = _outputs(network.backbone, x)
            self._known[form] = x
        return self._known[form]


def predicted(folder: Path, stays: bool, images: Images) -> Tensor | None:
    """Classes that a finished training's model gives the target's images -> (N,); None without one.

    Args:
        folder: of its run.
        stays: whether the adapted model is not the run's: it is at the target then, as what its
            last step has refined.
        images: the target's.

    Raises:
        ModelError: a file is damaged.
    """
    if stays:
        (path,) = [*(folder / "sites").glob("*/*.refined.safetensors")] or [None]
        if path is None:
            return None
        network, about = models.load(path)
        x = images.inputs(network, about)
        network = refined.members_of(network)[-1]
    else:
        network, about = models.load(model_file(folder))
        x = images.inputs(network, about)
    return models.predict(network, x).argmax(dim=1)


def here(folders: Sequence[tuple[Path, bool]], images: Images) -> Tensor:
    """Shares of the images on which models predict alike, where both lie here -> (M, M).

    Args:
        folders: of finished trainings, each with whether its model stays at the target. One without
            a model has NaN.
        images: the target's.
    """
    found: list[Tensor | None] = []
    for folder, stays in folders:
        try:
            found.append(predicted(folder, stays, images))
        except ModelError:
            found.append(None)
    A = torch.full((len(found), len(found)), math.nan, dtype=torch.float64)
    known = [i for i, label in enumerate(found) if label is not None]
    if known:
        labels = torch.stack([label for label in found if label is not None])
        A[torch.tensor(known)[:, None], torch.tensor(known)] = choice.agreement(labels)
    return A


def told(trainings: Sequence[str], said: Sequence[Mapping[str, float]]) -> Tensor:
    """The same shares as the target has told them -> (M, M), NaN where it has not.

    Args:
        trainings: their names, RUN.METHOD-SEED.
        said: what each one's results say of those before it, by name.
    """
    A = torch.full((len(trainings), len(trainings)), math.nan, dtype=torch.float64)
    for i, rows in enumerate(said):
        for j, name in enumerate(trainings):
            if name in rows:
                A[i, j] = A[j, i] = rows[name]
    return A


@torch.no_grad()
def _outputs(backbone: models.Backbone, x: Tensor) -> Tensor:
    """A frozen part's outputs for images (N, channels, H, W) -> (N, *out)."""
    device = next(backbone.parameters()).device
    return torch.cat([backbone(models.as_inputs(part, device)) for part in x.split(BATCH)])
