"""FedAvg's server: the weighted mean of the sources' models.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1. With a target that
does not train this is the source-only baseline of federated domain adaptation.
"""

from collections.abc import Iterable, Sequence

import torch
from flwr.app import Message

from fedda.algorithms import fedavg
from fedda.config import LEAST_HIDDEN
from fedda.errors import QuorumError, SecureError
from fedda.maths.average import RunningMean
from fedda.maths.masks import FixedPoint, MaskedSum
from fedda.maths.robust import RobustMean, least_for
from fedda.wire import Arrays

from .base import FedDA, Numbers
from .sites.replies import Reply
from .sites.roster import Node


class FedAvg(FedDA):
    """Per round: 1 model to each source, 1 model back from each."""

    _memory: Arrays | None = None  # of the last round's mean, for the next one
    _try = (0, 0)  # the last round that began, and how often it did

    def requests(self) -> list[Message]:
        """Make the requests of a round's first hop: the model, or with `secure=sum` for keys."""
        if self.task.secure == "none":
            return super().requests()
        last, attempt = self._try
        self._try = (self.round, attempt + 1 if last == self.round else 1)
        numbers = {"attempt": self._try[1]}
        return [self.request(node, {}, numbers) for node in self.present()]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Theta = sum_k w_k theta_k, parameters and buffers alike."""
        if self.task.secure == "sum":
            return self._add_masked(replies)
        return self.averaged(self.accept(replies, needs={self.told}))

    def averaged(self, replies: Iterable[Reply]) -> tuple[Arrays, Numbers]:
        """Average the models of replies that have passed the checks, by the rule of `guard.mean`.

        Raises:
            QuorumError: there are too few.
        """
        self.shares = self.count(self.roster.sources)
        mean = self.mean_of(self.global_model.unpack(), self._memory)
        if isinstance(mean, RunningMean):
            self._memory = mean.memory
        told, weight = {}, {}
        for reply in replies:
            name = reply.node.name
            weight[name], told[name] = self.weigh(reply), float(reply.numbers[self.told])
            mean.add(reply.model().unpack(), weight[name], name)
            del reply  # free it before the next one is fetched
        self.enough(len(told))
        model = mean.result()
        if isinstance(mean, RobustMean):
            self.weights = mean.shares
        else:
            total = sum(weight[name] for name in sorted(told))
            self.weights = {name: weight[name] / total for name in sorted(told)}
        return model, self.of_sources(told, self.weights)

    def _add_masked(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """The same mean, of which the server sees no term.

        Raises:
            QuorumError: a site that has agreed to the sum did not add its model.
        """
        keys = {reply.node: reply.arrays["key"] for reply in self.accept(replies)}
        group = sorted(keys, key=lambda node: node.name)
        self.enough(len(group))
        uniform = self.options.weighting == "uniform"
        counts = {n.name: 1 if uniform else self.roster.counts[n.name] for n in group}
        most = max(counts.values())
        sent = {"model": self.model} | {f"key/{node.name}": keys[node] for node in group}
        like = self.model.unpack()
        total = MaskedSum(like, FixedPoint(like, len(group), most))
        private, epsilon = self.told == "epsilon", {}
        needs = {"epsilon"} if private else ()  # the loss is in the sum
        for reply in self.ask(group, "train", sent, needs, attempt=self._try[1], most=most):
            total.add(reply.arrays["masked"])
            epsilon[reply.node.name] = float(reply.numbers.get("epsilon", 0.0))
            del reply
        if total.count < len(group):
            raise QuorumError(
                f"{total.count} of the {len(group)} sites of a secure sum added their models; "
                "without the others nothing can be read."
            )
        weight = sum(counts.values())
        try:
            model, loss = total.result(weight)
        except SecureError as error:  # the masks are new in another try
            raise QuorumError(str(error)) from error
        self.post.checks.mean(model)
        self.weights = {name: count / weight for name, count in counts.items()}
        return model, self.of_sources(epsilon, self.weights) if private else {"loss": loss}

    @property
    def least_sources(self) -> int:
        """The smallest number of sources, of which also `guard.mean` tells anything."""
        guard, least = self.setup.guard, super().least_sources
        if least and self.task.secure == "sum":
            return max(least, LEAST_HIDDEN)
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
