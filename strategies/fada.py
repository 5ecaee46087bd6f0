"""FADA's server: sources weighed by dynamic attention, and f-DANN's exchange with pairs.

Peng et al., ICLR 2020, https://arxiv.org/abs/1911.02054, algorithm 1.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from fedda.errors import QuorumError
from fedda.maths.average import heads_of, statistics_of
from fedda.maths.gap import gap_weights
from fedda.wire.packing import Arrays, Kind, pack, pieces

from .base import Numbers
from .fdann import FDANN
from .fedavg import FedAvg


class FADA(FDANN):
    """Per round: what f-DANN with pairs sends, and K + 1 models to the target for the attention.

    Model I is FedAvg's round with attention: 1 model to each source and back, K + 1 to the target.
    """

    def requests(self) -> list[Message]:
        """Lines 3 to 13: FedAvg's requests in model I, else f-DANN's."""
        return super().requests() if self.options.adapts else FedAvg.requests(self)

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Lines 15 and 16: theta_T + sum_i w_i (theta_i - theta_0)."""
        sent, target = self.global_model.unpack(), self.roster.target
        own: Arrays | None = None
        models: dict[str, Arrays] = {}
        numbers: dict[str, Mapping[str, Any]] = {}
        for reply in self.accept(replies, needs={"steps"}):
            numbers[reply.node.name] = dict(reply.numbers)
            if reply.node is target:
                own = reply.model().unpack()
                self.remember(reply)
            else:
                models[reply.node.name] = reply.model().unpack()
        models = {name: models[name] for name in sorted(models)}
        self.enough(len(models))
        if self.options.adapts and own is None:
            raise QuorumError(f"{target.name} (target) gave no usable reply in this round.")
        base = start(sent, own)
        kept = statistics_of(own) if own else {}
        self.weights = w = self.attend(sent, base, models, kept)
        means = {
            name: float(np.mean([float(of[name]) for of in numbers.values() if name in of]))
            for name in sorted({n for of in numbers.values() for n in of} - {"steps", "seconds"})
        }
        return moved(base, sent, models, w) | kept, means

    def attend(
        self, sent: Arrays, base: Arrays, models: Mapping[str, Arrays], kept: Arrays
    ) -> dict[str, float]:
        """Line 15, eq. 3: ask the target how its clusters change -> w by source, summing to 1.

        Raises:
            QuorumError: the target gave no usable reply.
        """
        if self.options.weighting != "attention" or len(models) < 2:
            shares = self.count([node for node in self.roster.sources if node.name in models])
            return {name: shares[name] for name in models}
        alone = {n: moved(base, sent, {n: m}, {n: 1.0}) | kept for n, m in models.items()}
        arrays = {f"candidate/{n}": pack(a, Kind.MODEL) for n, a in alone.items()}
        arrays["model"] = pack(base | kept, Kind.MODEL)
        needs = {f"gain/{name}" for name in models}
        packed = {name: self.as_sent(a) for name, a in arrays.items()}
        gains = self.ask_target("attend", packed, needs).numbers
        w = gap_weights(torch.tensor([float(gains[f"gain/{n}"]) for n in models])).tolist()
        return dict(zip(models, w, strict=True))


def start(sent: Arrays, own: Arrays | None) -> Arrays:
    """Theta_T: the target's own model, or the one that was sent -> a model.

    The head is the sent one: the target has no labels to train it.
    """
    return sent if own is None else own | heads_of(sent)


def moved(
    base: Arrays, sent: Arrays, models: Mapping[str, Arrays], w: Mapping[str, float]
) -> Arrays:
    """Line 16: base + sum_i w_i (theta_i - theta_0), the w_i summing to 1 -> a model.

    BatchNorm's running statistics are the weighted mean of the sources', as a sum of changes could
    make a variance negative. Counters are the largest.
    """
    mean_of = statistics_of(sent)
    new: Arrays = {}
    for name, first in base.items():
        of_sources = [model[name] for model in models.values()]
        if first.dtype.kind != "f":
            new[name] = np.maximum.reduce([first, *of_sources])
            continue
        new[name] = np.empty_like(first)
        start = np.zeros_like(first) if name in mean_of else first
        from_ = start if name in mean_of else sent[name]
        for out, at, zero, *parts in pieces(new[name], start, from_, *of_sources):
            total = at.astype(np.float64)
            for weight, part in zip((w[s] for s in models), parts, strict=True):
                total += weight * (part.astype(np.float64) - zero)
            out[...] = total
    return new


STRATEGY = FADA
