"""Leaving a server between two rounds: once asked to, a node still serves the round it is in.

What a server calls a round is its own word, so a node serves only so many requests more.
"""

import threading
import time

from flwr.app import Message

QUIET_S = 10.0  # without a message, after which a round is over for this node
MOST = 16  # requests of one round after a node was asked to leave; no method has so many


class Ending:
    """Says when a node that was asked to leave may do so; asked from any thread."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._round: tuple[int, str] | None = None  # run and round of the last message
        self._last = float("-inf")
        self._left = MOST

    def ask(self) -> None:
        """Leave once the round is over."""
        self._asked.set()

    @property
    def asked(self) -> bool:
        """Whether somebody has asked."""
        return self._asked.is_set()

    def over(self, head: Message | None) -> bool:
        """Whether to leave now: asked to, and the round is over.

        Args:
            head: the message that has come, of which nothing was done yet; None: none has.
        """
        if head is None:
            return self.asked and time.monotonic() - self._last >= QUIET_S
        belongs = head.metadata.run_id, head.metadata.group_id
        return self.asked and (belongs != self._round or not self._left)

    def worked(self, head: Message) -> None:
        """Note a message that was answered."""
        self._round = head.metadata.run_id, head.metadata.group_id
        self._last = time.monotonic()
        self._left -= self.asked
