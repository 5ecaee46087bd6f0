"""Centring: each class of a source is moved onto the same class of the target, in closed form.

The class means under pseudo-labels are those of Long et al., JDA, ICCV 2013. Moving the examples by
their difference, at each source by itself, is ours: nothing of a source leaves but its model.

    N, d, C  sizes      examples, values of an input, classes
    x        (N, d)     what the network's first layer takes: vectors, or outputs of a frozen part
    p        (N, C)     probabilities that the model gives the target's examples
    y        (N,)       classes: a source's labels, or the model's at the target, argmax p
    mu       (C, d)     mean of each class: mu_S at a source, mu_T at the target, of the surest
    known    (C,) bool  classes of which the target has enough examples for their mean to leave

It believes what the model predicts, so it needs one that is right about most of the examples.
"""

import math

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedda.algorithms import fedavg
from fedda.errors import ConfigError
from fedda.methods import Hop, Method, Phase
from fedda.wire import MODEL, SECONDS, Part, Rule
from fedda.wire.packing import Entry, Kind, Manifest

TAIL = 4  # standard deviations of noise by which a count is told as smaller


class Config(fedavg.Config):
    """FedAvg's setting, and when the target's means are taken."""

    plain_share: float = Field(default=0.5, ge=0, le=1)
    """share of the rounds before the target's means, in which sources train as they are; 0: none,
    the run's first model predicts, as with run.start-from"""

    surest: float = Field(default=0.5, gt=0, le=1)
    """share of each predicted class whose mean the target tells: the examples of which the model is
    surest, as many as a site asks for at least; 1: all"""

    def plain_rounds(self, rounds: int) -> int:
        """How many rounds of so many are FedAvg's."""
        return math.ceil(self.plain_share * rounds)


def surest(p: Tensor, share: float, least: int = 1) -> Tensor:
    """The share of each predicted class with the largest p_iy, or `least` of it -> (N,) bool."""
    confidence, y = p.max(dim=1)
    order = confidence.sort(descending=True, stable=True).indices
    kept = torch.zeros_like(y, dtype=torch.bool)
    for c in y.unique():
        members = order[y[order] == c]
        kept[members[: max(math.ceil(share * len(members)), least)]] = True
    return kept


def class_means(x: Tensor, y: Tensor, C: int, least: int = 1) -> tuple[Tensor, Tensor]:
    """mu_c = mean of x_i with y_i = c -> mu (C, d), known (C,) bool.

    Args:
        x: (N, d) inputs.
        y: (N,) their classes.
        C: number of classes.
        least: examples that a class must have; the mean of one with fewer is zeros.
    """
    n = torch.bincount(y, minlength=C)  # (C,)
    known = n >= max(least, 1)
    total = x.new_zeros(C, x.shape[1]).index_add_(0, y, x)
    return torch.where(known[:, None], total / n.clamp_min(1)[:, None].to(x), 0), known


def noisily_known(
    y: Tensor, C: int, least: int, noise: float, draws: np.random.Generator
) -> Tensor:
    """Which classes have `least` examples, and never one with fewer -> (C,) bool.

    A count has the noise of a mean, half of `noise` for what one example changes, less its tail.
    """
    n = torch.bincount(y, minlength=C)
    less = torch.from_numpy(noise / 2 * np.clip(TAIL - draws.standard_normal(C), 0, None))
    return n - less >= max(least, 1)


def shift(x: Tensor, y: Tensor, mu: Tensor, known: Tensor) -> Tensor:
    """What moves each class of a source onto the target's, (mu_T - mu_S)_c -> (C, d).

    It is zero for classes that the target does not tell.

    Args:
        x: (N, d) the source's inputs.
        y: (N,) their labels.
        mu: (C, d) the target's means.
        known: (C,) which of them the target tells.
    """
    own, _ = class_means(x, y, len(mu))
    return torch.where(known[:, None], mu - own, 0)


def noisy(
    mu: Tensor, known: Tensor, x: Tensor, y: Tensor, noise: float, draws: np.random.Generator
) -> Tensor:
    """mu_c + noise R / n_c z, z standard normal, R the largest |x_i| -> (C, d).

    One example changes a mean by 2 R / n_c at most. Zeros of classes that are not told stay so.
    z is not drawn by torch, of whose seeds 32 bits count: few enough to try them all.
    """
    n = torch.bincount(y, minlength=len(mu)).clamp_min(1)
    R = float(x.norm(dim=1).max())
    z = torch.from_numpy(draws.standard_normal(mu.shape)).to(mu)
    return torch.where(known[:, None], mu + noise * R / n[:, None].to(mu) * z, 0)


def layouts(options: Config, model: Manifest) -> dict[str, Manifest]:
    """The layout of the target's means, which follows from the model's first and last layer.

    Raises:
        ConfigError: the first layer is a convolution: its inputs are images.
    """
    first = next(e for e in model.entries if len(e.shape) > 1)
    if len(first.shape) != 2:
        raise ConfigError(
            f"{first.name} is a convolution, so a class mean would be a picture of the target's "
            "images; centring needs vectors: set model.train=bottleneck, or model.name to mlp."
        )
    C = next(e.shape[0] for e in model.entries if e.name == "head.weight")
    entries = (Entry("mu", "float32", (C, first.shape[1])), Entry("known", "bool", (C,)))
    return {"means": Manifest(Kind.STATISTICS, model.floats, entries)}


MEANS = {"means": Kind.STATISTICS}
# A source's own class means are not private, so DP-SGD on what they moved would not be either.
TRAIN: Hop = {"source": Part(Rule(MODEL | MEANS), fedavg.TRAINED, labels=True, needed="mean")}
MEASURE: Hop = {"target": Part(Rule(MODEL), Rule(MEANS, frozenset({SECONDS})))}

METHOD = Method(
    "centring",
    "Centring",
    Config,
    (
        Phase(
            "plain",
            {"train": fedavg.AVERAGED},
            rounds=lambda options, rounds: options.plain_rounds(rounds),
            prepares=True,
        ),
        Phase("centred", {"measure": MEASURE, "train": TRAIN}, layouts=layouts),
    ),
)
