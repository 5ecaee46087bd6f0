"""Write a strategy's requests to the sites, and check the sites' replies."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from fedda import records
from fedda.errors import Code, FeddaError, public
from fedda.maths.bounds import LEAST, NAMED, norm
from fedda.wire import Part
from fedda.wire.packing import Kind, Manifest, Packed

from .cached_models import MODEL, CachedModels
from .lengths import Lengths
from .replies import Checks, Reply, with_cause
from .roster import Node, Roster
from .setup import Setup

LEFT_OUT = "left out of this round"


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
        self._setup = setup

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
        tables |= {"step": {**heading.table(), **(numbers or {})}, "task": self._setup.task.flat()}
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
