"""FedAvg's server: the weighted mean of the sources' models.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1. With a target that
does not train this is the source-only baseline of federated domain adaptation.
"""

from collections.abc import Iterable, Sequence

import torch
from flwr.app import Message

from fedda.algorithms import fedavg
from fedda.maths.average import RunningMean
from fedda.maths.robust import RobustMean, least_for
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
        mean = self.mean_of(self.global_model.unpack(), self._memory)
        if isinstance(mean, RunningMean):
            self._memory = mean.memory
        losses, weight = {}, {}
        for reply in self.accept(replies, needs={"loss"}):
            name = reply.node.name
            weight[name], losses[name] = self.weigh(reply), float(reply.numbers["loss"])
            mean.add(reply.model().unpack(), weight[name], name)
            del reply  # free it before the next one is fetched
        self.enough(len(losses))
        model = mean.result()
        if isinstance(mean, RobustMean):
            self.weights = mean.shares
        else:
            total = sum(weight[name] for name in sorted(losses))
            self.weights = {name: weight[name] / total for name in sorted(losses)}
        loss = sum(self.weights[name] * losses[name] for name in sorted(losses))
        return model, {"loss": loss}

    @property
    def least_sources(self) -> int:
        """The smallest number of sources, of which also `guard.mean` tells anything."""
        guard, least = self.setup.guard, super().least_sources
        return max(least, least_for(guard.mean, guard.liars)) if least else 0

    def mean_of(self, like: Arrays, memory: Arrays | None = None) -> RunningMean | RobustMean:
        """Make an empty mean of models, by the rule of `guard.mean`.

        Args:
            like: the model that was sent.
            memory: of an earlier mean, which a weighted one uses again.
        """
        guard = self.setup.guard
        if guard.mean == "weighted":
            return RunningMean(like, memory)
        return RobustMean(like, guard.mean, guard.liars)

    def count(self, nodes: Sequence[Node]) -> dict[str, float]:
        """Return the sites' shares by name: by examples, or equal; they sum to 1."""
        counts = torch.tensor([self.roster.counts[node.name] for node in nodes])
        shares = fedavg.weights(counts, self.options.weighting).tolist()
        return {node.name: share for node, share in zip(nodes, shares, strict=True)}

    def weigh(self, reply: Reply) -> float:
        """Return the share of the reply's site."""
        return self.shares[reply.node.name]


STRATEGY = FedAvg
