"""A run's messages over lanes: one stream to each site, under Flower's public Grid.

A site is invited by one ordinary message of Flower, the only one that it gets. From then on its
requests and replies are frames of its stream. A reply's arrays come only when somebody asks for the
reply, and only a few large replies come at a time, so that memory holds few models whatever the
number of sites.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedda import flower
from fedda.errors import Code, ConfigError
from fedda.flower import ErrorCode
from fedda.lane.invitation import KIND
from fedda.lane.lane_end import LaneEnd
from fedda.lane.lane_host import LaneHost
from fedda.lane.parcels import Asked, Incoming
from fedda.ops.address import Address
from fedda.ops.allocator import one_pool
from fedda.ops.spawn import LANES
from fedda.results.read import counted

log = logging.getLogger("fedda.server")

WHILE = 1.0  # seconds for which a look waits for a reply
TICK_S = 0.25  # between two looks at what is late
INVITED_S = 20.0  # seconds for which an invitation is good, and until it is made again
# The same for a site that was here, at first; twice as long each time. Its process may have been
# killed with the invitation in its hands.
SOON_S = 2.5
AGAIN_S = 2.0  # a site whose process goes on is back sooner; another one is invited
HOLD_S = 10.0  # seconds for which half a reply is kept whose connection broke
STALL_S = 300.0  # seconds without a frame in the middle of a message
SMALL = 2**20  # bytes of a reply that need no room
ROOM = 2  # larger replies that memory holds at a time
MOST = 2  # how many times as large as the largest request's arrays those of a reply may be


@dataclass
class Guest:
    """A node, as the run knows it."""

    node: int
    ticket: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    line: LaneEnd = field(init=False)
    invited: float = float("-inf")  # when it last was, on the monotonic clock
    again: float = float("-inf")  # when it may be invited again
    pause: float = INVITED_S  # between two invitations
    wanted: bool = False  # whether it is to be invited at once
    questions: set[str] = field(default_factory=set)  # the invitations' messages


class LaneGrid(Grid):
    """Takes the place of Flower's grid, which it needs for invitations and the list of nodes."""

    def __init__(self, grid: Grid, place: Path | Address) -> None:
        """Listen in the gateway's folder, or at an address."""
        self._grid, self._calling = grid, threading.Lock()
        self.host = LaneHost(place)
        self._changed = threading.Condition()
        self._sites: dict[int, Guest] = {}
        self._asked: dict[str, Asked] = {}  # by name, the oldest first
        self._wanted: Collection[str] = ()  # that the last look asked for
        self._large: set[str] = set()  # whose replies take room
        # Bytes of the largest request's arrays so far, or as many as `expect` was called with.
        self.sent = 0
        self._closed, self._wake = threading.Event(), threading.Event()
        self._clock = threading.Thread(target=self._tend, name="lanes", daemon=True)
        self._clock.start()

    def __enter__(self) -> "LaneGrid":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all streams."""
        self._closed.set()
        self._wake.set()
        with self._changed:
            self._changed.notify_all()
        self.host.close()
        self._clock.join(TICK_S * 4)

    def expect(self, size: int) -> None:
        """Accept replies with `size` bytes of arrays, even if no request was as large."""
        self.sent = max(self.sent, size)

    def advice(self) -> str:
        """What to do about sites that were invited and have not come; empty if none are."""
        waits = [site for site in self._sites.values() if not site.line.met]
        if not waits or not self.host.port:
            return ""
        were = "was" if len(waits) == 1 else "were"
        return (
            f" {counted(len(waits), 'site')} {were} invited to port {self.host.port} of this "
            "machine: where they are on others, name an address that they reach with -c "
            "run.listen=HOST:PORT."
        )

    # ---- Flower's Grid -------------------------------------------------------------------------

    @property
    def run(self) -> Any:
        return self._grid.run

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    def create_message(self, *args: Any, **named: Any) -> Message:
        return self._grid.create_message(*args, **named)

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> list[Any]:
        """The nodes that are online; a site with an open stream is, also if it is busy."""
        with self._calling:
            nodes = list(self._grid.get_nodes())
        known = {node.node_id for node in nodes}
        more = [n for n, site in list(self._sites.items()) if site.line.connected]
        return nodes + [flower.node_pb2.NodeInfo(node_id=n) for n in more if n not in known]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            name = secrets.token_hex(16)
            asked = Asked.of(message, name)
            with self._changed:
                self._asked[name] = asked
            site = self._site(asked.node)
            size = site.line.send(message, name)
            self.expect(size)
            if not site.line.connected:
                site.wanted = True
                self._wake.set()
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies that are there, in the order they came; wait a second for the first.

        Each takes room until the caller asks for the next one.
        """
        wanted = dict.fromkeys(message_ids)

        def there() -> list[str]:
            asked = ((name, self._asked.get(name)) for name in wanted)
            return [name for name, each in asked if each is not None and each.reply is not None]

        with self._changed:
            self._wanted = wanted
            self._changed.notify_all()
            if wanted:
                self._changed.wait_for(lambda: there() or self._closed.is_set(), WHILE)
            found = sorted(there(), key=lambda name: self._asked[name].came)
        for name in found:
            with self._changed:
                asked = self._asked.pop(name, None)
            if asked is None:
                continue
            try:
                yield asked.answer()
            finally:
                del asked
                with self._changed:
                    self._large.discard(name)
                    self._changed.notify_all()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        left, replies = set(self.push_messages(messages)), list[Message]()
        ends = float("inf") if timeout is None else time.monotonic() + timeout
        while left and time.monotonic() < ends and not self._closed.is_set():
            for reply in self.pull_messages(left):
                replies.append(reply)
                left.discard(reply.metadata.reply_to_message_id)
        return replies

    # ---- sites ---------------------------------------------------------------------------------

    def _site(self, node: int) -> Guest:
        with self._changed:
            found = self._sites.get(node)
            if found is None:
                found = self._sites[node] = Guest(node)
                found.line = LaneEnd(
                    lambda incoming, is_open: self._admit(node, incoming, is_open),
                    lambda incoming: self._came(node, incoming),
                    self._taken,
                    lambda: self._anew(node),
                )
        return found

    def _invite(self, sites: Sequence[Guest]) -> None:
        """Ask sites to open their streams that are online, unless they were asked just now."""
        now = time.monotonic()
        sites = [site for site in sites if now >= site.again]
        nodes = {node.node_id: node for node in self.get_nodes()} if sites else {}
        sites, messages = [site for site in sites if site.node in nodes], []
        if not sites:
            return
        for site in sites:
            site.invited, site.again, site.wanted = now, now + site.pause, False
            site.pause = min(2 * site.pause, INVITED_S)
            invited = self.host.invite_node(site.ticket, site.line, nodes[site.node])
            about = {"ttl": INVITED_S, "group_id": invited.text()}
            messages.append(Message(RecordDict(), site.node, KIND, **about))
        with self._calling:
            questions = list(self._grid.push_messages(messages))
        for site, question in zip(sites, questions, strict=True):
            if question:
                site.questions.add(question)
            else:
                error = Error(ErrorCode.NODE_UNAVAILABLE, "the server knows no such node")
                self._give_up(site, error)

    def _answers(self) -> None:
        """Read why invitations came to nothing: Flower says so, sites answer none."""
        with self._calling:
            open_ = {q: site for site in list(self._sites.values()) for q in site.questions}
            replies = list(self._grid.pull_messages(list(open_))) if open_ else []
        for reply in replies:
            site = open_.get(reply.metadata.reply_to_message_id)
            if site is None:
                continue
            site.questions.discard(reply.metadata.reply_to_message_id)
            if not site.questions:
                site.again = float("-inf")
            if (
                reply.has_error()
                and (code := reply.error.code) == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            ):
                reason = "Flower's own SuperNode knows no lanes; run with -c run.transport=flower"
                log.error("node %d: %s", site.node, reason)
                self._give_up(site, Error(code, reason))

    def _give_up(self, site: Guest, error: Error) -> None:
        """No request to a site will be answered."""
        with self._changed:
            for asked in self._asked.values():
                if asked.node == site.node and asked.reply is None:
                    asked.reply = error
            self._changed.notify_all()

    # ---- called by the threads of streams ------------------------------------------------------

    def _admit(self, node: int, incoming: Incoming, is_open: Callable[[], bool]) -> bool:
        """Whether to take a reply's arrays; wait until there is room for them."""
        name = incoming.answers
        with self._changed:
            asked = self._asked.get(name)
            if asked is None or asked.node != node or asked.reply is not None:
                log.warning("node %d sent a message that nobody asked for; it stays unread", node)
                return False
            if incoming.size > MOST * self.sent:
                asked.refused = f"a reply has {incoming.size:,} bytes of arrays, more than it may"
                log.error("node %d: %s", node, asked.refused)
                return False
            if incoming.size <= SMALL:
                return True
            while is_open() and name in self._asked and not self._closed.is_set():
                if name in self._wanted and len(self._large) < ROOM:
                    self._large.add(name)
                    return True
                if name not in self._wanted and self._overtaken(node):
                    return False
                self._changed.wait(TICK_S)
            return False

    def _overtaken(self, node: int) -> bool:
        """Whether the run has turned to a later request to a node."""
        asked = (self._asked.get(name) for name in self._wanted)
        return any(each is not None and each.node == node for each in asked)

    def _came(self, node: int, incoming: Incoming) -> None:
        name = incoming.answers
        with self._changed:
            asked = self._asked.get(name)
            if asked is not None and asked.node == node and asked.reply is None:
                asked.came = time.monotonic()
                if incoming.keeps:
                    asked.reply = incoming
                elif asked.refused:
                    asked.reply = Error(ErrorCode.UNKNOWN, "the reply cannot be read")
            if asked is None or asked.reply is not incoming:
                self._large.discard(name)
            self._changed.notify_all()

    def _taken(self, name: str) -> None:
        if (asked := self._asked.get(name)) is not None:
            asked.taken = True

    def _anew(self, node: int) -> None:
        """A site's program was restarted: what it had of requests is lost."""
        with self._changed:
            for name, asked in self._asked.items():
                if asked.node == node and asked.taken and asked.reply is None:
                    asked.reply = Error(int(Code.RESTARTED), Code.RESTARTED.public)
                    self._large.discard(name)
            self._changed.notify_all()

    # ---- the clock -----------------------------------------------------------------------------

    def _tend(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            try:
                self._expire()
                self._invite([s for s in list(self._sites.values()) if self._is_awaited(s)])
                self._answers()
                self._say()
            except Exception as error:  # the server may be busy; the next look is soon
                if not self._closed.is_set():
                    log.warning("a look at the lanes failed (%s); trying again", error)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._changed:
            for name, asked in list(self._asked.items()):
                if now > asked.ends + WHILE * 2:  # nobody has asked for it
                    del self._asked[name]
                    self._large.discard(name)
                elif now > asked.ends and asked.reply is None:
                    asked.reply = Error(ErrorCode.MESSAGE_UNAVAILABLE, "the request has expired")
                    line = self._sites[asked.node].line
                    line.drop(name)
                    asked.part = line.partial is not None and line.partial.answers == name
            self._changed.notify_all()

    def _say(self) -> None:
        """Write down what sites work on, for those who watch the server."""
        asked = [each for each in list(self._asked.values()) if each.taken and each.reply is None]
        nodes = {each.node: each.head.metadata.message_type for each in asked}
        self.host.say(asked[0].head.metadata.run_id if asked else 0, nodes)

    def _is_awaited(self, site: Guest) -> bool:
        """Whether to invite a site; cut its stream if that stalls."""
        line, now = site.line, time.monotonic()
        if line.met and line.since > site.invited:  # it has come since
            site.again, site.pause = float("-inf"), SOON_S
            site.questions.clear()
        if line.connected:
            if line.partial is not None and line.partial.keeps and now > line.heard + STALL_S:
                log.warning("the stream of node %d stalls; it is closed", site.node)
                line.cut()
            return False
        if now > line.since + HOLD_S and (name := line.forget()):
            with self._changed:
                self._large.discard(name)
        waits = any(a.node == site.node and a.reply is None for a in list(self._asked.values()))
        return waits and (site.wanted or now > line.since + AGAIN_S)


@contextlib.contextmanager
def lanes(grid: Grid, transport: str = "lane", listen: str = "127.0.0.1:0") -> Iterator[Grid]:
    """A `LaneGrid`, or Flower's own grid if the run wants that.

    Args:
        grid: Flower's.
        transport: the setting `run.transport`.
        listen: the setting `run.listen`, for a SuperLink that is Flower's own.

    Raises:
        ConfigError: fedda's server passes no messages of Flower's on but invitations.
        RunError: another program listens there.
    """
    folder = os.environ.get(LANES)
    if transport == "flower":
        if folder is not None:
            raise ConfigError(
                "run.transport=flower needs Flower's own SuperLink: `fedda superlink` passes on "
                "only invitations to lanes"
            )
        yield grid
        return
    one_pool()
    host, _, port = listen.rpartition(":")
    with LaneGrid(grid, Path(folder) if folder else Address(host.strip("[]"), int(port))) as made:
        yield made
