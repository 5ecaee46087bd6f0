"""FedAvg's server: the weighted mean of the sources' models.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1. With a target that
does not train this is the source-only baseline of federated domain adaptation.
"""

from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, Message, MetricRecord

from fedda.algorithms import fedavg
from fedda.average import RunningMean

from .base import FedDA


class FedAvg(FedDA):
    """Per round: 1 model to each source, 1 model back from each."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Theta = sum_k w_k theta_k, parameters and buffers alike."""
        sources = self.roster.sources
        counts = torch.tensor([self.roster.counts[n.name] for n in sources])
        shares = fedavg.weights(counts, self.task.options.weighting).tolist()
        weight = {n.name: w for n, w in zip(sources, shares, strict=True)}
        mean = RunningMean(self.global_model.unpack())
        losses = {}
        for reply in self.accept(replies, needs={"loss"}):
            mean.add(reply.arrays["model"].unpack(), weight[reply.node.name])
            losses[reply.node.name] = float(reply.numbers["loss"])
            del reply  # not held while the next one is fetched
        self.enough(len(losses))
        total = sum(weight[name] for name in sorted(losses))
        self.weights = {name: weight[name] / total for name in sorted(losses)}
        loss = sum(self.weights[name] * losses[name] for name in sorted(losses))
        return self.packed(mean.result()), MetricRecord({"loss": loss})


STRATEGY = FedAvg
