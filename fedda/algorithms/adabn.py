"""AdaBN: FedAvg with BatchNorm statistics estimated on the target's images, without labels.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779

    x               (N, d, ...)  input of a BatchNorm layer for one batch, with d channels
    n               int          values per channel
    mean, variance  (d,)         mu and sigma^2 of algorithm 1, over all of the target's images
    spread          (d,)         sum of squared distances from the mean, float64

AdaBN changes no parameter. Training normalises by each batch's own statistics, so in every round
the parameters are FedAvg's to the last bit. AdaBN's gain over FedAvg thus comes from the statistics
alone, which makes AdaBN the control for the gain of every other method.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedda.algorithms import fedavg
from fedda.errors import ConfigError
from fedda.maths.masks import layouts
from fedda.methods import Hop, Method, Phase
from fedda.models import Model, batch_statistics, batchnorms, inputs_of
from fedda.wire import MODEL, Part, Rule


class Config(fedavg.Config):
    """FedAvg's setting; the estimate has no settings."""


class Moments(NamedTuple):
    """Count, mean and spread of a layer's inputs so far."""

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
    """Moments of the union of two sets of values (Chan et al., 1979) -> Moments.

    The result is the variance of all values that entered the layer. A cumulative average of the
    batches' variances would ignore the distances between the batches' means, and so depend on the
    batch size.
    """
    n = a.n + b.n
    apart = b.mean - a.mean
    mean = a.mean + apart * (b.n / n)
    return Moments(n, mean, a.spread + b.spread + apart**2 * (a.n * b.n / n))


@torch.no_grad()
def estimate(model: Model, batches: Iterable[Tensor]) -> int:
    """Algorithm 1: estimate BatchNorm's statistics anew, from forward passes -> how many.

    A layer's inputs depend on the statistics of the layers before it. So each batch is normalised
    by its own statistics, as in training. Dropout stays off, as in the test that follows.

    Args:
        model: its running statistics are replaced, and no parameter changes.
        batches: inputs of the model, in random order.
    """
    seen: dict[nn.Module, Moments] = {}
    layers, steps = list(batchnorms(model).values()), 0
    with batch_statistics(model), inputs_of(layers) as entering:
        for x in batches:
            model(x)
            for layer in layers:
                batch = moments(entering[layer])
                seen[layer] = merge(seen[layer], batch) if layer in seen else batch
            steps += 1
    for layer in layers:
        if layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.copy_(seen[layer].mean)
            layer.running_var.copy_(seen[layer].variance)
    return steps


def check_batchnorm(entries: Iterable[str], model: str) -> None:
    """Check that a model has BatchNorm statistics to adapt.

    Args:
        entries: names in the model's state.
        model: the value of `model.name`.

    Raises:
        ConfigError: the model has no BatchNorm layer.
    """
    if not any(name.endswith("running_mean") for name in entries):
        raise ConfigError(
            f"model.name is {model}, which has no BatchNorm layer, and adabn adapts nothing else; "
            "choose a model with BatchNorm, such as digit-cnn, mlp or resnet18, or another method."
        )


# The second hop of each round, under the mean of the sources' models.
ESTIMATE: Hop = {"target": Part(Rule(MODEL), Rule(MODEL, frozenset({"steps", "seconds"})))}

METHOD = Method(
    "adabn",
    "AdaBN",
    Config,
    (Phase("train", {"train": fedavg.TRAIN, "estimate": ESTIMATE}),),
    robust=True,
    summed=(
        Phase(
            "train",
            {"keys": fedavg.KEYS, "train": fedavg.MASKED, "estimate": ESTIMATE},
            layouts=layouts,
        ),
    ),
)
