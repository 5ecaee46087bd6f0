"""Gaps in a site's vectors, what is said of them, and what the site does to its vectors by itself.

`input.missing` fills gaps, `input.window=own` scales.

    x           (N, d)  vectors; a gap is NaN
    middle      (d,)    what fills a column's gaps: its mean or median at the site, 0 if it has none
    mean        (d,)    of the column's own values, and their deviation; gaps do not count
    missing     (N, d)  1 at a gap, 0 elsewhere; `indicator` appends it, at every site alike

All are taken of the site's training vectors alone, used for its tests, too, and never leave the
site: they are in no message and in no model's file. So a model that was trained so needs inputs
that are filled and scaled by values of their own, and `fedda predict` takes those of its examples.

Each column is divided by its deviation and a tenth of the mean deviation, so that one which hardly
varies stays small. Where a few columns have far larger units than the others, twice the median
deviation is taken for the mean, which these would make: else all others came out small. A column of
which the site has no value at all is 0 after the scaling. Where the run says one mean and deviation
of a column for all sites (`Reading.scales`), these scale it, and only gaps are filled by the site's
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedda.data.cache import Stored
from fedda.data.form import Reading
from fedda.data.naming import listed
from fedda.data.sets import FILLING, AnySet, refused_gaps
from fedda.errors import DataError

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
    if not train.empty:
        return ""
    said = f"no training row has a value in {_called(train.empty, names)}"
    return f"{said}: a run that fills gaps has 0 there, after any scaling"


def _called(columns: Sequence[int], names: Sequence[str]) -> str:
    """Columns by name; where these are numbers, it is said how they count."""
    its = [names[i] for i in columns]
    one, count = len(its) == 1, " (counted from 0)" if names[0] == "0" else ""
    return f"the column{'' if one else 's'} {listed(its, 12)}{count}"


CELLS = 1 << 22  # values that are copied at a time
LEAST = 40  # vectors, of which a mean and a deviation say something


class OwnColumns:
    """What becomes of a site's vectors (N, d) by values of its own.

    Args:
        x: its training vectors.
        where: what they are, for errors.
        reading: how the run fills gaps, and whether it scales.

    Raises:
        DataError: they are images; or too few for means of their own.
    """

    def __init__(self, x: Tensor, where: object, reading: Reading) -> None:
        if x.dim() != 2:
            raise DataError(
                f"{where} has images, and input.window=own is for vectors; leave it out, or give "
                "the values that become black and white, low,high"
            )
        self.gaps = gaps_of(x)
        asks = "input.window=own" if reading.own else f"input.missing={reading.missing}"
        if len(x) < LEAST and (reading.own or self.gaps.rows):
            raise DataError(
                f"{where} has {len(x)} vectors, too few for means and deviations of their own, "
                f"as {asks} asks for; {LEAST} are needed: add some, or say whose to take "
                "(fedda predict --like)"
            )
        self._indicator = reading.missing == "indicator"
        self.mean, deviation = _moments(x, self.gaps.seen)
        self.middle = self.mean if reading.missing != "median" else _median(x, self.gaps)
        usual = 2 * deviation[deviation > 0].nanmedian().nan_to_num(0.0)
        self.divisor = deviation + 0.1 * torch.minimum(deviation.mean(), usual) + 1e-9
        if not reading.own:
            self.mean, self.divisor = _given(reading, x.shape[1], where)

    def __call__(self, x: Tensor) -> Tensor:
        """The same vectors without gaps, scaled -> float32 (N, d), or with indicators (N, 2 d).

        Those that stay in a file change when they are read.
        """
        if isinstance(x, Stored):
            return x.changed(self)
        missing = x.isnan()
        filled = torch.where(missing, self.middle, x.float())
        found = (filled - self.mean) / self.divisor
        return torch.cat([found, missing.float()], dim=1) if self._indicator else found

    def of(self, examples: AnySet, spare: bool = False) -> AnySet:
        """The same examples, filled and scaled.

        Args:
            examples: them.
            spare: whether nobody else has their vectors, so that these are written over where they
                lie in memory: large ones need no room a second time.
        """
        x = examples.x
        if not spare or self._indicator or isinstance(x, Stored):
            return replace(examples, x=self(x))
        for some in x.split(CHUNK):
            some.copy_(self(some))
        return examples


def own_columns(
    x: Tensor, where: object, reading: Reading, found: Tensor | None = None
) -> OwnColumns | None:
    """What becomes of vectors by values of a site's training ones; None: they stay as they are.

    Args:
        x: the site's training vectors, or images, which stay.
        where: what they are, for errors.
        reading: how the run fills gaps, and whether it scales.
        found: the vectors that it is about; None: the training ones.

    Raises:
        DataError: there are gaps, and the run does not fill them; or as `OwnColumns`.
    """
    about = x if found is None else found
    if about.dim() == 2 and not reading.fills and (rows := gaps_of(about).rows):
        raise refused_gaps(where, rows)
    needed = reading.own or (x.dim() == 2 and bool(reading.fills or reading.scales))
    return OwnColumns(x, where, reading) if needed else None


def _given(reading: Reading, d: int, where: object) -> tuple[Tensor, Tensor]:
    """The mean and deviation that the run says of each column -> float32 (d,), (d,); else 0, 1.

    Raises:
        DataError: it says some by name, and the columns have none.
    """
    if reading.scales and len(reading.needs) != d:
        raise DataError(
            f"{where} has no names of its columns, by which input.window scales them: give it a "
            "first row, or an array columns, with names"
        )
    pairs = [reading.scales.get(name, (0.0, 1.0)) for name in reading.needs]
    mean, deviation = torch.tensor(pairs or [(0.0, 1.0)]).T
    return mean, deviation


def _moments(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column's own values -> float32 (d,), (d,); 0 where it has none."""

    def mean(of: Callable[[Tensor], Tensor], n: Tensor) -> Tensor:
        parts = (some.to(torch.float64, copy=True) for some in x.split(CHUNK))
        return sum(of(some).nansum(dim=0) for some in parts) / n.clamp(min=1)

    first = mean(lambda some: some, seen)
    variance = mean(lambda some: some.sub_(first).square_(), seen - 1)
    return first.float(), variance.sqrt().float()


def _median(x: Tensor, gaps: Gaps) -> Tensor:
    """The median of each column's own values -> float32 (d,); 0 where it has none."""
    found = torch.zeros(x.shape[1])
    few = max(1, CELLS // len(x))  # columns at a time, as the median needs a copy
    for some in filter(len, gaps.seen.nonzero().flatten().split(few)):
        own = torch.empty(len(x), len(some))
        for rows, into in zip(x.split(CHUNK), own.split(CHUNK), strict=True):
            into.copy_(rows[:, some])
        found[some] = torch.from_numpy(np.nanmedian(own.numpy(), axis=0).astype(np.float32))
    return found
