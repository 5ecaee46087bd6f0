"""DILS's server: it names the pair, sums their discriminator's gradients, and sees little else.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1.
"""

from collections.abc import Iterable, Sequence

from flwr.app import Message

from fedda.adversarial.lazy import syncs
from fedda.errors import ConfigError, QuorumError
from fedda.wire.packing import Arrays, Kind, Packed, pack

from .base import FedDA, Numbers
from .sites.replies import Reply
from .sites.roster import Node

NUMBERS = ("loss", "discriminator-loss", "discriminator-accuracy", "clipped")


class DILS(FedDA):
    """First 1 model per round to the collaborator and back; then 1 to each once, and gradients."""

    def requests(self) -> list[Message]:
        """Send the collaborator the model to pretrain; later, invite both to sum gradients."""
        asked = self.members() if self.adapts else self.pair()[:1]
        for node in asked:
            if not self.is_online(node):
                raise QuorumError(f"{node.name} ({node.role}) is not connected.")
        if not self.adapts:
            return [self.request(asked[0], {"model": self.model})]
        before = self.stage.rounds_before(self.round)
        steps = self.steps_per_round(asked) * self.options.epochs
        p = self.setup.summing.p
        of_discriminator = steps * self.options.steps_of_discriminator(p)
        sums = syncs(before * of_discriminator, of_discriminator, p)
        self.convene(self.groups(), sums)
        first = {n.name: {} if before else {"model": self.starting(n)} for n in asked}
        return [self.request(node, first[node.name], {"steps": steps}) for node in asked]

    def members(self) -> Sequence[Node]:
        """Return all sites that adapt together: here the pair."""
        return self.pair()

    def groups(self) -> dict[str, Sequence[Node]]:
        """Return the sites of each discriminator: here of the pair's."""
        return {"discriminator": self.pair()}

    def starting(self, node: Node) -> Packed:
        """Return the model with which a site begins to adapt: here the collaborator's for both."""
        return self.model

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Return the model as it was, or the one that the collaborator or the target sent.

        With CADA the collaborator's model is sent on to the target, which uses its classifier.
        """
        options, (by_part, numbers) = self.options, self.collected(replies)
        model = self.global_model
        if not self.adapts or options.loss == "cada":
            model = full(by_part["collaborator"])
        if self.adapts and options.loss == "cada":
            self.ask_target("take", {"model": self.as_sent(model)})
        if self.adapts and options.share:
            model = full(by_part["target"])
        return model.unpack(), numbers

    def collected(self, replies: Iterable[Message]) -> tuple[dict[str, Reply], Numbers]:
        """Return the replies by part, and the mean of each number.

        Raises:
            QuorumError: a part of the pair gave no usable reply.
        """
        accepted = list(self.accept(replies, {"steps"}))
        by_part = {self.part_of(r.node): r for r in accepted}
        needed = ("collaborator", "target") if self.adapts else ("collaborator",)
        if missing := [part for part in needed if part not in by_part]:
            raise QuorumError(f"The {' and the '.join(missing)} gave no usable reply.")
        helpers = [r.node.name for r in accepted if self.part_of(r.node) == "collaborator"]
        self.weights = dict.fromkeys(helpers, 1 / len(helpers))
        return by_part, {
            name: sum(given) / len(given)
            for name in NUMBERS
            if (given := [float(r.numbers[name]) for r in accepted if name in r.numbers])
        }

    def tested(self) -> dict[str, Packed]:
        """Return nothing in the adaptation: the target tests its own model. Before, the model."""
        return {} if self.adapts else super().tested()

    def part_of(self, node: Node) -> str:
        """Return target for the target, else collaborator; no other site takes part."""
        return "target" if node.name == self.roster.target.name else "collaborator"

    def needed(self) -> set[str]:
        """Return the names of both sites of the pair; other sources take no part."""
        return {node.name for node in self.members()}

    @property
    def adapts(self) -> bool:
        """Whether the pretraining is over."""
        return self.phase.name == "adapt"

    def pair(self) -> tuple[Node, Node]:
        """Return the collaborator and the target.

        Raises:
            ConfigError: `dils.collaborator` is not the name of a source, or it is empty and there
                is not exactly one source.
        """
        sources = {node.name: node for node in self.roster.sources}
        name = self.options.collaborator or (next(iter(sources)) if len(sources) == 1 else "")
        if name not in sources:
            why = f"'{name}' is no source" if name else f"{len(sources)} sources have joined"
            raise ConfigError(
                f"dils adapts from one collaborator, but {why}; set dils.collaborator to one of "
                f"{', '.join(sources)}."
            )
        return sources[name], self.roster.target


def full(reply: Reply) -> Packed:
    """Return a reply's model in full precision."""
    return pack(reply.model().unpack(), Kind.MODEL)


STRATEGY = DILS
