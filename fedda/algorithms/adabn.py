"""AdaBN: FedAvg whose BatchNorm statistics are the target's own, estimated without labels.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779

    x               (N, d, ...)  what enters a BatchNorm layer in one batch, d its channels
    n               int          values per channel
    mean, variance  (d,)         mu and sigma^2 of algorithm 1, over all of the target's images
    spread          (d,)         sum of squared distances from the mean, float64

Parameters are never touched. As training normalises with each batch's own statistics, they are
FedAvg's to the last bit in every round: what AdaBN gains over FedAvg it gains by statistics alone,
which makes it the control for every other method's gain.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fedda.algorithms import fedavg
from fedda.errors import ConfigError
from fedda.methods import Hop, Method, Phase
from fedda.wire import MODEL, Part, Rule


class Config(fedavg.Config):
    """FedAvg's choice; the estimate itself has none."""


class Moments(NamedTuple):
    """What is known of a layer's inputs so far."""

    n: int
    mean: Tensor  # (d,) float64
    spread: Tensor  # (d,) float64

    @property
    def variance(self) -> Tensor:
        """Sigma^2 = spread / (n - 1), unbiased like BatchNorm's running variance -> (d,)."""
        return self.spread / (self.n - 1)


def moments(x: Tensor) -> Moments:
    """Mean and spread of every channel of one batch -> Moments over (d,)."""
    axes = [a for a in range(x.dim()) if a != 1]
    variance, mean = torch.var_mean(x, dim=axes, correction=0)
    n = x.numel() // x.shape[1]
    return Moments(n, mean.double(), variance.double() * n)


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of two sets of values as if they had been one (Chan et al., 1979) -> Moments.

    A cumulative average of the batches' variances would leave out how far the batches' means lie
    apart, and depend on the batch size; this is the variance of all that entered the layer.
    """
    n = a.n + b.n
    apart = b.mean - a.mean
    mean = a.mean + apart * (b.n / n)
    return Moments(n, mean, a.spread + b.spread + apart**2 * (a.n * b.n / n))


def check_batchnorm(entries: Iterable[str], model: str) -> None:
    """See that a model has statistics to adapt.

    Args:
        entries: names of its state.
        model: what `model.name` says.

    Raises:
        ConfigError: it has none.
    """
    if not any(name.endswith("running_mean") for name in entries):
        raise ConfigError(
            f"model.name is {model}, which has no BatchNorm layer, and adabn adapts nothing else; "
            "choose a model with BatchNorm, such as digit-cnn, mlp or resnet18, or another method."
        )


# After every mean of the sources' models.
ESTIMATE: Hop = {"target": Part(Rule(MODEL), Rule(MODEL, frozenset({"steps", "seconds"})))}

METHOD = Method(
    "adabn", "AdaBN", Config, (Phase("train", {"train": fedavg.TRAIN, "estimate": ESTIMATE}),)
)
