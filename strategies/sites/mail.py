"""Sending requests and taking replies one by one, as they arrive, until a deadline.

Flower's `send_and_receive` returns all replies at once, sleeps three seconds between looks and
goes on after its timeout while the sites still compute. Here a deadline travels with the request
(its ttl), so that a site drops what nobody waits for, and a reply is handed on before the next one
is fetched, so that the server never holds them all.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

POLL = 0.05  # seconds between looks at first; grows while nothing comes
POLL_MOST = 0.5

# What the server itself answers in the place of a site that is gone, or after the deadline.
GIVEN_UP = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}

Watcher = Callable[[Message], None]


def _ignore(message: Message) -> None:
    pass


def given_up(reply: Message) -> bool:
    """Whether this is no site's reply, but the server's word that there will be none."""
    return reply.has_error() and reply.error.code in GIVEN_UP


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

        Requests must have been made with `ttl=wait`. Whatever comes later is never fetched, and a
        site for which no reply will come is not waited for.
        """
        asked: dict[str, int] = {}  # the node behind each request
        for request in requests:
            self.sent(request)
            node = request.metadata.dst_node_id
            asked |= {i: node for i in self.grid.push_messages([request]) if i}
            del request
        deadline, pause, still = time.monotonic() + wait, POLL, dict.fromkeys(asked)
        while still:
            came = False
            for reply in self.grid.pull_messages(list(still)):
                came, request_id = True, reply.metadata.reply_to_message_id
                still.pop(request_id, None)
                # A site writes its reply's sender itself, so it could answer as another.
                if given_up(reply) or reply.metadata.src_node_id != asked.get(request_id):
                    continue
                self.received(reply)
                yield reply
                del reply  # not held while the next one is fetched
            if not still or time.monotonic() > deadline:
                return
            pause = POLL if came else min(pause * 1.3, POLL_MOST)
            time.sleep(pause)
