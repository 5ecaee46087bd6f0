"""MDAN's server: f-DANN's with pairs and weighed sources. Zhao et al., NeurIPS 2018."""

from collections.abc import Mapping
from math import nan
from typing import Any

import torch

from fedda.algorithms import mdan

from .fdann import FDANN
from .sites.replies import Reply
from .sites.roster import Node


class MDAN(FDANN):
    """Per round: what f-DANN with pairs sends, and to the target a weight per source."""

    def w(self) -> dict[str, float]:
        """The weights of this round's sources, by CE and both halves of d in the last round."""
        last, half, o = self.memory.numbers.get("last", {}), "discriminator-loss", self.options
        target = self.roster.target.name
        names = [(f"loss/{s}", f"{half}/{s}", f"{half}/{s}/{target}") for s in self.pairs]
        found = [[last.get(name, nan) for name in of_source] for of_source in names]
        CE, ours, theirs = torch.tensor(found, dtype=torch.float64).T
        f = mdan.domain_losses(CE, ours + theirs, o.mu, o.sign)
        return dict(zip(self.pairs, mdan.weights(f, o.gamma, o.max).tolist(), strict=True))

    def numbers_for(self, node: Node) -> Mapping[str, float]:
        """To the target the weights."""
        return {f"weight/{s}": w for s, w in self.w().items() if node is self.roster.target}

    def weigh(self, reply: Reply) -> float:
        """Of a source w_j times what all sources count in f-DANN."""
        w = self.w().get(reply.node.name)
        return super().weigh(reply) if w is None else w * sum(self.shares[s] for s in self.pairs)

    def means(self, numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """F-DANN's; all numbers are remembered for the next round, and no longer."""
        self.memory.numbers["last"] = {f"{n}/{s}": of[n] for s, of in numbers.items() for n in of}
        return super().means(numbers)


STRATEGY = MDAN
