"""AdaBN's server: FedAvg, and after every mean the target's own BatchNorm statistics.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779, algorithm 1.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedda.algorithms import adabn
from fedda.wire import Arrays, Kind, pack

from .base import Numbers
from .fedavg import FedAvg

STATISTICS = ("running_mean", "running_var")


class AdaBN(FedAvg):
    """Per round: 1 model to each source and back, then 1 to the target and back."""

    def requests(self) -> list[Message]:
        """FedAvg's, for a model that has statistics to adapt."""
        adabn.check_batchnorm((e.name for e in self.setup.model.entries), self.task.model.name)
        return super().requests()

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """The mean's parameters as they are, with the statistics that the target sends back.

        Nothing else of its reply is used: no target, and no precision of the wire, can move them.
        """
        mean, numbers = super().combine(replies)
        sent = self.as_sent(pack(mean, Kind.MODEL))
        reply = self.ask_target("estimate", {"model": sent}, needs={"steps"})
        adapted = reply.model().unpack()
        statistics = {n: a.copy() for n, a in adapted.items() if n.endswith(STATISTICS)}
        del reply, adapted  # a whole model; the next one is packed now
        return mean | statistics, numbers


STRATEGY = AdaBN
