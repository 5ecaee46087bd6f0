"""Which sites are there: by their open connections, and not by heartbeats alone.

Flower calls a site dead when no heartbeat has come for a minute, and drops the answers of the dead.
But a site whose machine is busy, or whose process is stopped for a while, is late and not dead. Its
system still holds its connections open, and answers when this one asks whether it is there (TCP's
keep-alive). So a site with an open connection counts as online; if its process or its machine dies,
the connection breaks, and Flower's minute begins.
"""

import time
from collections import defaultdict
from collections.abc import Callable, MutableSet
from weakref import WeakSet

from .listener import Protocol

INTERVAL_S = 30.0  # Flower waits for two such times without a heartbeat
LATE_S = 15.0  # so long after a heartbeat an open connection stands in for the next one

Beat = Callable[[int, float], bool]


class Present:
    """The connections that each site has opened, and when it was last heard."""

    def __init__(self, beat: Beat) -> None:
        """Take what counts as a heartbeat of a node: LinkState's `acknowledge_node_heartbeat`."""
        self._beat = beat
        self._connections: dict[int, MutableSet[Protocol]] = defaultdict(WeakSet)
        self._heard: dict[int, float] = {}

    def heard(self, node_id: int, connection: Protocol | None, beats: bool) -> None:
        """Note a request of a site.

        Args:
            node_id: the site, whose signature was checked.
            connection: on which it came.
            beats: whether it is a heartbeat.
        """
        if connection is not None:
            connection.stay()
            self._connections[node_id].add(connection)
        if beats:
            self._heard[node_id] = time.monotonic()

    def left(self, node_id: int) -> None:
        """Note that a site has signed off."""
        self._connections.pop(node_id, None)
        self._heard.pop(node_id, None)

    def tend(self) -> None:
        """Stand in for the heartbeats that are late of sites with an open connection."""
        now = time.monotonic()
        for node_id, last in list(self._heard.items()):
            if now - last < LATE_S:
                continue
            if not any(each.is_open for each in list(self._connections.get(node_id, ()))):
                continue
            if self._beat(node_id, INTERVAL_S):
                self._heard[node_id] = now
            else:  # its key was revoked
                self.left(node_id)
