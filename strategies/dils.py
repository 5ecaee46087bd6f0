"""DILS's server: names the pair, sums their discriminator's gradients, and sees little else.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1.
"""

from collections.abc import Iterable
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedda.errors import ConfigError, QuorumError
from fedda.lazy import syncs
from fedda.wire import Kind, Packed, Role, pack

from .base import FedDA, Reply
from .roster import Node

NUMBERS = ("loss", "discriminator-loss", "discriminator-accuracy")


class DILS(FedDA):
    """First rounds: 1 model to the collaborator and back. Then 1 to each, and gradients alone."""

    roles: ClassVar[tuple[Role, ...]] = ("source", "target")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The pretraining's model to the collaborator, or an invitation to both."""
        self._begin(server_round, arrays, grid)
        collaborator, target = self._pair()
        there, adapted = self.there(grid), self._adapted()
        for node in (collaborator, target) if adapted >= 0 else (collaborator,):
            if node.id not in there:
                raise QuorumError(f"{node.name} ({node.role}) is not connected.")
        if adapted < 0:
            return [self.request(collaborator, {"model": self.model})]
        steps = self.steps_per_round([collaborator, target])
        pair = [collaborator, target]
        self.convene({"discriminator": pair}, syncs(adapted * steps, steps, self.lazy.p))
        first = {"model": self.model} if not adapted else {}
        trained = self.kept.get(collaborator.name)
        last = {"model": self.as_sent(trained)} if trained else {}  # a resumed run has it in full
        return [
            self.request(collaborator, first, {"steps": steps}),
            self.request(target, first or last, {"steps": steps}),
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model as it was, unless one came: the collaborator's, or one that the target shares.

        With CADA the collaborator's is kept for the target, whose next round takes its classifier.
        """
        options = self.task.options
        found = {reply.node.role: reply for reply in self.accept(replies, {"steps"})}
        model, adapting = self.global_model, self._adapted() >= 0
        missing = ({"source", "target"} if adapting else {"source"}) - set(found)
        if missing:
            raise QuorumError(f"The {' and the '.join(sorted(missing))} gave no usable reply.")
        if not adapting or options.loss == "cada":
            model = self._model(found["source"])
        if adapting and options.loss == "cada":
            self.kept = {found["source"].node.name: self.as_sent(model)}
        if adapting and options.share:
            model = self._model(found["target"])
        self.weights = {found["source"].node.name: 1.0}
        numbers = {
            name: sum(said) / len(said)
            for name in NUMBERS
            if (said := [float(r.numbers[name]) for r in found.values() if name in r.numbers])
        }
        return self.packed(model.unpack()), MetricRecord(dict(numbers))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Once it adapts the target tests the model that only it has."""
        requests = super().configure_evaluate(server_round, arrays, config, grid)
        if self._adapted() < 0 or not requests:
            return requests
        return [self.request(self.roster.target, {}, kind="evaluate")]

    def skip_to_exchange(self) -> int:
        """The pretraining exchanges no gradients."""
        return self.task.options.pretrain + 1

    def needed(self) -> set[str]:
        """Both of the pair; other sources are no help."""
        return {node.name for node in self._pair()}

    def _adapted(self) -> int:
        """Rounds of adaptation before this one; negative in the pretraining."""
        return self.round - self.task.options.pretrain - 1

    def _pair(self) -> tuple[Node, Node]:
        """The collaborator and the target.

        Raises:
            ConfigError: nobody said which of several sources it is, or there is none of the name.
        """
        sources = {node.name: node for node in self.roster.sources}
        name = self.task.options.collaborator or (next(iter(sources)) if len(sources) == 1 else "")
        if name not in sources:
            found = f"'{name}' is no source" if name else f"{len(sources)} sources have joined"
            raise ConfigError(
                f"dils adapts from one collaborator, but {found}; set dils.collaborator to one of "
                f"{', '.join(sources)}."
            )
        return sources[name], self.roster.target

    def _model(self, reply: Reply) -> Packed:
        if "model" not in reply.arrays:
            raise QuorumError(f"{reply.node.name} sent no model.")
        return pack(reply.arrays["model"].unpack(), Kind.MODEL)


STRATEGY = DILS
