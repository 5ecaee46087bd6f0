"""Sites that were turned away, for the server's console: each reason once in ten minutes a site."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from fedda.ops.refusal import Refusal

GONE = "unregistered"  # a node's status in flwr
AGAIN_S = 600.0
KEPT = 256  # reasons and sites that are remembered; strangers could make any number
MOST = 8  # lines at a look


class Nodes:
    """What flwr's LinkState knows of nodes, also of those whose keys were revoked."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def name(self, node_id: int) -> str:
        """The name of a node, or its number if it has none."""
        found = self._state.get_node_info(node_ids=[node_id])
        return (found[0].name if found else "") or f"of node {node_id}"

    def revoked(self, key: bytes) -> bool:
        """Whether a key was registered once, and is not now."""
        return any(info.public_key == key for info in self._state.get_node_info(statuses=[GONE]))


class Rejections:
    """Collects what the console is to say of sites that were refused."""

    def __init__(self, name: Callable[[int], str]) -> None:
        """Take what tells the name of a registered node."""
        self._name = name
        self._said: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._news: list[str] = []

    def note(self, why: Refusal, node_id: int, address: str) -> None:
        """Note a refused request.

        Args:
            why: the reason.
            node_id: the registered site that it is of; 0 if it is of none.
            address: where it came from.
        """
        if not node_id and why.code == "signature":
            return  # what strangers send is not worth a line
        who = f"site {self._name(node_id)}" if node_id else f"a site at {address}"
        now, about = time.monotonic(), (why.code, who)
        if now < self._said.get(about, -AGAIN_S) + AGAIN_S:
            return
        self._said[about] = now
        self._said.move_to_end(about)
        while len(self._said) > KEPT:
            self._said.popitem(last=False)
        if len(self._news) < MOST:
            self._news.append(f"{who} is refused: {why.at_server()}")

    def news(self) -> list[str]:
        """What is new since the last call."""
        news, self._news = self._news, []
        return news
