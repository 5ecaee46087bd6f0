"""AdaBN's server: FedAvg, then after every mean BatchNorm statistics from the target.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779, algorithm 1.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedda.algorithms import adabn
from fedda.maths.average import statistics_of
from fedda.wire.packing import Arrays, Kind, pack

from .base import Numbers
from .fedavg import FedAvg


class AdaBN(FedAvg):
    """Per round: 1 model to each source and back, then 1 to the target and back."""

    def requests(self) -> list[Message]:
        """Check that the model has BatchNorm statistics, and make FedAvg's requests."""
        adabn.check_batchnorm((e.name for e in self.setup.model.entries), self.task.model.name)
        return super().requests()

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Average as FedAvg, then replace the statistics by those that the target sends back.

        Nothing else of the target's reply is used, so neither the target nor the precision of the
        wire can change the parameters.
        """
        mean, numbers = super().combine(replies)
        sent = self.as_sent(pack(mean, Kind.MODEL))
        reply = self.ask_target("estimate", {"model": sent}, needs={"steps"})
        adapted = reply.model().unpack()
        statistics = statistics_of(adapted)
        del reply, adapted  # free a whole model before the next one is packed
        return mean | statistics, numbers


STRATEGY = AdaBN
