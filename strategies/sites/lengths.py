"""Scales down updates that are much longer than the others': `guard.max-update`.

An update is the model that came minus the model that was sent. A reply is handed on as soon as no
reply that is still to come can make its update too long, which is at the latest when all have come.
That depends on the longest, so mostly it is when the second has come, or with f liars one more than
f. What is held back is packed as it came. Beyond MOST_HELD bytes the shortest is handed on,
whatever comes.
"""

from collections.abc import Iterator
from dataclasses import replace

from fedda.config import GuardConfig
from fedda.maths.bounds import Peers, scaled, too_long
from fedda.wire.packing import Kind, Packed, pack

from .cached_models import MODEL
from .replies import Reply

MOST_HELD = 2**28  # bytes


class Lengths:
    """Bounds the replies of some sites by the lengths of their updates.

    Args:
        guard: `max_update` and `liars` count.
        sites: how many sites were asked; at most so many replies come.
    """

    def __init__(self, guard: GuardConfig, sites: int) -> None:
        self._bound = guard.max_update, guard.liars
        self._peers = Peers(*self._bound, sites)
        self._held: dict[str, tuple[Reply, Packed]] = {}

    def add(self, reply: Reply, sent: Packed, length: float) -> list[Reply]:
        """Take a reply -> those that are not too long, whatever comes, in order of arrival."""
        self._peers.add(reply.node.name, length)
        self._held[reply.node.name] = (reply, sent)
        free = [name for name in self._held if self._peers.factor(name) == 1]
        held = {n: len(r.model().buffer) for n, (r, _) in self._held.items() if n not in free}
        while sum(held.values()) > MOST_HELD and len(held) > 1:
            free.append(min(held, key=self._peers.lengths.__getitem__))
            del held[free[-1]]
        return [self._held.pop(name)[0] for name in free]

    def rest(self) -> Iterator[tuple[Reply, float, float]]:
        """Yield what is held when no more comes, scaled down where it is too long.

        With each reply comes how long its update was, in units of what it is compared with, and
        what it was multiplied by: 1 if it is as it came.
        """
        long = too_long(self._peers.lengths, *self._bound)
        while self._held:
            name = next(iter(self._held))
            reply, sent = self._held.pop(name)
            times, factor = long.get(name, (0.0, 1.0))
            if factor < 1:
                reply = shortened(reply, sent, factor)
            yield reply, times, factor
            del reply  # free it before the next one is made


def shortened(reply: Reply, sent: Packed, factor: float) -> Reply:
    """A reply whose model is only a part of the way from the one that was sent."""
    model = scaled(reply.model().unpack(), sent.before.unpack(), factor)
    return replace(reply, arrays={**reply.arrays, MODEL: pack(model, Kind.MODEL)})
