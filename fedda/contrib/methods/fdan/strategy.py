"""f-DAN's server: f-DANN's, but sites sum mean embeddings, and the target first measures a scale.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from flwr.app import Message

from fedda.errors import QuorumError
from fedda.strategies.base import Numbers
from fedda.strategies.fdann import FDANN
from fedda.strategies.fedavg import FedAvg
from fedda.strategies.sites.replies import Reply
from fedda.strategies.sites.roster import Node
from fedda.wire.packing import Arrays, Kind, pack


class FDAN(FDANN):
    """Per round: 1 model and the witness to each site, 1 model back, and the target's witness.

    Without `fdan.scale` the first round is FedAvg's over the sources; then 1 model goes to the
    target, which measures the scale. Later its reply of a round has the scale of the next one.
    """

    shared: ClassVar[str] = "witness"
    group: ClassVar[str] = "witness"
    kind: ClassVar[Kind] = Kind.GRADIENT

    def requests(self) -> list[Message]:
        """Make FedAvg's requests in the phase that measures the scale, then f-DANN's."""
        return FedAvg.requests(self) if self.phase.name == "scale" else super().requests()

    def numbers_for(self, node: Node) -> Mapping[str, float]:
        """Return the scale of the bandwidths, the same for every site."""
        return {"scale": self.scale()}

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Combine as f-DANN; in the scale's phase as FedAvg, then ask the target for the scale."""
        if self.phase.name != "scale":
            return super().combine(replies)
        mean, numbers = self.average(self.roster.sources, replies)
        sent = self.as_sent(pack(mean, Kind.MODEL))
        reply = self.ask_target("measure", {"model": sent}, needs={"median"})
        # A median of 0 means that the features are all equal: then any scale will do.
        self.memory.numbers["scale"] = float(reply.numbers["median"]) or 1.0
        return mean, numbers

    def remember(self, reply: Reply) -> None:
        """Remember the target's witnesses, and the scale of its features for the next round.

        Raises:
            QuorumError: a witness or the scale is missing.
        """
        super().remember(reply)
        if not self.options.scale:
            if "median" not in reply.numbers:
                raise QuorumError(f"{reply.node.name} sent no median distance of its features.")
            self.memory.numbers["scale"] = float(reply.numbers["median"]) or 1.0

    def scale(self) -> float:
        """Return the scale of this round's bandwidths."""
        return self.options.scale or float(self.memory.numbers.get("scale", 1.0))


STRATEGY = FDAN
