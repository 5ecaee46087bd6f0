"""Who waits for what is on its way is answered once it is there, or after 1 s.

Sites wait for work, a run's program for replies, and both for pieces of these. Without this a site
that waits asks twenty times a second, most of a server's processor time goes into telling sites
that there is nothing to do, and a run hears of a reply up to half a second late. A caller says how
long it would wait in the header `Prefer: wait=SECONDS` (RFC 7240); a site is told how long it did,
so that it does not take the wait for a busy server. Flower's own SuperNodes say nothing and are
answered at once.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from itertools import chain
from typing import Any

PREFER, WAITED = b"prefer", b"x-fedda-waited"
LONGEST = 1.0  # seconds; a server that stops waits for its last answers
# Seconds until a site hears of a new request, whose pieces the run's program is still sending.
LATER = 0.05


class Waiting:
    """Knows who waits for what, and sees it come.

    A piece is known by its name, and the replies to a run's requests by the run's number.
    """

    def __init__(self, state: Any) -> None:
        """Watch what a run's program stores in flwr's LinkState; called in the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._news: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._waits: defaultdict[Hashable, set[asyncio.Event]] = defaultdict(set)  # by what for
        self._closed = False
        store, put = state.store_message_and_object_tree, state.store_object

        def stored(message: Any, *more: Any, **named: Any) -> Any:
            result = store(message, *more, **named)
            if message.metadata.reply_to_message_id:
                self._came(message.metadata.run_id)
            else:
                self._tell(message.metadata.dst_node_id)
            return result

        def put_down(run_id: int, session_id: str, piece: str, content: bytes) -> bool:
            done = put(run_id, session_id, piece, content)
            self._came(piece)
            return done

        state.store_message_and_object_tree, state.store_object = stored, put_down

    async def for_work(self, node_id: int, seconds: float) -> float:
        """Wait until there may be work for a site -> for how many seconds it waited."""
        news, began = self._news[node_id], time.monotonic()
        if not self._closed and seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), min(seconds, LONGEST))
        news.clear()
        return time.monotonic() - began

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
                    await asyncio.wait_for(came.wait(), min(seconds, LONGEST))
                answer = await ask()
            return answer
        finally:
            self._waits[what].discard(came)
            if not self._waits[what]:
                del self._waits[what]

    def _came(self, what: Hashable) -> None:
        """Note that something came, from any thread."""

        def tell() -> None:
            for each in self._waits.get(what, ()):
                each.set()

        if what in self._waits:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(tell)

    def more(self, node_id: int) -> None:
        """Note that there may be more work for a site than it was just handed."""
        self._news[node_id].set()

    def close(self) -> None:
        """Let no site wait any more."""
        self._closed = True
        for news in (*self._news.values(), *chain(*self._waits.values())):
            news.set()

    def _tell(self, node_id: int) -> None:
        """Note new work, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.call_later, LATER, self.more, node_id)


def wanted(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """How many seconds a request would wait, by its headers; 0 if it does not say."""
    for name, value in headers:
        words = value.strip().partition(b"=")
        if name == PREFER and words[0] == b"wait" and words[2].isdigit():
            return float(words[2])
    return 0.0
