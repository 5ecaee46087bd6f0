"""FedAvg's server: the weighted mean of the sources' models.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1. With a target that
does not train this is the source-only baseline of federated domain adaptation.
"""

from collections.abc import Iterable, Sequence

import torch
from flwr.app import Message

from fedda.algorithms import fedavg
from fedda.maths.average import RunningMean
from fedda.wire import Arrays

from .base import FedDA, Numbers
from .sites.replies import Reply
from .sites.roster import Node


class FedAvg(FedDA):
    """Per round: 1 model to each source, 1 model back from each."""

    _memory: Arrays | None = None  # of the last round's mean, for the next one

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Theta = sum_k w_k theta_k, parameters and buffers alike."""
        self.shares = self.count(self.roster.sources)
        mean = RunningMean(self.global_model.unpack(), self._memory)
        self._memory = mean.memory
        losses, weight = {}, {}
        for reply in self.accept(replies, needs={"loss"}):
            name = reply.node.name
            weight[name], losses[name] = self.weigh(reply), float(reply.numbers["loss"])
            mean.add(reply.model().unpack(), weight[name])
            del reply  # free it before the next one is fetched
        self.enough(len(losses))
        total = sum(weight[name] for name in sorted(losses))
        self.weights = {name: weight[name] / total for name in sorted(losses)}
        loss = sum(self.weights[name] * losses[name] for name in sorted(losses))
        return mean.result(), {"loss": loss}

    def count(self, nodes: Sequence[Node]) -> dict[str, float]:
        """Return the sites' shares by name: by examples, or equal; they sum to 1."""
        counts = torch.tensor([self.roster.counts[node.name] for node in nodes])
        shares = fedavg.weights(counts, self.options.weighting).tolist()
        return {node.name: share for node, share in zip(nodes, shares, strict=True)}

    def weigh(self, reply: Reply) -> float:
        """Return the share of the reply's site."""
        return self.shares[reply.node.name]


STRATEGY = FedAvg
