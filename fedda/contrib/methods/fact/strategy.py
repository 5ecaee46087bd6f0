"""FACT's server: it draws two sources, averages their encoders, and hands both heads to the target.

Schrod et al., https://arxiv.org/abs/2306.00607.
"""

from collections.abc import Iterable

import torch
from flwr.app import Message

from fedda.errors import ConfigError, QuorumError
from fedda.maths.average import RunningMean, heads_of
from fedda.strategies.base import FedDA, Numbers
from fedda.strategies.sites.roster import Node
from fedda.train import generator
from fedda.wire.packing import Arrays, Kind, Packed, pack

from .algorithm import is_head


class FACT(FedDA):
    """Per round: 2 models out and back, 2 out and heads back, 1 with a head to the target and back.

    Sites that are left out of a round get no message in it.
    """

    def requests(self) -> list[Message]:
        """Send the model to two sources, drawn anew in each round."""
        self.pair = self.draw(self.present())
        return [self.request(node, {"model": self.model}) for node in self.pair]

    def draw(self, sources: list[Node]) -> list[Node]:
        """Draw two sources, in the order of the roster.

        Raises:
            ConfigError: the run has only one source.
            QuorumError: fewer are connected.
        """
        if len(self.roster.sources) < 2:
            raise ConfigError(
                "fact compares the heads of two sources, but this run has one; let another source "
                "join, or choose another method."
            )
        if len(sources) < 2:
            raise QuorumError(f"{len(sources)} source is connected, but FACT compares two.")
        draws = generator(self.task.seed, "pair", self.round)
        return [sources[i] for i in sorted(torch.randperm(len(sources), generator=draws)[:2])]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Average the encoders, let the heads be refitted, let the target move the encoder."""
        mean = RunningMean(self.global_model.unpack())
        heads: dict[str, Arrays] = {}
        losses: list[float] = []
        for reply in self.accept(replies, needs={"loss"}):
            model = reply.model().unpack()
            mean.add(model, 0.5)
            heads[reply.node.name] = {n: a.copy() for n, a in heads_of(model).items()}
            losses.append(float(reply.numbers["loss"]))
            del reply, model  # free it before the next one is fetched
        self.check_both(heads)
        encoder = {n: a for n, a in mean.result().items() if not is_head(n)}
        if self.options.refit:
            heads = self.refitted(encoder, heads)
        first, second = (heads[node.name] for node in self.pair)
        arrays = {"model": self.joined(encoder, first), "head": self.sent(second)}
        reply = self.ask_target("cross", arrays, needs={"loss"})
        self.weights = {node.name: 0.5 for node in self.pair}
        head = {n: (first[n] + second[n]) / 2 for n in first}
        numbers = {"loss": sum(losses) / 2, "discrepancy": float(reply.numbers["loss"])}
        return reply.model().unpack() | head, numbers

    def refitted(self, encoder: Arrays, heads: dict[str, Arrays]) -> dict[str, Arrays]:
        """Let each of the two sources fit its head to the mean encoder -> heads by source."""
        requests = [
            self.request(node, {"model": self.joined(encoder, heads[node.name])}, hop="refit")
            for node in self.pair
        ]
        replies = self.accept(self.mail.deliver(requests, self.setup.wait.train), needs={"loss"})
        found = {r.node.name: r.arrays["head"].unpack() for r in replies}
        self.check_both(found)
        return found

    def check_both(self, heads: dict[str, Arrays]) -> None:
        """Check that both sources gave a usable reply.

        Raises:
            QuorumError: one did not, or neither.
        """
        if missing := [node.name for node in self.pair if node.name not in heads]:
            raise QuorumError(f"{' and '.join(missing)} gave no usable reply.")

    def joined(self, encoder: Arrays, head: Arrays) -> Packed:
        """A model of an encoder and a head, as it is sent."""
        model = {n: head[n] if is_head(n) else encoder[n] for n in self.global_model.unpack()}
        return self.as_sent(pack(model, Kind.MODEL))

    def sent(self, head: Arrays) -> Packed:
        """A head, as it is sent."""
        return self.as_sent(pack(head, Kind.MODEL))


STRATEGY = FACT
