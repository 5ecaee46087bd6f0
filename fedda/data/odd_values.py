"""What is odd about the values of a set of arrays: dark images, columns of another scale."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedda.data.depth import Brightness, Light
from fedda.data.naming import listed

LEAST = 40  # values, of which it means something that no two are the same
FAR = 100  # a column whose values are so many times the others' is of another scale


class Values:
    """The values of a set, some examples at a time."""

    def __init__(self) -> None:
        self._light = Brightness()
        self._squares, self._seen = torch.zeros(0), torch.zeros(0)  # (d,) sums of each column

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

    def report(self, notice: Callable[[str], object], names: Sequence[str] = ()) -> None:
        """Give a sentence to `notice` if the values are odd.

        Args:
            notice: called with it.
            names: of the columns; none: they are counted.
        """
        self._light.report(notice)
        if odd := _odd_columns((self._squares / self._seen.clamp(min=1)).sqrt(), names):
            notice(odd)


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
        its = listed([str(names[i] if names else i) for i in far])
        which = f"column{'s' if len(far) > 1 else ''} {its}{'' if names else ' (counted from 0)'}"
        what = (
            f"{which} of the vectors: values of about "
            f"{listed([f'{value:.2g}' for value in size[far].tolist()])}, where the others' are "
            f"about {middle:.2g}"
        )
    else:
        what = f"the vectors have values of about {middle:.2g}"
    return (
        f"{what}; from such networks learn badly or diverge: give runs -c input.window=own, which "
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
