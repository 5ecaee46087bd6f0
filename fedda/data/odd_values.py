"""What is odd about the values of a set of arrays: dark images, columns, numbers for gaps."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedda.data.naming import listed
from fedda.data.samples import Brightness, Light

LEAST = 40  # values, of which it means something that no two are the same
FAR = 100  # a column whose values are so many times the others' is of another scale
# A whole number that comes so often, and lies so many times as far from a column's other values as
# these are wide, may stand for a gap, as -999 does.
REPEATED, APART = 5, 3
SCALE, GAPS = "give runs -c input.window=own", "if it stands for a gap"  # in the warnings


class Values:
    """The values of a set, some examples at a time."""

    def __init__(self) -> None:
        self._light = Brightness()
        self._squares, self._seen = torch.zeros(0), torch.zeros(0)  # (d,) sums of each column
        self._fills = _Fills()

    def add(self, examples: Tensor) -> None:
        """Look at some: uint8 (n, channels, H, W) or floats (n, d)."""
        if examples.dtype == torch.uint8:
            light = Light(int(examples.min()), int(examples.max()), 255)
            self._light.add(light, len(examples))
        elif examples.dim() == 2:
            squares = examples.double().square()
            seen = len(squares) - squares.isnan().sum(dim=0)
            first = not len(self._seen)
            self._squares = squares.nansum(dim=0) + (0 if first else self._squares)
            self._seen = seen + (0 if first else self._seen)
            self._fills.add(examples)

    def report(self, notice: Callable[[str], object], names: Sequence[str] = ()) -> None:
        """Give a sentence to `notice` if the values are odd.

        Args:
            notice: called with it.
            names: of the columns; none: they are counted.
        """
        self._light.report(notice)
        size = (self._squares / self._seen.clamp(min=1)).sqrt()
        if odd := self._fills.text(self._seen, names) or _odd_columns(size, names):
            notice(odd)


class _Fills:
    """Which columns repeat one whole number far from all their other values."""

    def __init__(self) -> None:
        # Of each column, and of the column with minus: its least value, and the next one.
        self._ends, self._often = torch.zeros(2, 0, 0), torch.zeros(2, 0)

    def add(self, examples: Tensor) -> None:
        """Look at some: floats (n, d), NaN at gaps."""
        rows = torch.stack([examples, -examples]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        before = self._ends.shape[1]
        rows = torch.cat([self._ends, rows], dim=1) if before else rows
        first = rows.amin(dim=1, keepdim=True)
        at = rows == first
        often = at.sum(dim=1)  # (2, d)
        self._often = often + (self._often - 1) * at[:, 0] if before else often
        self._ends = torch.cat([first, rows.masked_fill(at, torch.inf).amin(1, True)], dim=1)

    def text(self, seen: Tensor, names: Sequence[str]) -> str:
        """A warning that names such columns; empty if there are none.

        Args:
            seen: how many values each column has, (d,).
            names: of the columns; none: they are counted.
        """
        if not len(seen):
            return ""
        first, second = self._ends.unbind(dim=1)
        others = -first.flip(0) - second  # how wide they are
        odd = (second - first > APART * others) & (others > 0) & (first % 1 == 0)
        odd &= (self._often >= REPEATED) & (2 * self._often <= seen)
        values = {f"{float(first[end, i]) * (1 - 2 * end):g}" for end, i in odd.nonzero().tolist()}
        if not values:
            return ""
        return (
            f"{_columns(odd.any(dim=0).nonzero().flatten().tolist(), names)} of the vectors: "
            f"{listed(sorted(values))} in many examples, far from all other values, and trained on "
            f"as it is; {GAPS}, leave those cells empty (NaN in arrays)"
        )


def _columns(places: Sequence[int], names: Sequence[str]) -> str:
    """Some columns, by name or counted."""
    its = listed([str(names[i] if names else i) for i in places])
    return f"column{'s' * (len(places) > 1)} {its}{'' if names else ' (counted from 0)'}"


def _odd_columns(size: Tensor, names: Sequence[str]) -> str:
    """A warning if columns are far larger than the others, or all far from 1; else empty.

    Args:
        size: root of the mean square of each column, (d,).
        names: of the columns; none: they are counted.
    """
    used = size[size > 0]
    middle = float(used.median()) if len(used) else 0.0
    far = (size > FAR * middle).nonzero().flatten().tolist() if middle else []
    if not far and middle <= FAR:
        return ""
    if far:
        what = (
            f"{_columns(far, names)} of the vectors: values of about "
            f"{listed([f'{value:.2g}' for value in size[far].tolist()])}, where the others' are "
            f"about {middle:.2g}"
        )
    else:
        what = f"the vectors have values of about {middle:.2g}"
    return (
        f"{what}; from such networks learn badly or diverge: {SCALE}, which "
        f"brings each column to a mean of 0 and a deviation of about 1 at each site, or use units "
        f"in which all are about 1"
    )


class OddColumns:
    """Which columns may be no measurements, found some rows at a time.

    Args:
        d: how many there are.
        y: the labels of all rows (N,), if they are known.
    """

    def __init__(self, d: int, y: Tensor | None) -> None:
        self._whole: dict[int, list[np.ndarray]] = {i: [] for i in range(d)}
        self._y, self._done = None if y is None else y.numpy(), 0
        self._of_class: dict[int, np.ndarray] = {}  # the values of a class's first row, (d,)
        self._one_each = np.full(d, y is not None)

    def add(self, rows: np.ndarray) -> bool:
        """Look at further rows (n, d) -> whether there is a column that may still be odd."""
        for i in [*self._whole]:
            own = rows[:, i][~np.isnan(rows[:, i])]
            self._whole[i].append(own)
            if (own % 1).any() or len(np.unique(own)) < len(own):
                del self._whole[i]
        if self._y is not None and self._one_each.any():
            y = self._y[self._done : self._done + len(rows)]
            for c in np.unique(y):
                its = rows[y == c]
                first = self._of_class.setdefault(int(c), its[0])
                alike = (its == first) | (np.isnan(its) & np.isnan(first))
                self._one_each &= alike.all(axis=0)
        self._done += len(rows)
        return bool(self._whole) or bool(self._one_each.any())

    def is_identifier(self, i: int) -> bool:
        """Whether column i has another whole number in each of many rows."""
        every = np.concatenate([np.empty(0), *self._whole.get(i, ())])
        return len(every) >= LEAST and len(np.unique(every)) == len(every)

    @property
    def tells(self) -> np.ndarray:
        """Whether a column has one value in each class, and another in each other -> bool (d,)."""
        if len(self._of_class) < 2:
            return np.zeros_like(self._one_each)
        each = np.stack([*self._of_class.values()])  # (C, d)
        different = [len(np.unique(column)) == len(column) for column in each.T]
        return self._one_each & np.array(different)
