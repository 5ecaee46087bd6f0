"""AdaBN's server: FedAvg, and after every mean the target's own BatchNorm statistics.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779, algorithm 1.
"""

from collections.abc import Iterable
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedda import records
from fedda.algorithms import adabn
from fedda.wire import Kind, Manifest, Role

from .fedavg import FedAvg

STATISTICS = ("running_mean", "running_var")


class AdaBN(FedAvg):
    """Per round: 1 model to each source and back, then 1 to the target and back."""

    roles: ClassVar[tuple[Role, ...]] = ("source", "target")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's, for a model that has statistics to adapt."""
        adabn.check_batchnorm((e.name for e in self.layout.entries), self.task.model.name)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean's parameters as they are, with the statistics that the target sends back.

        Nothing else of its reply is used: no target, and no precision of the wire, can move them.
        """
        arrays, numbers = super().aggregate_train(server_round, replies)
        assert arrays is not None
        text = Manifest(Kind.MODEL, "float32", self.layout.entries).text
        mean = records.from_arrays(arrays, {"model": text})["model"]
        reply = self.ask(self.roster.target, {"model": self.as_sent(mean)}, needs={"steps"})
        adapted = reply.arrays["model"].unpack()
        statistics = {n: a.copy() for n, a in adapted.items() if n.endswith(STATISTICS)}
        del reply, adapted  # a whole model; the next one is packed now
        return self.packed(mean.unpack() | statistics), numbers


STRATEGY = AdaBN
