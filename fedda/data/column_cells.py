"""The cells of a table's column, whatever holds the table: numbers, gaps, or a few texts.

A text becomes its number among the column's texts; `fedda.data.categories` says what for.
"""

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from fedda.data.naming import NOTHING, is_several, plain
from fedda.data.samples import EXTENSIONS

MOST = 64  # different texts of a column; of more they are names or notes
GAPS = {"", ".", *NOTHING}  # texts that mean that there is none
IMAGE_ENDINGS = tuple(EXTENSIONS)  # such a text names a file, and no kind of thing

_APART = frozenset(",|")  # what separates values in a run's list
# A number as sheets show it: with marks of thousands, a long minus, in brackets, in percent.
_MARKED = re.compile(r"[-+(\u2212]?\s?(\d+|\d{1,3}([ '\u2019.]\d{3})+)(\.\d+)?\s?[%)]?")


def number(value: Any) -> float | None:
    """A cell's number, NaN where it is a gap; None if it is neither.

    1_7 is a code, such as of a ward and a bed, though Python takes it for 17.
    """
    try:
        if not _is_code(value):
            return float(value)
    except (TypeError, ValueError):
        if value is None or str(value).strip().lower() in GAPS:  # also pandas' NA and NaT
            return math.nan
    return None


def _is_code(value: Any) -> bool:
    return (isinstance(value, str) and "_" in value) or (isinstance(value, bytes) and b"_" in value)


class ColumnCells:
    """What a column's cells are, some at a time: numbers, or a few texts, each of which is one."""

    def __init__(self) -> None:
        self._count, self._has_numbers, self._are_no_kinds = 0, False, False
        self._first: tuple[int, Any] | None = None  # cell that is no number
        self._plain: dict[str, str] = {}  # the plain name of each text
        self._texts: dict[str, str] = {}  # the last text of each plain name

    def add(self, values: Sequence[Any] | np.ndarray) -> None:
        """Look at further cells."""
        numbers = _numbers(values)
        if isinstance(numbers, np.ndarray):
            self._has_numbers |= not np.isnan(numbers).all()
        else:
            self._has_numbers |= any(n is not None and not math.isnan(n) for n in numbers)
            texts = {i: values[i] for i, each in enumerate(numbers) if each is None}
            i, cell = next(iter(texts.items()))
            self._first = self._first or (self._count + i, cell)
            if self._may_be_kinds:
                self._add_texts(texts.values())
        self._count += len(values)

    @property
    def odd(self) -> tuple[int, Any] | None:
        """The index of the first cell that is no number, and that cell, if they are neither."""
        are_numbers = all(map(_MARKED.fullmatch, self._texts.values()))
        return None if self._may_be_kinds and not are_numbers else self._first

    @property
    def _may_be_kinds(self) -> bool:
        return not (self._are_no_kinds or self._has_numbers or len(self._texts) > MOST)

    def _add_texts(self, cells: Iterable[Any]) -> None:
        for cell in cells:
            text = _text(cell)
            if text not in self._plain:
                if is_several(cell) or _APART & {*text} or text.lower().endswith(IMAGE_ENDINGS):
                    self._are_no_kinds = True
                    return
                self._plain[text] = plain(text)
            self._texts[self._plain[text]] = text

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts, in the order of their numbers; none where all cells are numbers."""
        return tuple(self._texts[key] for key in sorted(self._texts))

    def numbers(self, values: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Cells that were looked at, as numbers, NaN at gaps -> float64 (n,)."""
        found = _numbers(values)
        if isinstance(found, np.ndarray):
            return found
        place = {key: float(i) for i, key in enumerate(sorted(self._texts))}
        cells = zip(found, values, strict=True)
        return np.array([place[self._plain[_text(v)]] if n is None else n for n, v in cells])


def _numbers(values: Sequence[Any] | np.ndarray) -> np.ndarray | list[float | None]:
    """Cells as numbers, NaN at gaps -> float64 (n,); where some are neither, `number` of each."""
    if isinstance(values, np.ndarray):
        return values
    with suppress(TypeError, ValueError):
        if not any(map(_is_code, values)):
            return np.fromiter(map(float, values), np.float64, len(values))
    found = [number(value) for value in values]
    return found if None in found else np.array(found, np.float64)


def _text(value: Any) -> str:
    """A cell's text, in one line."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return " ".join(text.split())
