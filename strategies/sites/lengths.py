"""Leaves out updates that are much longer than the others': `guard.max-update`.

An update is the model that came minus the model that was sent. A reply is handed on as soon as no
reply that is still to come can make its update too long, which is at the latest when all have come.
With few liars that is when half of them have come, so up to half of a round's models are held back,
packed as they came. Beyond MOST_HELD bytes the shortest is handed on, whatever comes.
"""

from fedda.maths.bounds import Peers, too_long
from fedda.wire import Packed

from .replies import Reply

MOST_HELD = 2**28  # bytes


class Lengths:
    """Judges the replies of some sites by the lengths of their updates.

    Args:
        times: `guard.max-update`.
        sites: how many sites were asked; at most so many replies come.
    """

    def __init__(self, times: float, sites: int) -> None:
        self._times, self._peers = times, Peers(times, sites)
        self._held: dict[str, tuple[Reply, Packed]] = {}

    def add(self, reply: Reply, model: Packed, length: float) -> list[Reply]:
        """Take a reply -> those that are not too long, whatever comes, in order of arrival."""
        self._peers.add(reply.node.name, length)
        self._held[reply.node.name] = (reply, model)
        free = [name for name in self._held if self._peers.counts(name)]
        held = {n: len(m.buffer) for n, (_, m) in self._held.items() if n not in free}
        while sum(held.values()) > MOST_HELD and len(held) > 1:
            free.append(min(held, key=self._peers.lengths.__getitem__))
            del held[free[-1]]
        return [self._held.pop(name)[0] for name in free]

    def rest(self) -> tuple[list[Reply], dict[str, float]]:
        """Judge what is held when no more comes -> those that count, and by name how long others.

        A length is in units of the median of the others.
        """
        odd = too_long(self._peers.lengths, self._times)
        kept = [reply for name, (reply, _) in self._held.items() if name not in odd]
        return kept, {name: odd[name] for name in self._held if name in odd}
