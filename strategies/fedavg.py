"""FedAvg's server: the weighted mean of the sources' models.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1. With a target that
does not train this is the source-only baseline of federated domain adaptation.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedda.wire.packing import Arrays

from .base import FedDA, Numbers


class FedAvg(FedDA):
    """Per round: 1 model to each source, 1 model back from each."""

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Theta = sum_k w_k theta_k, parameters and buffers alike."""
        mean = self.channel.mean(replies, self.counts())
        self.weights = mean.weights
        return mean.model, mean.numbers

    def counts(self) -> dict[str, int]:
        """How much each source counts, by name: its examples, or 1."""
        uniform, counts = self.options.weighting == "uniform", self.roster.counts
        return {node.name: 1 if uniform else counts[node.name] for node in self.roster.sources}


STRATEGY = FedAvg
