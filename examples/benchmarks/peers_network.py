"""What the programs of peers_simulation.py share: the sites' files, the network, its training.

It needs torch and numpy alone, as it runs in the environments of other frameworks, too.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

SOURCE, TARGET = "source-", "target"  # how the files are called: .npz, of bytes (N, 16, 16)


class Wanted(NamedTuple):
    """What each peer trains: images and steps are those of one source in one round."""

    rounds: int
    batch: int
    lr: float


def network() -> nn.Sequential:
    """The layers of fedda's `lenet` for images of one channel and 16 x 16 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(50, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


@cache  # in each of Ray's processes; not in the program itself, which Ray pickles
def sources(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Each source's images as floats in [0, 1] (N, 1, 16, 16), and labels (N,)."""
    return [read(path, "train") for path in sorted(folder.glob(f"{SOURCE}*.npz"))]


def tests(folder: Path) -> tuple[Tensor, Tensor]:
    """The target's test images and labels."""
    return read(folder / f"{TARGET}.npz", "test")


def read(path: Path, part: str) -> tuple[Tensor, Tensor]:
    """One part, train or test, of a site's file."""
    with np.load(path) as file:
        x, y = torch.from_numpy(file[f"x_{part}"]), torch.from_numpy(file[f"y_{part}"])
    return x[:, None].float() / 255, y


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers."""
    model.eval()
    return float((model(x).argmax(dim=1) == y).float().mean())
