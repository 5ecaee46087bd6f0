"""A strategy's correspondence with the sites of a round: its requests, and the replies it accepts.

What a round needs to write a request, or to read a reply, is here: its number and its phase, the
model that is sent, and what a method may say of either. `strategies.base.FedDA` is built on it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp.strategy import Strategy

from fedda.errors import NotFiniteError, QuorumError
from fedda.exchange import Session
from fedda.maths.coarse import largest
from fedda.methods import Phase, Stage
from fedda.wire.packing import ROWS, Kind, Packed, pack

from .mail import Mail
from .post import Heading, Memory, Post, Setup
from .replies import Reply
from .roster import Node, Roster

Numbers = dict[str, Any]


class Correspondence(Strategy):
    """What a strategy knows of its round, and how it asks sites.

    Attributes:
        roster: the sites, with the numbers of examples that serve as weights in averages.
        round: the current round, counted from 1.
        global_model: the model at the start of the round, in full precision.
        model: the same model in the precision in which it is sent.
        memory: what the strategy remembers from round to round.
        last: the training's last round: the planned one, or an earlier one if the run ends it.
    """

    round: int
    global_model: Packed
    model: Packed

    def __init__(self, setup: Setup, roster: Roster) -> None:
        self.setup = setup
        self.roster = roster
        self.task = setup.task
        self.options = setup.task.options
        self.post = Post(setup)
        self.memory = Memory()
        self.last = setup.task.rounds
        self.session: Session | None = None
        self._mail = setup.mail

    # ---- what a method writes -------------------------------------------------------------

    def model_for(self, node: Node) -> Packed:
        """Return the model that a source is sent to train: here the same for all."""
        return self.model

    def sent_along(self) -> dict[str, Packed]:
        """Return the arrays that a source is sent along with the model to train: here none."""
        return {}

    def part_of(self, node: Node) -> str:
        """Return the part that a site plays in this round."""
        return node.role

    def examine(self, reply: Reply) -> None:
        """Check what the method requires of a reply besides contract and guard: here nothing.

        Raises:
            WireError: the reply must be refused.
        """

    # ---- what a method uses ---------------------------------------------------------------

    @property
    def stage(self) -> Stage:
        """The phase of this round, with its first and its last round."""
        return self.task.stage(self.round)

    @property
    def phase(self) -> Phase:
        """The phase of this round."""
        return self.stage.phase

    @property
    def is_last(self) -> bool:
        """Whether this is the training's last round."""
        return self.round == self.last

    def heading(self, hop: str, part: str) -> Heading:
        """What a request of this round names."""
        early = self.is_last and self.round < self.task.rounds
        return Heading(self.round, self.phase.name, hop, part, early)

    @property
    def reported(self) -> str:
        """The number that each source reports of its training: its loss, or with noise epsilon."""
        return "epsilon" if self.task.privacy.noise else "loss"

    def of_sources(
        self, reported: Mapping[str, float], weights: Mapping[str, float] | None = None
    ) -> Numbers:
        """A round's number of its sources: the mean loss, or the largest epsilon.

        Args:
            reported: each source's `reported`, by name.
            weights: how much each source counts in the mean; they sum to 1. None: all alike.
        """
        if self.reported == "epsilon":
            return {"epsilon": max(reported.values())}
        if weights is None:
            return {"loss": float(np.mean([reported[name] for name in sorted(reported)]))}
        return {"loss": sum(weights[name] * reported[name] for name in sorted(reported))}

    @property
    def mail(self) -> Mail:
        """What sends requests and fetches replies; only set once a round has begun."""
        assert self._mail is not None
        return self._mail

    def request(
        self,
        node: Node,
        arrays: Mapping[str, Packed],
        numbers: Mapping[str, float] | None = None,
        hop: str = "",
    ) -> Message:
        """Make a request to one site, with records of its own, valid until the deadline.

        Args:
            node: the site.
            arrays: the arrays to send.
            numbers: the numbers to send; they may differ from site to site.
            hop: the name of the hop; by default the first of the phase.
        """
        phase, hop, part = self.phase, hop or self.phase.first_hop, self.part_of(node)
        contract, exchange = phase.part(hop, part), None
        assert contract is not None, f"{self.task.method} asks no {part} for {hop}"
        if contract.gradients and self.session and node.name in self.session.invitations:
            invitation = self.session.invitations[node.name]
            exchange = {**self.setup.summing.lazy.flat(), **invitation.flat()}
        heading = self.heading(hop, part)
        layouts = phase.layouts(self.options, self.setup.model)
        return self.post.write(node, heading, contract, layouts, arrays, numbers, exchange)

    def ask(
        self,
        nodes: Iterable[Node],
        hop: str,
        arrays: Mapping[str, Packed],
        needs: Iterable[str] = (),
        **numbers: float,
    ) -> Iterator[Reply]:
        """Send the same request to some sites in mid-round -> their replies, as they arrive.

        Args:
            nodes: the sites.
            hop: the name of the hop.
            arrays: the arrays to send.
            needs: names of the numbers that every reply must have.
            numbers: the numbers to send.
        """
        requests = [self.request(node, arrays, numbers, hop) for node in nodes]
        yield from self.accept(self.mail.deliver(requests, self.setup.wait.train), needs)

    def ask_target(
        self, hop: str, arrays: Mapping[str, Packed], needs: Iterable[str] = (), **numbers: float
    ) -> Reply:
        """Ask the target alone, as `ask` does -> its reply.

        Raises:
            QuorumError: the target gave no usable reply.
        """
        target = self.roster.target
        for reply in self.ask([target], hop, arrays, needs, **numbers):
            return reply
        raise QuorumError(f"{target.name} ({target.role}) gave no usable reply in this round.")

    def accept(self, replies: Iterable[Message], needs: Iterable[str] = ()) -> Iterator[Reply]:
        """Yield the replies that pass every check, as they arrive; report the others.

        Args:
            replies: messages as they came; not even their sender is checked yet.
            needs: names of the numbers that every reply must have.
        """
        yield from self.post.accept(replies, needs, self.roster, self.examine, self.give_up)

    def give_up(self, name: str, why: str = "") -> None:
        """Note that a site's reply is not waited for any more, and why if it has not said so."""
        if why:
            self.post.lost[name] = why
        if self.session is not None:
            self.session.give_up(name)

    def as_sent(self, packed: Packed) -> Packed:
        """Convert a model to the precision in which it is sent, `wire.dtype`.

        One that is sent as int8 remembers what it was, for the changes of it that come back.

        Raises:
            NotFiniteError: a value is too large for that precision.
        """
        floats = self.task.wire.dtype
        if packed.manifest.floats == floats:
            return packed
        sent = pack(packed.unpack(), Kind.MODEL, floats)
        try:
            sent.check_finite("the server")
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error} wire.dtype is {floats}, whose largest value is {largest(floats)}; "
                "set it to float32."
            ) from None
        return replace(sent, whole=packed) if floats in ROWS else sent
