"""What is odd about the values of a set of arrays: dark images, columns of another scale."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedda.data.depth import Brightness, Light
from fedda.data.naming import listed

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
