"""`input.window=own`: each site's vectors get a mean of 0 and a deviation of about 1 at the site.

Each column is divided by its deviation and a tenth of the mean deviation, so that one which hardly
varies stays small. Mean and deviation are those of the site's own training vectors; they do not
leave it. A model that was trained so needs its inputs scaled so, too.
"""

from dataclasses import replace
from functools import reduce
from typing import TypeVar

from torch import Tensor

from fedda.data.sets import Examples
from fedda.errors import DataError
from fedda.maths.moments import merge, moments

E = TypeVar("E", bound=Examples)

LEAST = 40  # vectors, of which a mean and a deviation say something
CHUNK = 65_536


class OwnScale:
    """A mean and a deviation per column, of a site's vectors (N, d)."""

    def __init__(self, x: Tensor, where: object) -> None:
        """Take them.

        Args:
            x: the vectors.
            where: what they are, for errors.

        Raises:
            DataError: they are images, or too few.
        """
        if x.dim() != 2:
            raise DataError(
                f"{where} has images, and input.window=own is for vectors; leave it out, or give "
                "the values that become black and white, low,high"
            )
        if len(x) < LEAST:
            raise DataError(
                f"{where} has {len(x)} vectors, too few for a mean and a deviation of their own, "
                f"as input.window=own asks for; {LEAST} are needed: add some, or say whose to take"
            )
        found = reduce(merge, (moments(part.float()) for part in x.split(CHUNK)))
        deviation = found.variance.sqrt()
        self.mean = found.mean.float()
        self.divisor = (deviation + 0.1 * deviation.mean() + 1e-9).float()

    def __call__(self, x: Tensor) -> Tensor:
        """The same vectors, scaled -> float32 (N, d)."""
        return (x.float() - self.mean) / self.divisor

    def of(self, examples: E) -> E:
        """The same examples, scaled."""
        return replace(examples, x=self(examples.x))
