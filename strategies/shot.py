"""SHOT's server: it collects a model from each source, and hands all of them to the target.

Liang et al., ICML 2020, https://arxiv.org/abs/2002.08546.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedda.errors import QuorumError
from fedda.wire.packing import Arrays, Packed

from .base import FedDA, Numbers
from .dils import full
from .sites.replies import Reply


class SHOT(FedDA):
    """Round 1: a model to each source and back. Round 2: all of them to the target. Then none."""

    def requests(self) -> list[Message]:
        """Ask the sources once; later ask the target alone, which keeps what it has adapted."""
        sources = self.present()  # none in the adaptation; it raises if the target is not there
        if not self.adapts:
            return [self.request(node, {"model": self.model}) for node in sources]
        begins = not self.stage.rounds_before(self.round)
        return [self.request(self.roster.target, self.models() if begins else {})]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Keep the sources' models -> the first one; later the model as it was."""
        if not self.adapts:
            return self.collected(replies)
        for reply in self.accept(replies, {"loss"}):
            self.leave_out(self.refused(reply))
            self.weights = self.shares(reply)
            # The target has the sources' models, so the server's checkpoints no longer need them.
            self.memory.arrays = {}
            return self.global_model.unpack(), {"loss": float(reply.numbers["loss"])}
        raise QuorumError(f"{self.roster.target.name} (target) gave no usable reply.")

    def collected(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Remember each source's model -> the first source's."""
        losses: dict[str, float] = {}
        for reply in self.accept(replies, {"loss"}):
            losses[reply.node.name] = float(reply.numbers["loss"])
            self.memory.arrays[f"model/{reply.node.name}"] = full(reply)
        self.enough(len(losses))
        self.memory.numbers["sources"] = sorted(losses)
        self.weights = self.equal()
        first = self.memory.arrays[f"model/{min(losses)}"]
        return first.unpack(), {"loss": sum(losses.values()) / len(losses)}

    def leave_out(self, names: set[str]) -> None:
        """Forget the sources whose models the target cannot use.

        Raises:
            QuorumError: too few are left.
        """
        if not names:
            return
        left = [name for name in self.memory.numbers["sources"] if name not in names]
        if len(left) < (least := self.setup.wait.min_sources):
            raise QuorumError(
                f"The target can use the models of {len(left)} sources, but wait.min-sources is "
                f"{least}."
            )
        self.memory.numbers["sources"] = left

    def models(self) -> dict[str, Packed]:
        """The sources' models by name; without a first phase the run's model."""
        return {n: self.as_sent(p) for n, p in self.memory.arrays.items()} or {"model": self.model}

    def shares(self, reply: Reply) -> dict[str, float]:
        """How much each source's model counts in the prediction: all the same."""
        return self.equal()

    def equal(self) -> dict[str, float]:
        """The same share for each source that sent a model; the target's if none did."""
        names = self.memory.numbers.get("sources") or [self.roster.target.name]
        return {name: 1 / len(names) for name in names}

    def tested(self) -> dict[str, Packed]:
        """Return the sources' models; in the adaptation nothing: the target tests its own."""
        return {} if self.adapts else self.models()

    @property
    def adapts(self) -> bool:
        """Whether the sources' part is over."""
        return self.phase.name == "adapt"


STRATEGY = SHOT
