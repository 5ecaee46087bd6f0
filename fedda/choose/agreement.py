"""On how many of the target's images two saved models predict the same class.

No prediction crosses the wire for this: the command reads the models that its trainings saved, and
the target's images, where both lie. So it is for the machine that holds the target's data. A method
whose adapted model stays at the target saves none there, and has no agreement.
"""

import json
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


def predicted(model: Path, images: Images) -> Tensor:
    """Classes that a saved model predicts for the target's images -> (N,).

    Args:
        model: a run's folder, or the model's file.
        images: the target's.
    """
    network, about = models.load(model_file(model))
    return models.predict(network, images.inputs(network, about)).argmax(dim=1)


def compared(
    folders: Mapping[str, Path], groups: Sequence[str], images: Images
) -> tuple[dict[str, float | None], dict[str, bool]]:
    """Each model's agreement with those of other methods, and whether it stands apart.

    Args:
        folders: of finished trainings, by any name; one without a model has neither.
        groups: each one's method.
        images: the target's.
    """
    labels, known = [], []
    for name, group in zip(folders, groups, strict=True):
        try:
            labels.append(predicted(folders[name], images))
        except ModelError:
            continue
        known.append((name, group))
    shares: dict[str, float | None] = dict.fromkeys(folders)
    alone = dict.fromkeys(folders, False)
    if labels:
        A, methods = choice.agreement(torch.stack(labels)), [group for _, group in known]
        pairs = zip(known, choice.support(A, methods), choice.apart(A, methods), strict=True)
        for (name, _), share, odd in pairs:
            shares[name], alone[name] = share, odd
    return shares, alone


@torch.no_grad()
def _outputs(backbone: models.Backbone, x: Tensor) -> Tensor:
    """A frozen part's outputs for images (N, channels, H, W) -> (N, *out)."""
    device = next(backbone.parameters()).device
    return torch.cat([backbone(models.as_inputs(part, device)) for part in x.split(BATCH)])
