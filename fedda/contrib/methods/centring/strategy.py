"""Centring's server: FedAvg, in which sources are told the class means of the target."""

from flwr.app import Message

from fedda.strategies.fedavg import FedAvg
from fedda.wire.packing import Packed

from . import algorithm as centring


class Centring(FedAvg):
    """As FedAvg; once, between two rounds, 1 model to the target and its C means back."""

    def requests(self) -> list[Message]:
        """Make FedAvg's requests; in the first round of the second phase after the means.

        Raises:
            ConfigError: the network takes images, of which no mean may leave.
        """
        centring.layouts(self.options, self.setup.model)  # known before the first round
        if self.phase.name == "centred" and "means" not in self.memory.arrays:
            reply = self.ask_target("measure", {"model": self.model})
            self.memory.arrays["means"] = reply.arrays["means"]
        return super().requests()

    def sent_along(self) -> dict[str, Packed]:
        """The target's means, which all sources need in every round of the second phase."""
        return dict(self.memory.arrays) if self.phase.name == "centred" else {}


STRATEGY = Centring
