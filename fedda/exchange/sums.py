"""The sums of one group, one sync after the other.

    total   (size,)   the gradients of the first members, in their order, as far as they are in
    early             gradients whose turn in that order has not come
    last    (size,)   the sum before, for a participant that lost its connection waiting for it

Floating-point sums depend on the order, so gradients are added in the order of the members, whoever
comes first: a session gives the same bits every time. A member sends its next gradient only when it
has the sum before, so no more than one sum is ever kept.
"""

import numpy as np
from numpy.typing import NDArray

from fedda.errors import ExchangeError
from fedda.exchange.groups import Group

Vector = NDArray[np.float32]


class Sums:
    """A barrier that adds.

    Attributes:
        group: who adds what.
        index: of the sync that is being added, from 0.
        last: the sum of the sync before; None at the first.
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
        """Take the gradient of one member for one sync -> the sum, if it was the last to come.

        Raises:
            ExchangeError: the member or the index is not due, or the gradient is not usable.
        """
        self._check(member, index, gradient)
        self._early[self._place[member]] = gradient
        while (due := self._early.pop(self._added, None)) is not None:
            if self._total is None:
                self._total = due  # not ours to write to: the first addition makes a new one
            else:
                out = self._total if self._added > 1 else None
                with np.errstate(over="ignore"):  # whoever gets the sum refuses it
                    self._total = np.add(self._total, due, out=out)
            self._added += 1
        if self._added < len(self._place):
            return None
        self.last, self._total, self._added = self._total, None, 0
        self.index += 1
        return self.last

    def taken(self, member: str) -> int:
        """How many gradients of a member are in."""
        place = self._place[member]
        return self.index + (place < self._added or place in self._early)

    @property
    def begun(self) -> bool:
        """Whether anybody waits for the sum of this sync."""
        return self._added > 0 or bool(self._early)

    @property
    def over(self) -> bool:
        """Whether all sums are done."""
        return self.index == self.group.syncs

    def missing(self) -> list[str]:
        """Members whose gradient for this sync is not in."""
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
        if not np.isfinite(gradient).all():
            raise ExchangeError(
                f"{member} sent group '{name}' values that are not finite at sync {index + 1}."
            )
