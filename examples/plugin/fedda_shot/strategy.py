"""SHOT-IM's server: FedAvg of the sources, then a model to the target and back."""

from collections.abc import Iterable

from flwr.app import Message

from fedda.errors import QuorumError
from fedda.strategies.base import Numbers
from fedda.strategies.fedavg import FedAvg
from fedda.wire.packing import Arrays


class SHOT(FedAvg):
    """FedAvg in the phase `source`; in the phase `adapt` only the target takes part."""

    def requests(self) -> list[Message]:
        """The model, to the sites that have a part in this phase."""
        nodes = self.present() or [self.roster.target]  # a phase without sources: none is present
        return [self.request(node, {"model": self.model}) for node in nodes]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """The sources' mean, or the model that the target has adapted."""
        if self.phase.name == "source":
            return super().combine(replies)
        for reply in self.accept(replies, needs={"loss"}):
            self.weights = {reply.node.name: 1.0}
            return reply.model().unpack(), {"loss": float(reply.numbers["loss"])}
        raise QuorumError(f"{self.roster.target.name} (target) gave no usable reply.")


STRATEGY = SHOT
