"""Send requests and take replies one by one, as they arrive, until a deadline.

Flower's `send_and_receive` returns all replies at once, polls only every three seconds, and goes
on after its timeout while the sites still compute. Here every request carries its deadline (its
ttl), so that a site drops a request whose reply comes too late. Each reply is handed on before the
next one is fetched, so that the server never holds all replies at once.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from fedda.errors import Code
from fedda.flower import ErrorCode
from fedda.records import arrays_of

# Seconds between two polls at first; they grow up to POLL_MOST while nothing comes. A SuperLink
# that holds a poll until a reply is there needs no pauses.
POLL = 0.02
POLL_MOST = 0.5
LOOK_S = 1.0  # seconds between two looks at which sites are connected
TOGETHER = 64  # requests that are sent at once, at most
# Seconds that replies are still waited for when what they are for has failed. Sites hear of that at
# once and answer with an error, or when they are done with a step.
AFTER_FAILURE = 15.0

# Errors with which the server itself answers when a site is gone or the deadline has passed.
GIVEN_UP = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}

# Why no reply came, for those who read of it.
GONE = "it signed off, or its connection broke, and it has not come back"
BROKEN = "only a part of its reply came"
OVER = "the round had failed before its reply came"

Watcher = Callable[[Message], None]


def _ignore(message: Message) -> None:
    pass


def given_up(reply: Message) -> bool:
    """Whether this is the server's own message that a site's reply will not come."""
    return reply.has_error() and reply.error.code in GIVEN_UP


def restarted(reply: Message) -> bool:
    """Whether this is the server's own message that a site was restarted before it answered."""
    return reply.has_error() and reply.error.code == Code.RESTARTED


class Mail:
    """Sends requests to the sites and fetches their replies.

    Args:
        grid: Flower's connection to the sites.
        sent: called with every request that went out.
        received: called with every reply that came in, a site's errors included.
    """

    def __init__(self, grid: Grid, sent: Watcher = _ignore, received: Watcher = _ignore) -> None:
        self.grid = grid
        self.sent = sent
        self.received = received

    def lost(self, node_id: int, why: str) -> None:
        """Note that a node's reply is not waited for any more, and why; here do nothing."""

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
        wait for all sites ends soon after `failed`, and when none that owes a reply is connected. A
        site that is gone for a while may still answer while others are waited for.
        """
        asked: dict[str, int] = {}  # node id by request id
        kind = ""
        for some in alike(requests):
            kind = some[0].metadata.message_type
            asked |= self._push(*some)
            del some
        deadline, pause, waiting = time.monotonic() + wait, POLL, dict.fromkeys(asked)
        connected, why = Connected(self.grid), f"no reply within {wait:g} s (wait.{kind})"
        while waiting:
            arrived, began = False, time.monotonic()
            for reply in self.grid.pull_messages(list(waiting)):
                request_id = reply.metadata.reply_to_message_id
                if request_id not in asked:
                    continue  # nobody asked for it
                arrived, node = True, asked[request_id]
                waiting.pop(request_id, None)
                if given_up(reply):
                    if reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                        self.lost(node, GONE)
                    else:  # the server says itself that a request has expired
                        self.lost(node, BROKEN if reply.metadata.src_node_id == node else why)
                    continue
                # A site fills in the sender of its reply itself, so it could name another site.
                if reply.metadata.src_node_id != node:
                    continue
                if not restarted(reply):  # of which the site's own record says nothing
                    self.received(reply)
                if (request := self.again(reply)) is not None:
                    new = self._push(request)
                    asked, waiting = asked | new, waiting | dict.fromkeys(new)
                    del request
                    continue
                yield reply
                del reply  # free it before the next one is fetched
            now, owing = time.monotonic(), {asked[request_id] for request_id in waiting}
            if self.failed() and now + AFTER_FAILURE < deadline:
                deadline, why = now + AFTER_FAILURE, OVER
            for node in connected.left(owing):
                self.lost(node, GONE)
            if now > deadline or owing <= connected.gone:
                break
            if not arrived:
                self.owed(owing)
            pause = POLL if arrived else min(pause * 1.3, POLL_MOST)
            time.sleep(max(0.0, pause - (now - began)))
        for request_id in waiting:
            if asked[request_id] not in connected.gone:
                self.lost(asked[request_id], why)

    def _push(self, *requests: Message) -> dict[str, int]:
        """Send requests -> their nodes' ids by their own; without those that the server refused."""
        for request in requests:
            self.sent(request)
        nodes = [request.metadata.dst_node_id for request in requests]
        return {i: n for i, n in zip(self.grid.push_messages(requests), nodes, strict=False) if i}


def alike(requests: Iterable[Message]) -> Iterator[list[Message]]:
    """Put requests together that follow each other and hold the same arrays.

    Sent at once, their arrays are hashed once, and the server gets and keeps one copy of them.
    """
    some: list[Message] = []
    for request in requests:
        if some and (len(some) == TOGETHER or _arrays(request) != _arrays(some[0])):
            yield some
            some = []
        some.append(request)
        del request
    if some:
        yield some


def _arrays(message: Message) -> list[int]:
    """Which objects the arrays of a message are."""
    return [id(array.data) for array in arrays_of(message.content)]


class Connected:
    """Which of some sites are gone: at two looks in a row the server did not list them.

    A site that begins a new session is not listed for a moment.
    """

    def __init__(self, grid: Grid) -> None:
        self.gone: set[int] = set()
        self._grid = grid
        self._absent: set[int] = set()  # at the last look
        self._next = time.monotonic() + LOOK_S

    def left(self, node_ids: Collection[int]) -> set[int]:
        """Look, if it is time to -> those of these sites that are gone since the last look."""
        now = time.monotonic()
        if now < self._next:
            return set()
        self._next = now + LOOK_S
        absent = set(node_ids) - set(self._grid.get_node_ids())
        was, self.gone = self.gone, absent & self._absent
        self._absent = absent
        return self.gone - was
