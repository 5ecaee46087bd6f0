"""The sums of one group, one sync after the other.

    total   (size,)   sum of the gradients added so far
    early             gradients that came in before it was their turn to be added
    last    (size,)   the sum of the sync before, for a member whose connection broke before it came

In a masked group the values are whole numbers modulo 2^32, which travel in the bytes of the floats.

Floating-point sums depend on the order. So gradients are added in the order of the members, not of
their arrival, and a session gives the same bits every time. A member sends its next gradient only
after it received the sum before, so only the last sum is kept.

Members whose gradients are judged (`outliers`) come first. One that is too long is scaled down. If
one is no numbers it is left out, and the others' sum is enlarged as if the members had been fewer
from the start; if all are left out the sum is 0, as the rest would be one side of a loss alone.
"""

import numpy as np
from numpy.typing import NDArray

from fedda.errors import ExchangeError
from fedda.exchange.groups import Group
from fedda.exchange.outliers import Outliers

Vector = NDArray[np.float32]
LARGEST = float(np.finfo(np.float32).max)
WHOLE = np.dtype("<u4")  # a masked value, in the bytes of a float


class Sums:
    """Adds the members' gradients, one sync at a time.

    Attributes:
        group: its members, and the size and number of its sums.
        index: of the current sync, from 0.
        last: the sum of the sync before; None during the first.
        held: whether the next gradient to add waits for its verdict.
    """

    def __init__(self, group: Group, outliers: Outliers | None = None) -> None:
        self.group = group
        self.index = 0
        self.last: Vector | None = None
        self.held = False
        self._outliers = outliers
        self._judged = outliers.judged(group) if outliers else []
        order = dict.fromkeys((*self._judged, *group.members))
        self._place = {member: place for place, member in enumerate(order)}
        self._total: Vector | None = None
        self._fresh = False  # whether the total is an array of this object
        self._added = 0  # members whose gradient is in the total, or left out
        self._left_out = 0
        self._early: dict[int, Vector] = {}

    def add(self, member: str, index: int, gradient: Vector) -> Vector | None:
        """Take one member's gradient for one sync -> the sum, once all members' gradients are in.

        A gradient that is judged may have any values: it is left out if they are not finite.

        Raises:
            ExchangeError: this gradient of the member is not due, or is not usable.
        """
        self._check(member, index, gradient)
        if self._outliers and self._place[member] < len(self._judged):
            self._outliers.measure(member, index, gradient)
        else:
            self._check_values(member, index, gradient)
        self._early[self._place[member]] = gradient
        return self.go_on()

    def go_on(self) -> Vector | None:
        """Add what has come and is judged -> the sum, once all members' gradients are in."""
        while self._added in self._early:
            factor = self._verdict()
            self.held = factor is None
            if factor is None:
                return None
            gradient = self._early.pop(self._added)
            if factor:
                self._add(gradient if factor == 1 else gradient * np.float32(factor))
            self._added += 1
            if self._added == len(self._judged):
                self._make_up()
        return self._finish() if self._added == len(self._place) else None

    def _verdict(self) -> float | None:
        """What the next gradient to add is multiplied by; None while that is open."""
        if self._outliers is None or self._added >= len(self._judged):
            return 1.0
        member = self._judged[self._added]
        factor = self._outliers.factor(member, self.index)
        if factor is not None and factor < 1:
            self._outliers.note(member, self.index)
            self._left_out += factor == 0
        return factor

    def _add(self, gradient: Vector) -> None:
        if self._total is None:
            self._total, self._fresh = gradient, False  # the caller's array: not to be changed
        else:
            out = self._total if self._fresh else None
            self._total, self._fresh = self._sum(self._total, gradient, out), True

    def _make_up(self) -> None:
        """Let the judged gradients that count stand for those that are left out."""
        if self._left_out and self._total is not None:
            judged = len(self._judged)
            self._total = self._total * np.float32(judged / (judged - self._left_out))
            self._fresh = True

    def _finish(self) -> Vector | None:
        none = self._left_out and self._left_out == len(self._judged)
        self.last = np.zeros(self.group.size, np.float32) if none else self._total
        self._total, self._added, self._left_out = None, 0, 0
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

    def _check_values(self, member: str, index: int, gradient: Vector) -> None:
        name = self.group.name
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
