"""Where vectors have no value: gaps, which are NaN, and what is said of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedda.data.naming import listed
from fedda.data.sets import FILLING

CHUNK = 65_536  # vectors at a time


@dataclass(frozen=True)
class Gaps:
    """Where values are missing in some vectors."""

    rows: int  # how many vectors have a gap
    of: int  # how many there are
    seen: Tensor  # values of each column, without the gaps, (d,)

    @classmethod
    def none(cls, d: int) -> "Gaps":
        """Those of no vectors."""
        return cls(0, 0, torch.zeros(d, dtype=torch.int64))

    def __add__(self, other: "Gaps") -> "Gaps":
        return Gaps(self.rows + other.rows, self.of + other.of, self.seen + other.seen)

    @property
    def columns(self) -> list[int]:
        """The columns with gaps."""
        return (self.seen < self.of).nonzero().flatten().tolist()

    @property
    def empty(self) -> list[int]:
        """The columns without a value."""
        return (self.seen == 0).nonzero().flatten().tolist() if self.of else []


def gaps_of(x: Tensor) -> Gaps:
    """The gaps of vectors (N, d)."""
    found = Gaps.none(x.shape[1])
    for some in x.split(CHUNK):
        missing = some.isnan()
        seen = len(some) - missing.sum(dim=0)
        found += Gaps(int(missing.any(dim=1).sum()), len(some), seen)
    return found


def warnings_of(train: Gaps, test: Gaps, names: Sequence[str]) -> list[str]:
    """Sentences about the gaps of a site's vectors, none if there are none."""
    both = train + test
    if not both.rows:
        return []
    said = [
        f"{both.rows} of {both.of} rows have missing values (NaN), in "
        f"{_called(both.columns, names)}: runs refuse them, unless they are given {FILLING}"
    ]
    return [*said, *filter(None, [empty_columns(train, names)])]


def empty_columns(train: Gaps, names: Sequence[str]) -> str:
    """A sentence about columns of which training vectors have no value; empty without any."""
    return (
        f"no training row has a value in {_called(train.empty, names)}: a run that fills gaps has "
        "0 there, after any scaling"
        if train.empty
        else ""
    )


def _called(columns: Sequence[int], names: Sequence[str]) -> str:
    """Columns by name; where these are numbers, it is said how they count."""
    its = [names[i] for i in columns]
    one, count = len(its) == 1, " (counted from 0)" if names[0] == "0" else ""
    return f"the column{'' if one else 's'} {listed(its, 12)}{count}"
