"""Who waits for what is on its way is answered once it is there, or after a while.

Sites wait for work, a run's program for replies, and both for pieces of these. Without this a site
that waits asks twenty times a second, most of a server's processor time goes into telling sites
that there is nothing to do, and a run hears of a reply up to half a second late. A caller says how
long it would wait in the header `Prefer: wait=SECONDS` (RFC 7240); a site is told how long it did,
so that it does not take the wait for a busy server. Flower's own SuperNodes say nothing and are
answered at once. The more sites wait, the longer each does, so that they all together ask no more
often.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

PREFER, WAITED = b"prefer", b"x-fedda-waited"
WHILE = 1.0  # seconds for which a caller waits
# Sites for which there is nothing to do ask this often in a second, all of them together, but each
# of them after so many seconds at the latest.
SPREAD, LONGEST = 100.0, 10.0
RUNS_KEPT = 64
# Seconds until a site hears of a new request, whose pieces the run's program is still sending.
LATER = 0.05


@dataclass
class Due:
    """How many requests a site has not been handed yet, at most; some may have expired meanwhile.

    When it first asks, there may be one from before this server began.
    """

    most: int = 1
    some: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.some.set()


@dataclass
class Replies:
    """What came for a run: the requests with replies, since flwr last looked at all requests."""

    to: set[str] = field(default_factory=set)
    looked: float = float("-inf")


class Waiting:
    """Knows who waits for what, and sees it come.

    A piece is known by its name, and the replies to a run's requests by the run's number.
    """

    def __init__(self, state: Any) -> None:
        """Watch what a run's program stores in flwr's LinkState; called in the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, Due] = defaultdict(Due)  # by site
        self._idle = 0  # sites that wait for work
        self._runs: OrderedDict[int, Replies] = OrderedDict()
        self._waits: defaultdict[Hashable, set[asyncio.Event]] = defaultdict(set)  # by what for
        self._closed = False
        store, put = state.store_message_and_object_tree, state.store_object

        def stored(message: Any, *more: Any, **named: Any) -> Any:
            result = store(message, *more, **named)
            if request := message.metadata.reply_to_message_id:
                self._replies(message.metadata.run_id).to.add(request)
                self._came(message.metadata.run_id)
            else:
                self._tell(message.metadata.dst_node_id)
            return result

        def put_down(run_id: int, session_id: str, piece: str, content: bytes) -> bool:
            done = put(run_id, session_id, piece, content)
            self._came(piece)
            return done

        state.store_message_and_object_tree, state.store_object = stored, put_down

    async def for_work(self, node_id: int, seconds: float) -> tuple[float, bool]:
        """Wait until there may be work for a site, for no longer than it would.

        Returns:
            For how many seconds it waited, and whether there may be work. If there may not, nobody
            has to look: this server has seen none come that the site was not handed.
        """
        due, began = self._due[node_id], time.monotonic()
        if not self._closed and seconds > 0:
            self._idle += 1
            try:
                longest = max(WHILE, min(LONGEST, self._idle / SPREAD))
                async with asyncio.timeout(min(seconds, longest)):
                    await due.some.wait()
            except TimeoutError:
                pass
            finally:
                self._idle -= 1
        return time.monotonic() - began, due.some.is_set()

    def handed(self, node_id: int, requests: int) -> None:
        """Note how many requests a site was handed when it asked; none: there are none for it."""
        due = self._due[node_id]
        due.most = max(0, due.most - requests) if requests else 0
        if not due.most:
            due.some.clear()

    async def until_there(
        self,
        what: Hashable,
        ask: Callable[[], Awaitable[bytes | None]],
        seconds: float,
        not_yet: bytes = b"",
    ) -> bytes | None:
        """Ask for something, and once more when it came, if it is on its way -> the answer.

        Args:
            what: a piece's name, or a run's number.
            ask: asks for it.
            seconds: to wait for it.
            not_yet: the answer while it is on its way.
        """
        came = asyncio.Event()
        self._waits[what].add(came)  # before it is asked for, so that it cannot come unseen
        try:
            answer = await ask()
            if answer == not_yet and not self._closed and seconds > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(seconds, WHILE)):
                        await came.wait()
                answer = await ask()
            return answer
        finally:
            self._waits[what].discard(came)
            if not self._waits[what]:
                del self._waits[what]

    def replied(self, run_id: int, requests: list[str]) -> list[str]:
        """The requests of a run that flwr is to look at: those with replies, at times all of them.

        Only flwr knows which have expired, or had replies before this server began.
        """
        replies, now = self._replies(run_id), time.monotonic()
        if now > replies.looked + WHILE:
            replies.looked = now
        else:
            requests = [name for name in requests if name in replies.to]
        replies.to.difference_update(requests)
        return requests

    def _replies(self, run_id: int) -> "Replies":
        replies = self._runs.setdefault(run_id, Replies())
        while len(self._runs) > RUNS_KEPT:
            self._runs.popitem(last=False)
        return replies

    def _came(self, what: Hashable) -> None:
        """Note that something came, from any thread."""

        def tell() -> None:
            for each in self._waits.get(what, ()):
                each.set()

        if what in self._waits:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(tell)

    def close(self) -> None:
        """Let no site wait any more."""
        self._closed = True
        for event in chain((due.some for due in self._due.values()), *self._waits.values()):
            event.set()

    def _tell(self, node_id: int) -> None:
        """Note new work, from any thread."""

        def more() -> None:
            self._due[node_id].most += 1
            self._due[node_id].some.set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.call_later, LATER, more)


def wanted(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """How many seconds a request would wait, by its headers; 0 if it does not say."""
    for name, value in headers:
        words = value.strip().partition(b"=")
        if name == PREFER and words[0] == b"wait" and words[2].isdigit():
            return float(words[2])
    return 0.0
