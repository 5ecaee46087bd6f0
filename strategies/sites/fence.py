"""Leave out sources whose change of the model is much longer than the others'."""

from collections.abc import Iterator

from fedda.maths.bounds import OTHERS, too_long

from .replies import Reply


class Fence:
    """Passes a round's replies on as they arrive, and holds back what cannot be judged yet.

    Held are the first replies, until there are enough to compare with, and those that are too long
    beside the ones known so far; the end of the round decides about these.

    Args:
        most: `guard.max-update`; 0: everything passes at once.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._lengths: dict[str, float] = {}
        self._held: list[Reply] = []

    def take(self, reply: Reply) -> Iterator[Reply]:
        """Take a reply -> those that pass now."""
        if not self._most or reply.node.role != "source" or not reply.length:
            yield reply
            return
        self._lengths[reply.node.name] = reply.length
        self._held.append(reply)
        if len(self._lengths) > OTHERS:
            ready = [held for held in self._held if not self._times(held)]
            self._held = [held for held in self._held if self._times(held)]
            yield from ready

    def rest(self) -> Iterator[tuple[Reply, float]]:
        """The replies that are held at the end, each with how many times too long it is, or 0."""
        for reply in self._held:
            yield reply, self._times(reply)
        self._held = []

    def _times(self, reply: Reply) -> float:
        return too_long(self._lengths, reply.node.name, self._most)
