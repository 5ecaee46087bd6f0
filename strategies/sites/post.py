"""What the server gives a strategy for one training, and its requests to the sites and replies."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedda import records
from fedda.config import ExchangeConfig, GuardConfig, WaitConfig
from fedda.errors import Code, FeddaError, public
from fedda.exchange import Host, LocalHost, Session
from fedda.maths.bounds import LEAST, NAMED, norm
from fedda.settings import Task
from fedda.wire import Part
from fedda.wire.packing import Kind, Manifest, Packed

from .mail import Mail
from .replies import MODEL, Checks, Lengths, Reply, with_cause
from .roster import Node, Roster

Notice = Callable[[str, str, str], None]  # kind of event, name of the site, sentence
MOST_LOST = 2  # times that a site loses it in a row; then it is no more asked to keep any

Whole = Callable[[], Message]
LEFT_OUT = "left out of this round"


@dataclass
class Memory:
    """What a strategy remembers from round to round; a checkpoint holds it."""

    numbers: dict[str, Any] = field(default_factory=dict)  # values that JSON can hold, by name
    # packed arrays by name; their kinds may differ
    arrays: dict[str, Packed] = field(default_factory=dict)

    def copy(self) -> "Memory":
        """Copy it, for a round that may have to be repeated."""
        return Memory(dict(self.numbers), dict(self.arrays))


@dataclass(frozen=True)
class Earlier:
    """A finished training of the same chain."""

    model: Packed  # the model of its last round, in full precision
    memory: Memory  # what its strategy remembered at the end


@dataclass(frozen=True)
class Setup:
    """What the server gives a strategy for one training."""

    task: Task  # the training's settings that the sites receive
    model: Manifest  # the layout of the run's model
    wait: WaitConfig = field(default_factory=WaitConfig)  # deadlines and the quorum
    guard: GuardConfig = field(default_factory=GuardConfig)  # bounds on replies
    # how gradients are summed
    summing: ExchangeConfig = field(default_factory=lambda: ExchangeConfig(p=1))
    # how many sources a round has, drawn each round from the seed; 0: all
    sources_per_round: int = 0
    # sends requests and fetches replies; by default a new `Mail` on Flower's grid
    mail: Mail | None = None
    # called for every site that is absent, fails, is refused or sends no reply
    notice: Notice = lambda what, site, text: None
    # returns the ids of nodes that are online; by default those that Flower lists
    online: Callable[[Grid], set[int]] = lambda grid: set(grid.get_node_ids())
    # opens the sessions in which sites sum gradients, for methods that sum any
    exchange: Host | LocalHost | None = None
    # called with every such session when it has ended
    account: Callable[[Session], None] = lambda session: None
    # in a chain, the trainings before this one, by target and in order
    earlier: Mapping[str, Earlier] = field(default_factory=dict)
    # called with the name of an event and its facts, to write it to the run's journal
    report: Callable[[str, Mapping[str, Any]], None] = lambda what, facts: None


class CachedModels:
    """The models that the sites of one training keep, as far as the server knows.

    The target gets a round's model for its test, and in many methods again in the next round, to
    train with. So the test's request asks the site to keep the model, and the next request only
    names it, by the SHA-256 of its bytes. A site that no longer has it, as after a restart, says
    so, and is sent the whole request at once. The same holds for a model per source, `model/SITE`.
    """

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, str]] = {}  # by site: what its request asks it to keep
        self._held: dict[str, dict[str, str]] = {}  # by site: what it keeps, hashes by name
        self._whole: dict[int, tuple[str, Whole]] = {}  # by node: the site, and its request
        self._lost: Counter[str] = Counter()
        self._hashed: tuple[object, str] = (None, "")  # the last buffer, and its hash

    def ask(self, site: str, arrays: Mapping[str, Packed]) -> dict[str, str]:
        """The table of a request that asks a site to keep the models that come with it."""
        kept = {n: p for n, p in arrays.items() if n.partition("/")[0] == MODEL}
        if not kept or self._lost[site] >= MOST_LOST:
            return {}
        self._asked[site] = {name: self._hash(packed) for name, packed in kept.items()}
        return self._asked[site]

    def name(self, site: str, arrays: Mapping[str, Packed]) -> dict[str, str]:
        """The table of a request that leaves out the models that a site has; empty if it has none.

        A site gives a model away with the next request that has arrays.
        """
        if not arrays:
            return {}
        held = self._held.pop(site, {})
        return {n: d for n, d in held.items() if n in arrays and self._hash(arrays[n]) == d}

    def named(self, site: str, node: int, whole: Whole) -> None:
        """Note how to make a request with all its arrays, if the site has lost one."""
        self._whole[node] = (site, whole)

    def answered(self, site: str, node: int, ok: bool) -> None:
        """Note the answer to a request: only a site that served it has kept what it was to keep."""
        asked = self._asked.pop(site, None)
        if ok and asked:
            self._held[site] = asked
        if ok and self._whole.pop(node, None) is not None:
            self._lost[site] = 0

    def again(self, reply: Message) -> Message | None:
        """The whole request for a site that has lost what the last one named; else None."""
        site, whole = self._whole.get(reply.metadata.src_node_id, ("", None))
        if whole is None or not reply.has_error() or reply.error.code != Code.FORGOTTEN:
            return None
        del self._whole[reply.metadata.src_node_id]
        self._lost[site] += 1
        return whole()

    def forget(self) -> None:
        """Free the requests that nobody will ask for any more, as a hop is over."""
        self._whole.clear()

    def _hash(self, packed: Packed) -> str:
        buffer, digest = self._hashed
        if buffer is not packed.buffer:
            digest = hashlib.sha256(packed.buffer).hexdigest()
            self._hashed = (packed.buffer, digest)
        return digest


@dataclass(frozen=True)
class Heading:
    """What every request names: its round, phase, hop and part.

    And whether the round is the last though others were planned, only if it is.
    """

    round: int
    phase: str
    hop: str
    part: str
    final: bool = False

    def table(self) -> dict[str, Any]:
        """The entries of a request."""
        return {name: value for name, value in vars(self).items() if value is not False}


class Post:
    """Writes requests, and remembers which reply it may expect from which site.

    Attributes:
        open: the requests that have no reply yet, by the name of the site: the contract of the
            part that it was asked to do, the layouts of the arrays that this part sends besides
            the run's model, and the model that was sent.
        held: which site keeps the model that it was sent to test.
        lost: why no reply is waited for any more, by the name of the site.
    """

    def __init__(self, setup: Setup) -> None:
        self.checks = Checks(setup.guard, setup.model, setup.task.suspect)
        self.open: dict[str, tuple[Part, Mapping[str, Manifest], Packed | None]] = {}
        self.held = CachedModels()
        self.lost: dict[str, str] = {}
        self._setup, self._task = setup, setup.task.flat()

    def write(
        self,
        node: Node,
        heading: Heading,
        part: Part,
        layouts: Mapping[str, Manifest],
        arrays: Mapping[str, Packed],
        numbers: Mapping[str, float] | None = None,
        exchange: Mapping[str, Any] | None = None,
        keep: bool = False,
    ) -> Message:
        """Make a request to one site, with records of its own, valid until the deadline.

        Args:
            node: the site.
            heading: round, phase, hop and part.
            part: the contract of what the site is asked to do; its reply is checked against it.
            layouts: layouts of the arrays that are sent besides the run's model.
            arrays: the arrays to send.
            numbers: the numbers to send.
            exchange: the site's invitation to sum gradients, if it has one.
            keep: whether the site is to keep the model for its next request.
        """
        self.open[node.name] = (part, layouts, arrays.get(MODEL))
        tables = {"exchange": exchange} if exchange else {}
        tables |= {"step": {**heading.table(), **(numbers or {})}, "task": self._task}
        wait, tests = self._setup.wait, heading.hop == "test"
        kind, ttl = ("evaluate", wait.evaluate) if tests else ("train", wait.train)

        def made(kept: Mapping[str, str]) -> Message:
            sent = arrays if keep else {n: p for n, p in arrays.items() if n not in kept}
            content = records.write(sent, **tables, **({"kept": kept} if kept else {}))
            return Message(content, node.id, kind, ttl=ttl, group_id=str(heading.round))

        if keep:
            return made(self.held.ask(node.name, arrays))
        if kept := self.held.name(node.name, arrays):
            self.held.named(node.name, node.id, lambda: made({}))
        return made(kept)

    def _lengths(self, roster: Roster) -> Lengths | None:
        """What bounds the lengths of the sources' updates, if enough are to send one."""
        guard, sources = self._setup.guard, {node.name for node in roster.sources}
        asked = [
            n for n, (part, _, sent) in self.open.items() if n in sources and _trains(part, sent)
        ]
        return Lengths(guard, len(asked)) if guard.max_update and len(asked) >= LEAST else None

    def _bounded(self, lengths: Lengths) -> Iterator[Reply]:
        """Yield the replies that were held back; report those that are scaled down."""
        most = self._setup.guard.max_update
        for reply, times, factor in lengths.rest():
            if factor < NAMED:
                text = f"its update is {times:.3g} times as long as the longest of the others'; "
                text += f"scaled by {factor:.2g}, as guard.max-update is {most:g}"
                self._setup.notice("clipped", reply.node.name, text)
            yield reply
            del reply

    def accept(
        self,
        replies: Iterable[Message],
        needs: Iterable[str],
        roster: Roster,
        examine: Callable[[Reply], None],
        failed: Callable[[str], None],
    ) -> Iterator[Reply]:
        """Yield the replies that pass every check, as they arrive; report the others.

        Args:
            replies: messages as they came; not even their sender is checked yet.
            needs: names of the numbers that every reply must have.
            roster: the sites of the training.
            examine: the method's own check.
            failed: called with the name of each site that reports a failure.
        """
        needs, notice = set(needs), self._setup.notice
        lengths = self._lengths(roster)
        for message in replies:
            node = roster.by_id(message.metadata.src_node_id)
            if node is None or node.name not in self.open:
                notice("stale", node.name if node else "", "a reply nobody asked for; dropped")
                continue
            part, layouts, sent = self.open.pop(node.name)
            self.held.answered(node.name, node.id, not message.has_error())
            if message.has_error():
                cause = self._setup.task.suspect if message.error.code == Code.NOT_FINITE else ""
                notice("failed", node.name, with_cause(public(message.error.code), cause))
                failed(node.name)
                continue
            try:
                reply = self.checks.read(node, message, part, layouts, needs, roster, sent)
                examine(reply)
            except FeddaError as error:
                notice("refused", node.name, str(error))
                continue
            del message
            model = reply.arrays.get(MODEL) if node.role == "source" else None
            if lengths is None or model is None or sent is None:
                yield reply
            else:
                length = norm(model.unpack(), sent.before.unpack())
                yield from lengths.add(reply, sent, length)
            del reply, model  # free them before the next one is fetched
        if lengths is not None:
            yield from self._bounded(lengths)
        for name in sorted(self.open):
            notice("silent", name, f"{self.lost.get(name, 'no reply')}; {LEFT_OUT}")
        self.open.clear()
        self.lost.clear()
        self.held.forget()


def _trains(part: Part, sent: Packed | None) -> bool:
    """Whether a site that was sent a model is to send one back."""
    return sent is not None and part.leaves.arrays.get(MODEL) is Kind.MODEL
