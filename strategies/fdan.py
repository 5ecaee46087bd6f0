"""f-DAN's server: f-DANN's, with mean embeddings for gradients and a scale to be found first.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange.
"""

from collections.abc import Iterable
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedda.wire import Kind, pack

from .fdann import FDANN


class FDAN(FDANN):
    """Per round: 1 model and the witness to each site, 1 model back, and the target's witness.

    Without `fdan.scale` the first round is FedAvg's over the sources, and 1 model to the target.
    """

    shared: ClassVar[str] = "witness"
    group: ClassVar[str] = "witness"
    kind: ClassVar[Kind] = Kind.GRADIENT

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """F-DANN's, once there is a scale."""
        self._begin(server_round, arrays, grid)
        sources, scale = self._present(grid), self.scale()
        if not scale:
            return [self.request(n, {"model": self.model}) for n in sources]
        return self.invite(sources, scale=scale)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """F-DANN's; in the first round FedAvg's, under whose mean the target finds the scale."""
        if self.scale():
            return super().aggregate_train(server_round, replies)
        mean, numbers = self.average(self.roster.sources, replies)
        sent = self.as_sent(pack(mean, Kind.MODEL))
        reply = self.ask(self.roster.target, {"model": sent}, needs={"median"})
        # Features that are all alike have no scale, and any will do.
        self.memory["scale"] = float(reply.numbers["median"]) or 1.0
        return self.packed(mean), MetricRecord(dict(numbers))

    def skip_to_exchange(self) -> int:
        """Any scale will do."""
        first = 1 if self.scale() else 2
        self.memory["scale"] = 1.0
        return first

    def scale(self) -> float:
        """Of the bandwidths, the same all through a training; 0 while it is not known."""
        return self.task.options.scale or float(self.memory.get("scale", 0.0))


STRATEGY = FDAN
