"""Sending requests and taking replies one by one, as they arrive, until a deadline.

Flower's `send_and_receive` returns all replies at once, sleeps three seconds between looks and
goes on after its timeout while the sites still compute. Here a deadline travels with the request
(its ttl), so that a site drops what nobody waits for, and a reply is handed on before the next one
is fetched, so that the server never holds them all.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

POLL = 0.05  # seconds between looks at first; grows while nothing comes
POLL_MOST = 0.5

Watcher = Callable[[Message], None]


def _ignore(message: Message) -> None:
    pass


class Mail:
    """The way to the sites and back.

    Args:
        grid: Flower's.
        sent: called with every request that went out.
        received: called with every reply that came in, errors included.
    """

    def __init__(self, grid: Grid, sent: Watcher = _ignore, received: Watcher = _ignore) -> None:
        self.grid = grid
        self.sent = sent
        self.received = received

    def deliver(self, requests: Iterable[Message], wait: float) -> Iterator[Message]:
        """Send requests and yield their replies in the order they come, for `wait` seconds.

        Requests must have been made with `ttl=wait`. Whatever comes later is never fetched.
        """
        open_ids: list[str] = []
        for request in requests:
            self.sent(request)
            open_ids += filter(None, self.grid.push_messages([request]))
            del request
        deadline, pause = time.monotonic() + wait, POLL
        while open_ids:
            came = False
            for message_id in list(open_ids):
                for reply in self.grid.pull_messages([message_id]):
                    came = True
                    if message_id in open_ids:
                        open_ids.remove(message_id)
                    self.received(reply)
                    yield reply
                    del reply  # not held while the next one is fetched
            if not open_ids or time.monotonic() > deadline:
                return
            pause = POLL if came else min(pause * 1.3, POLL_MOST)
            time.sleep(pause)
