"""f-DAN's server: f-DANN's, with mean embeddings for gradients and a scale to be found first.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange.
"""

from collections.abc import Iterable
from typing import ClassVar

from flwr.app import Message

from fedda.wire import Arrays, Kind, pack

from .base import Numbers
from .fdann import FDANN


class FDAN(FDANN):
    """Per round: 1 model and the witness to each site, 1 model back, and the target's witness.

    Without `fdan.scale` the first round is FedAvg's over the sources, and 1 model to the target.
    """

    shared: ClassVar[str] = "witness"
    group: ClassVar[str] = "witness"
    kind: ClassVar[Kind] = Kind.GRADIENT

    def requests(self) -> list[Message]:
        """FedAvg's while the scale is to be found, then f-DANN's."""
        sources = self.present()
        if self.phase.name == "scale":
            return [self.request(node, {"model": self.model}) for node in sources]
        return self.invite(sources, scale=self.scale())

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """F-DANN's; in the first round FedAvg's, under whose mean the target finds the scale."""
        if self.phase.name != "scale":
            return super().combine(replies)
        mean, numbers = self.average(self.roster.sources, replies)
        sent = self.as_sent(pack(mean, Kind.MODEL))
        reply = self.ask_target("measure", {"model": sent}, needs={"median"})
        # Features that are all alike have no scale, and any will do.
        self.memory.numbers["scale"] = float(reply.numbers["median"]) or 1.0
        return mean, numbers

    def scale(self) -> float:
        """Of the bandwidths, the same all through a training."""
        return self.options.scale or float(self.memory.numbers.get("scale", 1.0))


STRATEGY = FDAN
