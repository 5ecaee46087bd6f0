"""f-DANN's server: all sites train at the same time and sum their discriminator's gradients.

Ganin et al., JMLR 2016, https://arxiv.org/abs/1505.07818; federated by the exchange.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from flwr.app import Message

from fedda.adversarial.lazy import syncs
from fedda.algorithms import fedavg
from fedda.errors import ConfigError, QuorumError
from fedda.maths.average import RobustMean, heads_of
from fedda.wire.packing import Arrays, Kind, Packed, pack

from .base import Numbers
from .fedavg import FedAvg
from .sites.replies import Reply
from .sites.roster import Node
from .upload_channel import mean_by

NEVER_NEGATIVE = ("exp_avg_sq", "step")  # in Adam's state; Adam takes the square root of exp_avg_sq
AVERAGED = ("loss", "discriminator-loss", "discriminator-accuracy", "mmd", "clipped")


class FDANN(FedAvg):
    """Per round: 1 model and the discriminators to each site, 1 model back from each.

    Only the target sends the discriminators back, as all members of a group have equal copies.
    """

    shared: ClassVar[str] = "discriminator"  # name of the array; for a pair, /SOURCE follows
    group: ClassVar[str] = "gradient"  # name of the group that sums; for a pair, /SOURCE follows
    kind: ClassVar[Kind] = Kind.MODEL

    def requests(self) -> list[Message]:
        """Open the exchange; make requests with model, discriminators and invitation for all.

        A round is a whole number of windows.
        """
        sources = self.present()
        self.pairs: Mapping[str, list[Node]] = self.groups(self.summing(sources))
        everyone, p = [*sources, self.roster.target], self.setup.summing.p
        # Sites that are away count too, so that every round has the same length.
        steps = -(-self.steps_per_round(self.roster.nodes) // p) * p
        groups = {_named(self.group, pair): members for pair, members in self.pairs.items()}
        self.convene(groups, syncs(0, self.steps_of_discriminators(steps), p))
        arrays = [{"model": self.model} | self.discriminators(node) for node in everyone]
        return [
            self.request(node, sent, {"steps": steps, **self.numbers_for(node)})
            for node, sent in zip(everyone, arrays, strict=True)
        ]

    def summing(self, sources: Sequence[Node]) -> list[Node]:
        """Return the sources that sum gradients; the others train on their labels alone.

        A gradient over few examples gives their features away, and noise that hides them would
        drown it. So a source with fewer examples than a sum must be over sends none.

        Raises:
            ConfigError: the target has too few examples, or every source has.
        """
        least, target = self.setup.summing.min_examples, self.roster.target
        small = [node for node in (*sources, target) if node.examples < least]
        if target in small or len(small) == len(sources):
            who = ", ".join(f"{node.name} ({node.role}) has {node.examples}" for node in small)
            raise ConfigError(
                f"{who} examples, but a gradient must be summed over {least} "
                "(exchange.min-examples), so there is nothing to align; add examples, or choose a "
                "method that sums no gradients, such as kd3a or adabn."
            )
        for node in small:
            if self.round == self.stage.first:
                text = f"{node.examples} examples, but a gradient is summed over {least} or more"
                self.setup.notice("small", node.name, f"{text}; it trains on its labels alone")
        return [node for node in sources if node not in small]

    def groups(self, sources: Sequence[Node]) -> dict[str, list[Node]]:
        """Return the sites of each discriminator, by the pair's source; "" if all share one."""
        target = self.roster.target
        if self.options.pairs:
            return {n.name: [n, target] for n in sources}
        return {"": [*sources, target]}

    def steps_of_discriminators(self, steps: int) -> int:
        """Return how many steps the discriminators take during that many training steps."""
        return steps

    def numbers_for(self, node: Node) -> Mapping[str, float]:
        """Return further numbers for one site, besides those for all sites: here none."""
        return {}

    def discriminators(self, node: Node) -> dict[str, Packed]:
        """Return the discriminators that a site has a copy of; none before the first round ends."""
        return {
            _named(self.shared, pair): self.memory.arrays[_key(pair)]
            for pair, members in self.pairs.items()
            if node in members and _key(pair) in self.memory.arrays
        }

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Average the encoders over all sites, the classifiers over those that have labels."""
        return self.average([*self.roster.sources, self.roster.target], replies)

    def average(self, asked: Sequence[Node], replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Average the models and the numbers in the replies of the sites that were asked."""
        target, self.shares = self.roster.target, self.count(asked)
        sent = self.global_model.unpack()
        mean, heads = (mean_by(self.setup.guard, part) for part in (sent, heads_of(sent)))
        numbers: dict[str, Mapping[str, Any]] = {}
        weight: dict[str, float] = {}
        for reply in self.accept(replies, needs={"steps"}):
            name = reply.node.name
            model, weight[name] = reply.model().unpack(), self.weigh(reply)
            mean.add(model, weight[name], name)
            if reply.node is target:
                self.remember(reply)
            else:
                heads.add(heads_of(model), weight[name], name)
            numbers[name] = dict(reply.numbers)
            del reply, model  # free them before the next one is fetched
        self.enough(len(numbers) - (target.name in numbers))
        if target in asked and target.name not in numbers:
            raise QuorumError(f"{target.name} (target) gave no usable reply in this round.")
        if not any(weight[name] for name in weight if name != target.name):
            raise QuorumError("No source that counts in the mean gave a usable reply.")
        model = mean.result() | heads.result()
        if isinstance(mean, RobustMean):
            self.weights = mean.shares
        else:
            total = sum(weight[name] for name in sorted(numbers))
            self.weights = {name: weight[name] / total for name in sorted(numbers)}
        return model, self.means(numbers)

    def count(self, nodes: Sequence[Node]) -> dict[str, float]:
        """Return the sites' shares by name: by examples, or equal; they sum to 1."""
        counts = torch.tensor([self.roster.counts[node.name] for node in nodes])
        shares = fedavg.weights(counts, self.options.weighting).tolist()
        return {node.name: share for node, share in zip(nodes, shares, strict=True)}

    def weigh(self, reply: Reply) -> float:
        """Return the share of the reply's site."""
        return self.shares[reply.node.name]

    def remember(self, reply: Reply) -> None:
        """Remember the target's discriminators; all sites receive them in the next round.

        Raises:
            QuorumError: one is missing, or its values would spoil the next round of all sites.
        """
        for pair in self.pairs:
            name = _named(self.shared, pair)
            if name not in reply.arrays:
                raise QuorumError(f"{reply.node.name} sent no {name}.")
            arrays = reply.arrays[name].unpack()
            if odd := [n for n in NEVER_NEGATIVE if n in arrays and (arrays[n] < 0).any()]:
                raise QuorumError(f"{odd[0]} of '{name}' from {reply.node.name} is negative.")
            self.memory.arrays[_key(pair)] = pack(arrays, self.kind)

    def means(self, numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Return each number's weighted mean over the sites that sent it."""
        means = {}
        for name in AVERAGED:
            sites = [site for site in sorted(numbers) if name in numbers[site]]
            if sites:
                total = sum(self.weights[site] for site in sites)
                terms = (self.weights[site] * float(numbers[site][name]) for site in sites)
                means[name] = sum(terms) / total
        return means


def _named(what: str, pair: str) -> str:
    return f"{what}/{pair}" if pair else what


def _key(pair: str) -> str:
    return pair or "all"


STRATEGY = FDANN
