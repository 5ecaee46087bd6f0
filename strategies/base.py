"""What all strategies share: requests out, checked replies in, the target's test.

A method's strategy reads as the paper's round:

    requests()         what goes to whom when a round begins
    combine(replies)   how the replies become the next model; it may ask further, by `ask`
    weigh(reply)       how much a reply counts in a mean, where the method has a say in that
    tested()           what the target is sent to test

It holds no torch module and touches no disk. What it must remember from round to round is in
`memory`, so that a run can be stopped and resumed. Strategies implement Flower's hooks and so also
run under Flower's own `Strategy.start`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedda import records
from fedda.errors import NotFiniteError, QuorumError
from fedda.exchange import Session
from fedda.methods import Phase, Stage
from fedda.train import generator
from fedda.wire import Arrays, Kind, Manifest, Packed, pack

from .sites.mail import Mail
from .sites.post import Heading, Post
from .sites.replies import Reply
from .sites.roster import Node, Roster
from .sites.sessions import convene
from .sites.setup import Memory, Setup

Numbers = dict[str, Any]


class FedDA(Strategy):
    """Base of the methods' strategies.

    Attributes:
        roster: the sites, with the counts that weigh averages.
        round: the round at hand, from 1.
        global_model: the model with which it began, in full precision.
        model: the same in the precision of the wire.
        memory: what is remembered from round to round.
        weights: how much each site counted in the last mean, for reports.
    """

    def __init__(self, setup: Setup, roster: Roster) -> None:
        self.setup = setup
        self.roster = roster
        self.task = setup.task
        self.options = setup.task.options
        self.post = Post(setup)
        self.memory = Memory()
        self.weights: dict[str, float] = {}
        self.session: Session | None = None
        self._mail = setup.mail

    # ---- what a method writes -------------------------------------------------------------

    def requests(self) -> list[Message]:
        """The first hop of a round: the model, to every source that is there."""
        return [self.request(node, {"model": self.model}) for node in self.present()]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """The replies to `requests` -> the next model, and the round's numbers."""
        raise NotImplementedError

    def weigh(self, reply: Reply) -> float:
        """How much a reply counts in a mean, relative to the others and at most 1."""
        raise NotImplementedError

    def tested(self) -> dict[str, Packed]:
        """What the target is sent to test: the model."""
        return {"model": self.model}

    def part_of(self, node: Node) -> str:
        """The part that a site plays in this round."""
        return node.role

    def examine(self, reply: Reply) -> None:
        """What a method checks of a reply beside contract and guard: nothing.

        Raises:
            WireError: the reply is to be refused.
        """

    def needed(self) -> set[str]:
        """Names of the sites that this round cannot do without; a paused run waits for them."""
        return {self.roster.target.name} if "target" in self.phase.parts else set()

    # ---- what methods are written with ----------------------------------------------------

    @property
    def stage(self) -> Stage:
        """The phase of this round and the rounds that it has."""
        return self.task.stage(self.round)

    @property
    def phase(self) -> Phase:
        """The phase of this round."""
        return self.stage.phase

    @property
    def mail(self) -> Mail:
        """The way to the sites, once a round has begun."""
        assert self._mail is not None
        return self._mail

    @property
    def least_sources(self) -> int:
        """How many sources a round of this phase takes at least."""
        return self.setup.wait.min_sources if "source" in self.phase.parts else 0

    def begin(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Take up a round: its number, its model and the way to the sites."""
        self.round = server_round
        self._mail = self._mail or Mail(grid)
        self._online = self.setup.online(grid)
        text = Manifest(Kind.MODEL, "float32", self.setup.model.entries).text
        self.global_model = records.from_arrays(arrays, {"model": text})["model"]
        self.model = self.as_sent(self.global_model)
        self.post.checks.begin(self.global_model)
        self.post.open.clear()

    def is_online(self, node: Node) -> bool:
        """Whether a site is worth asking."""
        return node.id in self._online

    def present(self) -> list[Node]:
        """The sources of this round that are there; waiting for others would cost the deadline.

        Raises:
            QuorumError: too few are, or the phase needs the target and it is away.
        """
        target = self.roster.target
        if "target" in self.phase.parts and not self.is_online(target):
            raise QuorumError(f"{target.name} (target) is not connected.")
        if "source" not in self.phase.parts:
            return []
        connected = [n for n in self.roster.sources if self.is_online(n)]
        for node in self.roster.sources:
            if node not in connected:
                self.setup.notice("absent", node.name, "not connected; left out of this round")
        self.enough(len(connected))
        if not (most := self.setup.sources_per_round):
            return connected
        draws = generator(self.task.seed, "sample", self.round)
        drawn = torch.randperm(len(connected), generator=draws)[:most]
        return [connected[i] for i in sorted(drawn.tolist())]

    def request(
        self,
        node: Node,
        arrays: Mapping[str, Packed],
        numbers: Mapping[str, float] | None = None,
        hop: str = "",
    ) -> Message:
        """A message for one site, with a record of its own, valid until the deadline.

        Args:
            node: the site.
            arrays: what it is sent.
            numbers: what it is told; they may differ from site to site.
            hop: what it is asked for; the phase's first hop if it is left out.
        """
        phase, hop, part = self.phase, hop or self.phase.first_hop, self.part_of(node)
        contract, exchange = phase.part(hop, part), None
        assert contract is not None, f"{self.task.method} asks no {part} for {hop}"
        if contract.gradients and self.session and node.name in self.session.invitations:
            invitation = self.session.invitations[node.name]
            exchange = {**self.setup.summing.lazy.flat(), **invitation.flat()}
        heading = Heading(self.round, phase.name, hop, part)
        layouts = phase.layouts(self.options, self.setup.model)
        return self.post.write(node, heading, contract, layouts, arrays, numbers, exchange)

    def test_request(self) -> Message:
        """The message with which the target tests."""
        phase, node = self.phase, self.roster.target
        layouts = (phase.test_layouts or phase.layouts)(self.options, self.setup.model)
        heading = Heading(self.round, phase.name, "test", "target")
        return self.post.write(node, heading, phase.test, layouts, self.tested())

    def ask(
        self,
        nodes: Iterable[Node],
        hop: str,
        arrays: Mapping[str, Packed],
        needs: Iterable[str] = (),
        **numbers: float,
    ) -> Iterator[Reply]:
        """Another hop in mid-round: the same request to some sites -> their replies, as they come.

        Args:
            nodes: the sites.
            hop: what they are asked for.
            arrays: what they are sent.
            needs: numbers that a reply is of no use without.
            numbers: what they are told.
        """
        requests = [self.request(node, arrays, numbers, hop) for node in nodes]
        yield from self.accept(self.mail.deliver(requests, self.setup.wait.train), needs)

    def ask_target(
        self, hop: str, arrays: Mapping[str, Packed], needs: Iterable[str] = (), **numbers: float
    ) -> Reply:
        """As `ask`, the target alone.

        Raises:
            QuorumError: no acceptable reply came.
        """
        target = self.roster.target
        for reply in self.ask([target], hop, arrays, needs, **numbers):
            return reply
        raise QuorumError(f"{target.name} ({target.role}) gave no usable reply in this round.")

    def accept(self, replies: Iterable[Message], needs: Iterable[str] = ()) -> Iterator[Reply]:
        """Yield the replies that pass every check, as they arrive; report the others.

        Args:
            replies: from sites, or from whoever.
            needs: numbers that a reply is of no use without.
        """
        failed = self.session.give_up if self.session else lambda name: None
        yield from self.post.accept(replies, needs, self.roster, self.examine, failed)

    def convene(self, groups: Mapping[str, Iterable[Node]], syncs: int) -> None:
        """Open a session of the exchange; the requests of the hop that sums carry the invitations.

        Args:
            groups: who sums which gradients; a group is named after one of the phase's layouts,
                with `/SITE` behind it if there are several.
            syncs: sums per group.

        Raises:
            ConfigError: not one exchange fits into the round, or nobody hosts it.
        """
        layouts = self.phase.layouts(self.options, self.setup.model)
        members = {name: [node.name for node in nodes] for name, nodes in groups.items()}
        self.session = convene(self.setup, layouts, members, syncs)

    def adjourn(self) -> None:
        """Close the session of the exchange, if one is open, and account for what crossed in it."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
            self.setup.account(session)

    def steps_per_round(self, nodes: Iterable[Node]) -> int:
        """Steps of a round in which all take equally many: the largest site's share of an epoch."""
        train, most = self.task.train, max(self.roster.counts[n.name] for n in nodes)
        return max(1, math.ceil(most / train.batch_size / train.rounds_per_epoch))

    def enough(self, count: int) -> None:
        """Check the quorum of sources.

        Raises:
            QuorumError: fewer than `wait.min-sources` gave a usable reply.
        """
        if count < self.least_sources:
            raise QuorumError(
                f"{count} sources are left in this round, but wait.min-sources is "
                f"{self.least_sources}."
            )

    def as_sent(self, packed: Packed) -> Packed:
        """A model in the precision of the wire.

        Raises:
            NotFiniteError: a value is too large for it.
        """
        floats = self.task.wire.dtype
        if packed.manifest.floats == floats:
            return packed
        sent = pack(packed.unpack(), Kind.MODEL, floats)
        try:
            sent.check_finite("the server")
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error} wire.dtype is {floats}, whose largest value is {np.finfo(floats).max}; "
                "set it to float32."
            ) from None
        return sent

    def packed(self, arrays: Arrays) -> ArrayRecord:
        """A model as Flower carries it; at the server always in full precision."""
        return records.to_arrays({"model": pack(arrays, Kind.MODEL)})

    # ---- Flower's hooks -------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round."""
        self.begin(server_round, arrays, grid)
        return self.requests()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The rest of the round, and the next model."""
        model, numbers = self.combine(replies)
        return self.packed(model), MetricRecord(dict(numbers))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The request to the target, which tests on the labelled files it may have."""
        self.begin(server_round, arrays, grid)
        target = self.roster.target
        if not self.is_online(target):
            self.setup.notice("absent", target.name, "not connected; this round goes untested")
            return []
        return [self.test_request()]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The target's numbers as they are."""
        for reply in self.accept(replies):
            return MetricRecord(dict(reply.numbers))
        return None

    def summary(self) -> None:
        """Nothing: the server reports what it does."""
