"""How a strategy gets its sources' models: each as it is, their sum under masks, or none to read.

    requests(nodes)     makes the messages that begin a round
    each(replies)       yields the sources' replies, one model in each
    mean(replies)       returns the mean of the sources' models
    onward(sources)     returns their models as the target receives them
    averaged(...)       returns the mean that the server makes, or that the target has made

A strategy calls these and does not know which channel it has; `fedda.secure.hiding` says which
methods may have which. Masks and seals need a hop for keys before the one that trains.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Message

from fedda.algorithms import fedavg
from fedda.config import LEAST_HIDDEN, GuardConfig
from fedda.errors import QuorumError, SecureError
from fedda.maths.average import RobustMean, RunningMean, least_for
from fedda.results.read import counted
from fedda.secure.masks import FixedPoint, MaskedSum, narrow
from fedda.wire.packing import Arrays, Packed

from .sites.correspondence import Correspondence
from .sites.replies import Reply
from .sites.roster import Node

Alpha = dict[str, float]


@dataclass(frozen=True)
class Mean:
    """The mean of the sources' models."""

    model: Arrays  # the mean
    weights: Alpha  # how much each source counts in it; they sum to 1
    numbers: dict[str, Any]  # what the sources reported of their training, as the round's numbers
    # the reply of the site that was asked beside them; None if it gave no usable one
    beside: Reply | None = None


class OpenChannel:
    """Models as they are."""

    def __init__(self, strategy: Correspondence) -> None:
        self._of = strategy

    @property
    def least(self) -> int:
        """The smallest number of sources in a round of which anything may or can be reported."""
        guard = self._of.setup.guard
        return least_for(guard.mean, guard.liars)

    @property
    def what(self) -> str:
        """What needs so many sources."""
        return f"guard.mean={self._of.setup.guard.mean}"

    @property
    def least_sources(self) -> int:
        """The smallest number of sources with which a round of this phase can run."""
        least = max(self._of.setup.wait.min_sources, self.least)
        return least if "source" in self._of.phase.parts else 0

    def enough(self, count: int) -> None:
        """Check the quorum of sources.

        Raises:
            QuorumError: the count is below `wait.min-sources`, or below what the channel needs.
        """
        if count < (least := self.least_sources):
            own = least == self._of.setup.wait.min_sources
            needed = f"wait.min-sources is {least}" if own else f"{self.what} needs {least}"
            are = "is" if count == 1 else "are"
            raise QuorumError(f"{counted(count, 'source')} {are} left in this round, but {needed}.")

    def requests(self, nodes: Sequence[Node], beside: Sequence[Node] = ()) -> list[Message]:
        """Make the requests that ask sources for models: a model to each site.

        Args:
            nodes: the sources.
            beside: other sites that are asked in the same hop as the sources train.
        """
        of, hop, along = self._of, self._of.phase.sending_hop, self._of.sent_along()
        return [
            of.request(node, {"model": of.model_for(node), **along}, hop=hop)
            for node in [*nodes, *beside]
        ]

    def each(self, replies: Iterable[Message], needs: set[str]) -> Iterator[Reply]:
        """Yield the sources' replies as they arrive; `needs` names numbers that each must have."""
        yield from self._of.accept(replies, needs)

    def mean(
        self, replies: Iterable[Message], counts: Mapping[str, int], beside: Node | None = None
    ) -> Mean:
        """Average the sources' models by the rule of `guard.mean`.

        Args:
            replies: to `requests`.
            counts: how much each source counts, by name.
            beside: the site whose reply is not in the mean.

        Raises:
            QuorumError: too few sources gave a usable reply.
        """
        of, reported, other = self._of, {}, None
        parts = fedavg.weights(torch.tensor([*counts.values()])).tolist()
        shares = dict(zip(counts, parts, strict=True))
        mean = mean_by(of.setup.guard, of.global_model.unpack())
        for reply in of.accept(replies, {of.reported}):
            if reply.node is beside:
                other = reply
            else:
                name = reply.node.name
                reported[name] = float(reply.numbers[of.reported])
                mean.add(reply.model().unpack(), shares[name], name)
            del reply  # free it before the next one is fetched
        self.enough(len(reported))
        model = mean.result()
        if isinstance(mean, RobustMean):
            weights = mean.shares
        else:
            total = sum(shares[name] for name in sorted(reported))
            weights = {name: shares[name] / total for name in sorted(reported)}
        return Mean(model, weights, of.of_sources(reported, weights), other)

    def onward(
        self, sources: Sequence[Reply], numbers: Mapping[str, float]
    ) -> tuple[dict[str, Packed], Mapping[str, float]]:
        """Return what the target is sent of the sources' models, and the numbers beside them.

        Args:
            sources: their replies.
            numbers: those that the target needs of the server's weighing.
        """
        models = {f"teacher/{r.node.name}": self._of.as_sent(r.model()) for r in sources}
        return models, numbers

    def averaged(
        self, target: Reply, sources: Sequence[Reply], average: Callable[[], tuple[Arrays, Alpha]]
    ) -> tuple[Arrays, Alpha]:
        """Return the mean of the target's and the sources' models, and the weight of each site.

        Args:
            target: its reply to what it was sent of the sources' models.
            sources: the replies of those whose models the target could use.
            average: makes the mean, where the server can read the models.
        """
        return average()


class MaskedChannel(OpenChannel):
    """A sum of which the server sees no term: first a signed key of each source, then its model."""

    _try = (0, 0)  # the last round that began, and how often it did

    @property
    def least(self) -> int:
        """A sum of two tells each of them the other's model."""
        return LEAST_HIDDEN

    @property
    def what(self) -> str:
        return "a secure sum"

    def requests(self, nodes: Sequence[Node], beside: Sequence[Node] = ()) -> list[Message]:
        """Ask the sources for their keys of this try of the round."""
        last, attempt = self._try
        self._try = (self._of.round, attempt + 1 if last == self._of.round else 1)
        self._beside = beside
        return [self._of.request(node, {}, {"attempt": self._try[1]}) for node in nodes]

    def mean(
        self, replies: Iterable[Message], counts: Mapping[str, int], beside: Node | None = None
    ) -> Mean:
        """The mean by examples, from the sum of the masked models.

        Raises:
            QuorumError: a site that has agreed to the sum did not add its model.
        """
        of = self._of
        keys = {reply.node: reply.arrays["key"] for reply in of.accept(replies)}
        group = sorted(keys, key=lambda node: node.name)
        self.enough(len(group))
        counts = {node.name: counts[node.name] for node in group}
        most, weight = max(counts.values()), sum(counts.values())
        like, short = of.model.unpack(), narrow(of.model.manifest)
        total = MaskedSum(like, FixedPoint(like, len(group), most, short))
        del like  # of which only names, types and largest values are needed
        private, epsilon, other = of.reported == "epsilon", {}, None
        for reply in self._hidden(keys, group, most, {"epsilon"} if private else set()):
            if reply.node is beside:
                other = reply
            else:
                total.add(reply.arrays["masked"])
                epsilon[reply.node.name] = float(reply.numbers.get("epsilon", 0.0))
            del reply
        if total.count < len(group):
            raise QuorumError(
                f"{total.count} of the {len(group)} sites of a secure sum added their models; "
                "without the others nothing can be read."
            )
        try:
            model, loss = total.result(weight)
        except SecureError as error:  # the masks are new in another try
            raise QuorumError(str(error)) from error
        for entry in of.model.manifest.entries:
            if of.model.manifest.rows(entry):  # sites began with what was rounded
                model[entry.name] -= of.model.entry(entry.name)
                model[entry.name] += of.model.before.entry(entry.name)
        of.post.checks.mean(model)
        weights = {name: count / weight for name, count in counts.items()}
        numbers = of.of_sources(epsilon, weights) if private else {"loss": loss}
        return Mean(model, weights, numbers, other)

    def _hidden(
        self, keys: Mapping[Node, Packed], group: Sequence[Node], most: int, needs: set[str]
    ) -> Iterator[Reply]:
        """Ask the group for masked models, and the sites beside it for what they do."""
        of, hop = self._of, self._of.phase.sending_hop
        sent = {"model": of.model, **of.sent_along()}
        sent |= {f"key/{node.name}": keys[node] for node in group}
        numbers = {"attempt": self._try[1], "most": most}
        requests = [of.request(node, sent, numbers, hop) for node in group]
        requests += [of.request(node, {"model": of.model}, hop=hop) for node in self._beside]
        yield from of.accept(of.mail.deliver(requests, of.setup.wait.train), needs)


class SealedChannel(OpenChannel):
    """Models that the server hands on unread: first a signed key of the target, then each model."""

    def requests(self, nodes: Sequence[Node], beside: Sequence[Node] = ()) -> list[Message]:
        """Ask the target for its key of this round."""
        self._nodes = nodes
        return [self._of.request(self._of.roster.target, {})]

    def each(self, replies: Iterable[Message], needs: set[str]) -> Iterator[Reply]:
        """Yield the sources' replies, with a sealed model in each, and no loss beside it.

        Raises:
            QuorumError: the target made no key.
        """
        of, name = self._of, self._of.roster.target.name
        keys = [reply.arrays["key"] for reply in of.accept(replies)]
        if not keys:
            raise QuorumError(f"{name} (target) made no key for this round.")
        sent = {"model": of.model, f"key/{name}": keys[0]}
        yield from of.ask(self._nodes, of.phase.sending_hop, sent, needs - {"loss"})

    def onward(
        self, sources: Sequence[Reply], numbers: Mapping[str, float]
    ) -> tuple[dict[str, Packed], Mapping[str, float]]:
        """Return the sealed models, and the bounds of the guard: the target does the weighing."""
        guard, roster = self._of.setup.guard, self._of.roster
        members = {roster.target.name, *(reply.node.name for reply in sources)}
        bounds = {"max-change": guard.max_change, "max-statistics": guard.max_statistics}
        bounds |= {
            "max-update": guard.max_update,
            "liars": guard.liars,
            "most": max(roster.counts[name] for name in members),
        }
        return {f"sealed/{reply.node.name}": reply.arrays["sealed"] for reply in sources}, bounds

    def averaged(
        self, target: Reply, sources: Sequence[Reply], average: Callable[[], tuple[Arrays, Alpha]]
    ) -> tuple[Arrays, Alpha]:
        """Return the mean and the weights that the target sends.

        Raises:
            QuorumError: it did not tell its own weight.
        """
        own = target.node.name
        if f"alpha/{own}" not in target.numbers:
            raise QuorumError(f"{own} (target) did not tell the weights of its mean.")
        names = sorted([own, *(reply.node.name for reply in sources)])
        alpha = {name: float(target.numbers.get(f"alpha/{name}", 0.0)) for name in names}
        return target.model().unpack(), alpha


CHANNELS: Mapping[str, type[OpenChannel]] = {
    "none": OpenChannel,
    "sum": MaskedChannel,
    "sealed": SealedChannel,
}


def mean_by(guard: GuardConfig, like: Arrays) -> RunningMean | RobustMean:
    """Make an empty mean of models, by the rule of `guard.mean`."""
    if guard.mean == "weighted":
        return RunningMean(like)
    return RobustMean(like, guard.mean, guard.liars)
