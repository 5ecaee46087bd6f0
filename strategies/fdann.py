"""f-DANN's server: all sites train at once and sum their discriminator's gradients meanwhile.

Ganin et al., JMLR 2016, https://arxiv.org/abs/1505.07818; federated by the exchange.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedda.algorithms import fedavg
from fedda.average import RunningMean
from fedda.errors import QuorumError
from fedda.lazy import syncs
from fedda.wire import Arrays, Kind, Packed, Role, pack

from .base import FedDA, Reply
from .roster import Node

NEVER_NEGATIVE = ("exp_avg_sq", "step")  # of Adam, which takes a root of the one
AVERAGED = ("loss", "discriminator-loss", "discriminator-accuracy", "mmd")


class FDANN(FedDA):
    """Per round: 1 model and the discriminators to each site, 1 model back from each.

    The target sends the discriminators back; every other member has the same.
    """

    roles: ClassVar[tuple[Role, ...]] = ("source", "target")
    shared: ClassVar[str] = "discriminator"  # the array, and behind a / the source of a pair
    group: ClassVar[str] = "gradient"  # the same of whose gradients are summed
    kind: ClassVar[Kind] = Kind.MODEL

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model and the discriminators, with an invitation, to all sites that are there."""
        self._begin(server_round, arrays, grid)
        return self.invite(self._present(grid))

    def invite(self, sources: Sequence[Node], **numbers: float) -> list[Message]:
        """Requests for a round of a whole number of windows."""
        self.pairs: Mapping[str, list[Node]] = self.groups(sources)
        everyone, p = [*sources, self.roster.target], self.lazy.p
        # Of all sites, also those that are away: a round is as long as any other.
        steps = -(-self.steps_per_round(self.roster.nodes) // p) * p
        groups = {_named(self.group, pair): members for pair, members in self.pairs.items()}
        self.convene(groups, syncs(0, self.steps_of_discriminators(steps), p))
        told = {"steps": steps, **numbers}
        return [self.request(n, {"model": self.model} | self.luggage(n), told) for n in everyone]

    def groups(self, sources: Sequence[Node]) -> dict[str, list[Node]]:
        """Who shares a discriminator, by the source of the pair; "" for one of all."""
        target = self.roster.target
        if self.task.options.pairs:
            return {n.name: [n, target] for n in sources}
        return {"": [*sources, target]}

    def steps_of_discriminators(self, steps: int) -> int:
        """How often they move in so many training steps."""
        return steps

    def luggage(self, node: Node) -> dict[str, Packed]:
        """The discriminators that a site has a part in; none before the first round is over."""
        return {
            _named(self.shared, pair): pack(self.kept[_key(pair)].unpack(), self.kind)
            for pair, members in self.pairs.items()
            if node in members and _key(pair) in self.kept
        }

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Encoders averaged over all sites, classifiers over those that have labels."""
        model, numbers = self.average([*self.roster.sources, self.roster.target], replies)
        return self.packed(model), MetricRecord(dict(numbers))

    def average(
        self, asked: Sequence[Node], replies: Iterable[Message]
    ) -> tuple[Arrays, Mapping[str, float]]:
        """The mean of what comes back from those who were asked, and of their numbers."""
        target = self.roster.target
        counts = torch.tensor([self.roster.counts[n.name] for n in asked])
        shares = fedavg.weights(counts, self.task.options.weighting).tolist()
        weight = {n.name: w for n, w in zip(asked, shares, strict=True)}
        sent = self.global_model.unpack()
        mean, heads = RunningMean(sent), RunningMean(_heads(sent))
        said: dict[str, Mapping[str, Any]] = {}
        for reply in self.accept(replies, needs={"steps"}):
            name = reply.node.name
            if "model" not in reply.arrays:
                raise QuorumError(f"{name} sent no model.")
            model = reply.arrays["model"].unpack()
            mean.add(model, weight[name])
            if reply.node is target:
                self.keep(reply)
            else:
                heads.add(_heads(model), weight[name])
            said[name] = dict(reply.numbers)
            del reply, model  # not held while the next one is fetched
        self.enough(len(said) - (target.name in said))
        if target in asked and target.name not in said:
            raise QuorumError(f"{target.name} (target) gave no usable reply in this round.")
        total = sum(weight[name] for name in sorted(said))
        self.weights = {name: weight[name] / total for name in sorted(said)}
        return mean.result() | heads.result(), self.numbers(said)

    def keep(self, reply: Reply) -> None:
        """Remember the discriminators for the next round, and for sites that join in it.

        Raises:
            QuorumError: one is missing, or would spoil everybody's next round.
        """
        for pair in self.pairs:
            name = _named(self.shared, pair)
            if name not in reply.arrays:
                raise QuorumError(f"{reply.node.name} sent no {name}.")
            arrays = reply.arrays[name].unpack()
            if odd := [n for n in NEVER_NEGATIVE if n in arrays and (arrays[n] < 0).any()]:
                raise QuorumError(f"{odd[0]} of '{name}' from {reply.node.name} is negative.")
            self.kept[_key(pair)] = pack(arrays, self.kind)

    def numbers(self, said: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Means over the sites that said something, by their weights."""
        found = {}
        for what in AVERAGED:
            who = [name for name in sorted(said) if what in said[name]]
            if who:
                total = sum(self.weights[name] for name in who)
                terms = (self.weights[name] * float(said[name][what]) for name in who)
                found[what] = sum(terms) / total
        return found


def _named(what: str, pair: str) -> str:
    return f"{what}/{pair}" if pair else what


def _key(pair: str) -> str:
    return pair or "all"


def _heads(model: Arrays) -> Arrays:
    return {name: a for name, a in model.items() if name.startswith("head.")}


STRATEGY = FDANN
