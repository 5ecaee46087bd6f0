"""DILS's server: names the pair, sums their discriminator's gradients, and sees little else.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedda.adversarial.lazy import syncs
from fedda.errors import ConfigError, QuorumError
from fedda.wire import Arrays, Kind, Packed, pack

from .base import FedDA, Numbers
from .sites.replies import Reply
from .sites.roster import Node

NUMBERS = ("loss", "discriminator-loss", "discriminator-accuracy")


class DILS(FedDA):
    """First rounds: 1 model to the collaborator and back. Then 1 to each, and gradients alone."""

    def requests(self) -> list[Message]:
        """The pretraining's model to the collaborator, or an invitation to both."""
        collaborator, target = pair = self.pair()
        asked = pair if self.adapts else pair[:1]
        for node in asked:
            if not self.is_online(node):
                raise QuorumError(f"{node.name} ({node.role}) is not connected.")
        if not self.adapts:
            return [self.request(collaborator, {"model": self.model})]
        before = self.stage.rounds_before(self.round)
        steps = self.steps_per_round(pair)
        self.convene({"discriminator": pair}, syncs(before * steps, steps, self.setup.summing.p))
        first = {"model": self.model} if not before else {}
        trained = self.memory.arrays.get(collaborator.name)
        last = {"model": trained} if trained else {}
        return [
            self.request(collaborator, first, {"steps": steps}),
            self.request(target, first or last, {"steps": steps}),
        ]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """The model as it was, unless one came: the collaborator's, or one that the target shares.

        With CADA the collaborator's is kept for the target, whose next round takes its classifier.
        """
        options = self.options
        came = {self.part_of(r.node): r for r in self.accept(replies, {"steps"})}
        needed = ("collaborator", "target") if self.adapts else ("collaborator",)
        if missing := [part for part in needed if part not in came]:
            raise QuorumError(f"The {' and the '.join(missing)} gave no usable reply.")
        model, collaborator = self.global_model, came["collaborator"]
        if not self.adapts or options.loss == "cada":
            model = _full(collaborator)
        if self.adapts and options.loss == "cada":
            self.memory.arrays = {collaborator.node.name: self.as_sent(model)}
        if self.adapts and options.share:
            model = _full(came["target"])
        self.weights = {collaborator.node.name: 1.0}
        numbers = {
            name: sum(given) / len(given)
            for name in NUMBERS
            if (given := [float(r.numbers[name]) for r in came.values() if name in r.numbers])
        }
        return model.unpack(), numbers

    def tested(self) -> dict[str, Packed]:
        """While it adapts nothing: the target tests its own model."""
        return {} if self.adapts else super().tested()

    def part_of(self, node: Node) -> str:
        """Of the pair the one is the target; nobody else takes part."""
        return "target" if node.name == self.roster.target.name else "collaborator"

    def needed(self) -> set[str]:
        """Both of the pair; other sources are no help."""
        return {node.name for node in self.pair()}

    @property
    def adapts(self) -> bool:
        """Whether the pretraining is over."""
        return self.phase.name == "adapt"

    def pair(self) -> tuple[Node, Node]:
        """The collaborator and the target.

        Raises:
            ConfigError: nobody said which of several sources it is, or there is none of the name.
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


def _full(reply: Reply) -> Packed:
    """The model that came, in full precision."""
    return pack(reply.model().unpack(), Kind.MODEL)


STRATEGY = DILS
