"""A site that waits for work is answered once there is some, or after a while.

Without this each site asks twenty times a second, and most of a server's processor time goes into
telling sites that there is nothing to do. A site says how long it would wait in the header
`Prefer: wait=SECONDS` (RFC 7240), and is told how long it did, so that it does not take the wait
for a busy server. Flower's own SuperNodes say nothing and are answered at once. The more sites
wait, the longer each does, so that they all together ask no more often.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PREFER, WAITED = b"prefer", b"x-fedda-waited"
WHILE = 1.0  # seconds for which a caller waits
# Sites for which there is nothing to do ask this often in a second, all of them together, but each
# of them after so many seconds at the latest.
SPREAD, LONGEST = 40.0, 25.0


@dataclass
class Due:
    """How many requests a site has not been handed yet, at most; some may have expired meanwhile.

    When it first asks, there may be one from before this server began.
    """

    most: int = 1
    some: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.some.set()


class Waiting:
    """Knows which sites wait, and sees requests for them come."""

    def __init__(self, state: Any) -> None:
        """Watch what is stored in flwr's LinkState; called in the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, Due] = defaultdict(Due)  # by site
        self._idle = 0  # sites that wait for work
        self._closed = False
        store = state.store_message_and_object_tree

        def stored(message: Any, *more: Any, **named: Any) -> Any:
            result = store(message, *more, **named)
            if not message.metadata.reply_to_message_id:
                self._tell(message.metadata.dst_node_id)
            return result

        state.store_message_and_object_tree = stored

    async def for_work(self, node_id: int, seconds: float) -> tuple[float, int]:
        """Wait until there may be work for a site, for no longer than it would.

        Returns:
            For how many seconds it waited, and how many requests there are for it at most. If
            there are none, nobody has to look: this server has seen none come that the site was
            not handed.
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
        return time.monotonic() - began, due.most

    def handed(self, node_id: int, requests: int, most: int) -> None:
        """Note how many requests a site was handed when it asked.

        Args:
            node_id: the site.
            requests: it was handed; none: those that there were have expired.
            most: there were when it asked. Others may have come meanwhile.
        """
        due = self._due[node_id]
        due.most = max(0, due.most - (requests or most))
        if not due.most:
            due.some.clear()

    def close(self) -> None:
        """Let no site wait any more."""
        self._closed = True
        for due in self._due.values():
            due.some.set()

    def _tell(self, node_id: int) -> None:
        """Note new work, from any thread."""

        def more() -> None:
            self._due[node_id].most += 1
            self._due[node_id].some.set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(more)


def wanted(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """How many seconds a request would wait, by its headers; 0 if it does not say."""
    for name, value in headers:
        words = value.strip().partition(b"=")
        if name == PREFER and words[0] == b"wait" and words[2].isdigit():
            return float(words[2])
    return 0.0
