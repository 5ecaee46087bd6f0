"""AutoDIAL: alignment layers in place of BatchNorm, which learn how far to align each layer.

Carlucci et al., ICCV 2017, https://arxiv.org/abs/1704.08082, sections 3.1 and 3.2, and the authors'
layer, https://github.com/ducksoup/autodial.

    x              (N, d, ...)  input of a layer; d channels
    mu, var        (d,)         its mean and variance over one side's images: sources s, target t
    square         (d,)         its second moment, var + mu^2; means of it mix exactly
    alpha          scalar       in [1/2, 1], one per layer, learnt; at 1 each side has its own
                                moments, at 1/2 both have the same
    lambda         float        weight of the entropy at the target (`autodial.entropy`)

An image of side s is normalised by the moments of the mixture alpha q_s + (1 - alpha) q_t, one of
the target by alpha q_t + (1 - alpha) q_s. The loss is the sources' cross entropy plus lambda times
the entropy of the predictions for the target's images. The target predicts by its own mixture.

Federated: in one place every step has a batch of each side. Here a site has batches of its own
side alone, with which it trains and whose gradient goes through the moments. The other side's
moments are those of the last round, so they are a round late, and constants; the sources' are the
weighted mean over all of them. In the first round there are none, and alpha is 1. In each round the
server adds the target's change of the model to the mean of the sources' models, as the loss adds
the target's entropy to the sources' cross entropies: with one step of SGD per round the two are the
same. Momentum and further steps make them differ. The authors' networks are pretrained, and one of
them has such a layer on the logits as well.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fedda.algorithms import fedavg
from fedda.config.sections import Scalar
from fedda.errors import ConfigError
from fedda.maths.average import STATISTICS
from fedda.maths.schedule import Late, growth
from fedda.methods import Hop, Method, Phase
from fedda.wire import MODEL, Part, Rule

Side = Literal["source", "target"]
OTHER: Mapping[Side, Side] = {"source": "target", "target": "source"}
LOWEST = 0.5  # of alpha


class Config(fedavg.Config):
    """AutoDIAL's setting, and FedAvg's for the mean of the sources."""

    entropy: float = Field(default=0.1, ge=0, le=100)
    """lambda, the weight of the entropy at the target"""
    schedule: Late = "late"
    """late: the entropy has no weight in the first half of the rounds, then a growing one, as it
    makes a network of random weights sure before it has learnt; constant: the paper, whose networks
    are pretrained"""

    def entropy_at(self, q: float) -> float:
        """The weight of the entropy when a share q of the training is over -> float."""
        return self.entropy * growth(q, self.schedule)


def mixture(
    mu: Tensor, var: Tensor, other_mu: Tensor, other_var: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance of alpha q + (1 - alpha) q_other -> (d,), (d,)."""
    mixed = alpha * mu + (1 - alpha) * other_mu
    apart = alpha * (1 - alpha) * (mu - other_mu) ** 2
    return mixed, alpha * var + (1 - alpha) * other_var + apart


def entropy(logits: Tensor) -> Tensor:
    """Mean entropy of the predictions (N, C) -> scalar."""
    log_p = logits.log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1).mean()


class Aligned(BatchNorm):
    """A BatchNorm layer that normalises by the mixture of two sides' moments.

    In evaluation it is the BatchNorm layer of its running moments, which are the target's mixture.

    Args:
        like: the layer in whose place it comes.

    Attributes:
        alpha: (1,) the share of the own side.
        side: whose batches it is given in training.
        mixes: whether it knows the other side's moments.
    """

    undecayed = ("alpha",)  # as in the authors' configuration
    source_mean: Tensor
    source_square: Tensor
    target_mean: Tensor
    target_square: Tensor

    def __init__(self, like: BatchNorm) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine)
        self.load_state_dict(like.state_dict())
        self.alpha = nn.Parameter(torch.ones(1))
        for side in OTHER:
            self.register_buffer(f"{side}_mean", torch.zeros(like.num_features))
            self.register_buffer(f"{side}_square", torch.ones(like.num_features))
        self.side: Side = "source"
        self.mixes = False

    def _check_input_dim(self, input: Tensor) -> None:
        """Take any number of axes, as the layers of one and of two dimensions do together."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch of one side."""
        if not self.training:
            return super().forward(input)
        x = input.float()  # moments need the precision, as BatchNorm's do
        axes = [a for a in range(x.dim()) if a != 1]
        var, mu = torch.var_mean(x, dim=axes, correction=0)
        self._follow(mu.detach(), var.detach())
        if self.mixes:
            other = self.moments(OTHER[self.side])
            mu, var = mixture(mu, var, *other, self.alpha.clamp(LOWEST, 1.0))
        shape = [1, -1, *(1 for _ in axes[1:])]
        y = (x - mu.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    def moments(self, side: Side) -> tuple[Tensor, Tensor]:
        """Mean and variance of one side as last received -> (d,), (d,)."""
        mu, square = getattr(self, f"{side}_mean"), getattr(self, f"{side}_square")
        return mu, (square - mu**2).clamp_min(0)

    def _follow(self, mu: Tensor, var: Tensor) -> None:
        """Move this side's moments towards a batch's, as BatchNorm moves its running ones."""
        step = self.momentum or 0.1
        getattr(self, f"{self.side}_mean").lerp_(mu, step)
        getattr(self, f"{self.side}_square").lerp_(var + mu**2, step)


def extend(model: Any, settings: Mapping[str, Any]) -> None:
    """Put an alignment layer in the place of every BatchNorm layer that learns.

    Raises:
        ConfigError: there is none.
    """
    if not any(isinstance(m, BatchNorm) for m in model.modules()):
        raise ConfigError(
            "autodial aligns what enters BatchNorm layers, and this network has none that learns; "
            "choose a model.name with BatchNorm, such as digit-cnn, mlp or resnet18, or another "
            "method."
        )
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, BatchNorm) and not isinstance(child, Aligned):
                setattr(module, name, Aligned(child))


def layers(model: nn.Module) -> list[Aligned]:
    """The alignment layers, in order."""
    return [m for m in model.modules() if isinstance(m, Aligned)]


def moment_of(name: str) -> str:
    """Say what an entry of a model holds: source's, target's or running moments, or alpha."""
    last = name.rpartition(".")[2]
    if last in STATISTICS:
        return "running"
    if last in ("source_mean", "source_square", "target_mean", "target_square"):
        return last.partition("_")[0]
    return last if last == "alpha" else ""


# Sources and target train at the same time; each sends its model with its side's moments.
TRAIN: Hop = {
    "source": Part(Rule(MODEL), fedavg.TRAINED, labels=True, needed="mean"),
    "target": Part(Rule(MODEL), fedavg.TRAINED),
}

PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {"entropy": 0.1, "schedule": "constant"}  # section 3.2
}

METHOD = Method(
    "autodial",
    "AutoDIAL",
    Config,
    (Phase("align", {"train": TRAIN}),),
    PRESETS,
    on_features={"schedule": "constant"},  # as its paper, whose networks are pretrained, too
    extend=extend,
    extension=lambda options: {},
    batchnorm=True,
)
