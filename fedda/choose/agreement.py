"""On how many of the target's images two saved models predict the same class.

No prediction crosses the wire for this: the command reads the models that its trainings saved, and
the target's images, where both lie. So it is for the machine that holds the target's data. A method
whose adapted model stays at the target saves none there, and has no agreement.
"""

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


def predicted(model: Path, data: Path, reading: Reading, seed: int) -> Tensor:
    """Classes that a saved model predicts of at most 1,000 of the target's images -> (N,).

    Args:
        model: a run's folder, or the model's file.
        data: the target's folder or file, whose labels, if any, are not read.
        reading: how its files are read.
        seed: of the draw of the images, which is the same for all models.
    """
    network, about = models.load(model_file(model))
    channels, size = about.shape[:2] if len(about.shape) > 1 else (0, 0)
    x = load_target(data, channels=channels, size=size, resize=about.resize, reading=reading).x
    chosen = subset(len(x), generator(seed, "agreement"))
    return models.predict(network, x[chosen]).argmax(dim=1)


def compared(
    folders: Mapping[str, Path], groups: Sequence[str], data: Path, reading: Reading, seed: int
) -> tuple[dict[str, float | None], dict[str, bool]]:
    """Each model's agreement with those of other methods, and whether it stands apart.

    Args:
        folders: of the finished trainings, by any name.
        groups: each one's method.
        data: as for `predicted`.
        reading: as for `predicted`.
        seed: as for `predicted`.
    """
    labels, known = [], []
    for name, group in zip(folders, groups, strict=True):
        try:
            labels.append(predicted(folders[name], data, reading, seed))
            known.append((name, group))
        except ModelError:
            continue
    shares: dict[str, float | None] = dict.fromkeys(folders)
    alone = dict.fromkeys(folders, False)
    if labels:
        A, methods = choice.agreement(torch.stack(labels)), [group for _, group in known]
        pairs = zip(known, choice.support(A, methods), choice.apart(A, methods), strict=True)
        for (name, _), share, odd in pairs:
            shares[name], alone[name] = share, odd
    return shares, alone
