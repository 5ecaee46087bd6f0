"""MDAN's server: f-DANN's with pairs, and sources with weights. Zhao et al., NeurIPS 2018."""

from collections.abc import Mapping
from math import nan
from typing import Any

import torch

from fedda.algorithms import mdan

from .fdann import FDANN
from .sites.replies import Reply
from .sites.roster import Node


class MDAN(FDANN):
    """Per round: what f-DANN with pairs sends, and a weight per source to the target."""

    def w(self) -> dict[str, float]:
        """Return this round's weight per source, from CE and both halves of d of the last round."""
        last, half, o = self.memory.numbers.get("last", {}), "discriminator-loss", self.options
        target = self.roster.target.name
        names = [(f"loss/{s}", f"{half}/{s}", f"{half}/{s}/{target}") for s in self.pairs]
        losses = [[last.get(name, nan) for name in of_source] for of_source in names]
        CE, ours, theirs = torch.tensor(losses, dtype=torch.float64).T
        f = mdan.domain_losses(CE, ours + theirs, o.mu, o.sign)
        return dict(zip(self.pairs, mdan.weights(f, o.gamma, o.max).tolist(), strict=True))

    def numbers_for(self, node: Node) -> Mapping[str, float]:
        """Return the weights for the target, nothing for other sites."""
        return {f"weight/{s}": w for s, w in self.w().items() if node is self.roster.target}

    def weigh(self, reply: Reply) -> float:
        """Weigh a source by w_j times the sum of the sources' shares, the target as in f-DANN."""
        w = self.w().get(reply.node.name)
        return super().weigh(reply) if w is None else w * sum(self.shares[s] for s in self.pairs)

    def means(self, numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Return f-DANN's means, and remember all numbers for the next round only."""
        self.memory.numbers["last"] = {f"{n}/{s}": of[n] for s, of in numbers.items() for n in of}
        return super().means(numbers)


STRATEGY = MDAN
