"""The sums of one group, one sync after the other.

    total   (size,)   sum of the gradients added so far
    early             gradients that came in before it was their turn to be added
    last    (size,)   the sum of the sync before, for a member whose connection broke before it came

In a masked group the values are whole numbers modulo 2^32, which travel in the bytes of the floats.

Floating-point sums depend on the order. So gradients are added in the order of the members, not of
their arrival, and a session gives the same bits every time. A member sends its next gradient only
after it received the sum before, so only the last sum is kept.
"""

import numpy as np
from numpy.typing import NDArray

from fedda.errors import ExchangeError
from fedda.exchange.groups import Group

Vector = NDArray[np.float32]
LARGEST = float(np.finfo(np.float32).max)
WHOLE = np.dtype("<u4")  # a masked value, in the bytes of a float


class Sums:
    """Adds the members' gradients, one sync at a time.

    Attributes:
        group: its members, and the size and number of its sums.
        index: of the current sync, from 0.
        last: the sum of the sync before; None during the first.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.index = 0
        self.last: Vector | None = None
        self._place = {member: place for place, member in enumerate(group.members)}
        self._total: Vector | None = None
        self._added = 0
        self._early: dict[int, Vector] = {}

    def add(self, member: str, index: int, gradient: Vector) -> Vector | None:
        """Take one member's gradient for one sync -> the sum, once all members' gradients are in.

        Raises:
            ExchangeError: this gradient of the member is not due, or is not usable.
        """
        self._check(member, index, gradient)
        self._early[self._place[member]] = gradient
        while (due := self._early.pop(self._added, None)) is not None:
            if self._total is None:
                self._total = due  # the caller's array: the first addition makes a new one
            else:
                out = self._total if self._added > 1 else None
                self._total = self._sum(self._total, due, out)
            self._added += 1
        if self._added < len(self._place):
            return None
        self.last, self._total, self._added = self._total, None, 0
        self.index += 1
        return self.last

    def _sum(self, a: Vector, b: Vector, out: Vector | None) -> Vector:
        if self.group.masked:
            whole = None if out is None else out.view(WHOLE)
            return np.add(a.view(WHOLE), b.view(WHOLE), out=whole).view(np.float32)
        with np.errstate(over="ignore"):  # a site refuses an infinite sum
            return np.add(a, b, out=out)

    def taken(self, member: str) -> int:
        """How many gradients of a member have come in."""
        place = self._place[member]
        return self.index + (place < self._added or place in self._early)

    @property
    def begun(self) -> bool:
        """Whether a gradient of the current sync has come in, and so a member waits."""
        return self._added > 0 or bool(self._early)

    @property
    def over(self) -> bool:
        """Whether all of the group's syncs are done."""
        return self.index == self.group.syncs

    def missing(self) -> list[str]:
        """Members whose gradient for the current sync has not come in."""
        return [] if self.over else [m for m in self._place if self.taken(m) == self.index]

    def _check(self, member: str, index: int, gradient: Vector) -> None:
        name, due = self.group.name, self.taken(member)
        if due == self.group.syncs:
            raise ExchangeError(
                f"{member} sent group '{name}' more gradients than the {due} agreed on."
            )
        if index < due:
            raise ExchangeError(
                f"{member} sent group '{name}' its gradient for sync {index + 1} again."
            )
        if index > due or due > self.index:
            raise ExchangeError(
                f"{member} sent group '{name}' a gradient for sync {index + 1}, "
                f"but sync {self.index + 1} is due."
            )
        if gradient.size != self.group.size:
            raise ExchangeError(
                f"{member} sent group '{name}' {gradient.size} values, "
                f"but its gradient has {self.group.size}."
            )
        if self.group.masked:
            return
        if not np.isfinite(gradient).all():
            raise ExchangeError(
                f"{member} sent group '{name}' values that are not finite at sync {index + 1}."
            )
        if np.abs(gradient).max(initial=0.0) > LARGEST / len(self._place):
            raise ExchangeError(
                f"{member} sent group '{name}' values that no sum can hold at sync {index + 1}."
            )
