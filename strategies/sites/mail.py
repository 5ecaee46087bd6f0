"""Send requests and take replies one by one, as they arrive, until a deadline.

Flower's `send_and_receive` returns all replies at once, polls only every three seconds, and goes
on after its timeout while the sites still compute. Here every request carries its deadline (its
ttl), so that a site drops a request whose reply comes too late. Each reply is handed on before the
next one is fetched, so that the server never holds all replies at once.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

POLL = 0.05  # seconds between two polls at first; they grow up to POLL_MOST while nothing comes
POLL_MOST = 0.5
# Seconds that replies are still waited for when what they are for has failed. Sites hear of that at
# once and answer with an error, or when they are done with a step.
AFTER_FAILURE = 15.0

# Errors with which the server itself answers when a site is gone or the deadline has passed.
GIVEN_UP = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}

Watcher = Callable[[Message], None]


def _ignore(message: Message) -> None:
    pass


def given_up(reply: Message) -> bool:
    """Whether this is the server's own message that a site's reply will not come."""
    return reply.has_error() and reply.error.code in GIVEN_UP


class Mail:
    """Sends requests to the sites and fetches their replies.

    Args:
        grid: Flower's connection to the sites.
        sent: called with every request that went out.
        received: called with every reply that came in, errors included.
    """

    def __init__(self, grid: Grid, sent: Watcher = _ignore, received: Watcher = _ignore) -> None:
        self.grid = grid
        self.sent = sent
        self.received = received

    def lost(self, node_id: int, gone: bool) -> None:
        """Note that a node's reply will not come, as the server itself says; here do nothing.

        Args:
            node_id: the node.
            gone: whether it is because the node is not there any more.
        """

    def owed(self, node_ids: Collection[int]) -> None:
        """Note at each look without a reply which nodes still owe one; here do nothing."""

    def again(self, reply: Message) -> Message | None:
        """Make the request anew that a reply says the site could not serve; here there is none."""

    def failed(self) -> bool:
        """Whether what the requests are for has failed already, whatever replies come; here not."""
        return False

    def deliver(self, requests: Iterable[Message], wait: float) -> Iterator[Message]:
        """Send requests and yield their replies in the order they come, for `wait` seconds.

        Requests must have been made with `ttl=wait`. Replies that come later are never fetched. The
        wait for a site ends as soon as the server knows that its reply will not come, and the wait
        for all sites ends soon after `failed`.
        """
        asked: dict[str, int] = {}  # node id by request id
        for request in requests:
            asked |= self._push(request)
            del request
        deadline, pause, waiting = time.monotonic() + wait, POLL, dict.fromkeys(asked)
        while waiting:
            arrived = False
            for reply in self.grid.pull_messages(list(waiting)):
                request_id = reply.metadata.reply_to_message_id
                if request_id not in asked:
                    continue  # nobody asked for it
                arrived, node = True, asked[request_id]
                waiting.pop(request_id, None)
                if given_up(reply):
                    self.lost(node, reply.error.code == ErrorCode.NODE_UNAVAILABLE)
                    continue
                # A site fills in the sender of its reply itself, so it could name another site.
                if reply.metadata.src_node_id != node:
                    continue
                self.received(reply)
                if (request := self.again(reply)) is not None:
                    new = self._push(request)
                    asked, waiting = asked | new, waiting | dict.fromkeys(new)
                    del request
                    continue
                yield reply
                del reply  # free it before the next one is fetched
            now = time.monotonic()
            if self.failed():
                deadline = min(deadline, now + AFTER_FAILURE)
            if not waiting or now > deadline:
                return
            if not arrived:
                self.owed({asked[request_id] for request_id in waiting})
            pause = POLL if arrived else min(pause * 1.3, POLL_MOST)
            time.sleep(pause)

    def _push(self, request: Message) -> dict[str, int]:
        """Send a request -> its node's id by its own; empty if the server did not take it."""
        self.sent(request)
        node = request.metadata.dst_node_id
        return {i: node for i in self.grid.push_messages([request]) if i}
