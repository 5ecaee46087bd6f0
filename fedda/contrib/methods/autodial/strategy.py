"""AutoDIAL's server: the mean of the sources' models plus the target's change of the model.

Carlucci et al., ICCV 2017, https://arxiv.org/abs/1704.08082.
"""

from collections.abc import Iterable

import numpy as np
from flwr.app import Message

from fedda.errors import QuorumError
from fedda.strategies.base import Numbers
from fedda.strategies.fedavg import FedAvg
from fedda.wire.packing import Arrays

from .algorithm import LOWEST, moment_of


class AutoDIAL(FedAvg):
    """Per round: 1 model to each site, 1 model back from each."""

    def requests(self) -> list[Message]:
        """Send the model, with both sides' moments, to the sources and to the target."""
        return self.channel.requests(self.present(), [self.roster.target])

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Average the sources' models, and add what the target changed.

        Raises:
            QuorumError: the target gave no usable reply, or too few sources did.
        """
        target = self.roster.target
        mean = self.channel.mean(replies, self.counts(), target)
        self.weights = mean.weights
        if mean.beside is None or "loss" not in mean.beside.numbers:
            raise QuorumError(f"{target.name} (target) gave no usable reply in this round.")
        numbers = {**mean.numbers, "entropy": float(mean.beside.numbers["loss"])}
        return joined(mean.model, self.model.before.unpack(), mean.beside.model().unpack()), numbers


def joined(sources: Arrays, sent: Arrays, target: Arrays) -> Arrays:
    """The next model: parameters as the sum of both changes, moments of each side from that side.

    Args:
        sources: the mean of the sources' models.
        sent: the model that all sites were sent.
        target: the target's model.
    """
    model: Arrays = {}
    for name, mean in sources.items():
        what = moment_of(name)
        if what == "target":
            model[name] = target[name]
        elif what or mean.dtype.kind != "f":
            model[name] = mean
        else:
            model[name] = mean + (target[name] - sent[name])
    for name in [n for n in model if moment_of(n) == "alpha"]:
        alpha = model[name] + (target[name] - sent[name])
        model[name] = np.clip(alpha, LOWEST, 1.0).astype(alpha.dtype)
        mixed(model, name.removesuffix("alpha"))
    return model


def mixed(model: Arrays, layer: str) -> None:
    """Set a layer's running moments to the target's mixture, by which the target predicts."""
    alpha = float(model[f"{layer}alpha"][0])
    sides = (("target", alpha), ("source", 1 - alpha))
    terms = [(share, f"{layer}{side}_") for side, share in sides]
    mean, square = (
        sum((share * model[f"{name}{what}"].astype(np.float64) for share, name in terms), 0.0)
        for what in ("mean", "square")
    )
    for entry, values in zip(
        ("running_mean", "running_var"), (mean, square - mean**2), strict=True
    ):
        name = f"{layer}{entry}"
        model[name] = np.maximum(values, 0 if entry == "running_var" else -np.inf).astype(
            model[name].dtype
        )


STRATEGY = AutoDIAL
