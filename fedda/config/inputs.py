"""How images and vectors come to a model: a run's `input`, and the texts that say it.

window       low,high; own; so many bits; or the mean and deviation of columns
categories   the values of columns that are texts
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

WHOLE = re.compile(r"\d+(\.0*)?")  # a number's text; with a gap in its column, 1 becomes 1.0

Resize = Literal["stretch", "crop"]  # how images come to a size (`fedda.data.form.Form`)
Missing = Literal["refuse", "mean", "median", "indicator"]  # what becomes of gaps in vectors
REFUSE: Missing = "refuse"
INDICATOR: Missing = "indicator"


class Inputs(NamedTuple):
    """What a model takes, and how a site's images and vectors come to it: a run's `input`.

    Attributes:
        shape: of one input, (channels, H, W) or (d,); with `indicator`, d counts both columns.
        resize: how images come to that size.
        window: the gray values that become black and white, or how vectors are scaled.
        missing: what becomes of gaps in vectors.
        columns: names of the columns of vectors (`fedda.data.naming.brief`); none: not known.
    """

    shape: tuple[int, ...]
    resize: Resize = "stretch"
    window: str = ""
    missing: Missing = REFUSE
    columns: tuple[str, ...] = ()

    @property
    def changed(self) -> dict[str, Any]:
        """What is not as it is by default, but for the shape: what a model's file says of it."""
        told = {name: getattr(self, name) for name in self._field_defaults}
        return {n: value for n, value in told.items() if value != self._field_defaults[n]}


OWN = "own"  # the `input.window` of vectors that each site scales by itself


def suspect(shape: Sequence[int], window: str) -> str:
    """What of a site's data makes trainings diverge or learn nothing, in words; or nothing."""
    if len(shape) == 1 and (window == OWN or scales_of(window)):
        return ""
    vectors = len(shape) == 1
    odd = "vectors in raw units" if vectors else "images that use a small part of their range"
    way = "input.window=own mends them" if vectors else "how to mend them"
    return f"{odd} do that, too: `fedda data check` at a site says whether it has such, and {way}"


LARGEST = 1e30  # mean or deviation of a column


def scales_of(window: str) -> dict[str, tuple[float, float]]:
    """Mean and deviation of columns, by name, from `age=54/9, chol=240/50`; of other windows none.

    Raises:
        ValueError: it is no such list, but has a =.
    """
    found: dict[str, tuple[float, float]] = {}
    for part in window.split(",") if "=" in window else ():
        column, _, scale = part.strip().rpartition("=")
        try:
            mean, deviation = map(float, scale.split("/"))
        except ValueError:
            mean = deviation = math.nan
        # Of float32's range, so that what is scaled is neither 0 nor infinite.
        usable = abs(mean) < LARGEST and 1 / LARGEST < deviation < LARGEST
        if not column or column in found or not usable:
            raise ValueError("give the mean and deviation of each column, as age=54/9, chol=240/50")
        found[column] = mean, deviation
    return found


BITS = re.compile(r"([89]|1[0-6]) bits")  # an `input.window` as `--gray-bits` says it at a site


def window_of(text: str) -> tuple[float, float] | None:
    """The values that become black and white, from `low,high`; None if it says no such values.

    Raises:
        ValueError: it is no window, or low is not below high.
    """
    if not text or text == OWN or BITS.fullmatch(text) or scales_of(text):
        return None
    parts = text.split(",") if len(text) <= 64 else []
    try:
        low, high = map(float, parts)
    except ValueError:
        raise ValueError("give two numbers, low,high, such as 0,4095") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("low must be below high, and both finite")
    return low, high


def categories_of(text: str) -> dict[str, tuple[str, ...]]:
    """The values of columns, by name, from `sex=female/f|male/m, thal=normal|fixed|reversible`.

    Raises:
        ValueError: it is no such list.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(",") if text.strip() else ():
        column, _, values = (each.strip() for each in part.partition("="))
        several = tuple(each.strip() for each in values.split("|"))
        every = [name for value in several for name in {*map(plain, spellings(value))}]
        alike = len(every) > len({*every}) or "" in every
        if not column or column in found or len(several) < 2 or alike:
            raise ValueError(
                "give each column once, with two or more different values (case, spaces and zeros "
                "make no difference), as sex=female|male, thal=normal|fixed|reversible"
            )
        found[column] = several
    return found


def spellings(*values: str) -> list[str]:
    """How values of `input.categories` may be written in files: as a whole, or as each part."""
    return [name for value in values for name in (value, *value.split("/"))]


def plain(name: str) -> str:
    """A name without case, spaces and zeros, and with accents in one way of several to write them.

    So of whole numbers that are one and the same there is one name.
    """
    text = "".join(unicodedata.normalize("NFC", name).lower().split())
    return text.partition(".")[0].lstrip("0") or "0" if WHOLE.fullmatch(text) else text
