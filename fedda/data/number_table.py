"""Tables of numbers: a CSV or parquet file with a row per example, such as a patient.

    label   the class: a text, or a whole number (`fedda.data.naming`)
    split   optional: train or test; without it all rows are training examples
    id      optional, or key: what predictions call the row beside its number
    others  numbers, in the order of their names: the same names at all sites; or a few texts, which
            a run turns into numbers (`fedda.data.categories`)

A table is one of numbers if it has none of the columns that name images. An empty cell, NaN, NA, ?
and the like are gaps. `--columns values=age+sex+chol` names the columns to take, in their order;
one that the table lacks is all gaps. The arrays are those that an .npz file would hold
(`fedda.data.npz`); a target's training labels are not read.

A table may be larger than memory. It is read some rows at a time, and more than once: first for the
number of its rows and the texts of its columns (`Outline`), then for its numbers. The outline and
the labels, where these are asked for, are small and are remembered while the file does not change.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedda.data import columns, naming, npy
from fedda.data.categories import Texts, taken
from fedda.data.column_cells import IMAGE_ENDINGS, ColumnCells, number
from fedda.data.columns import IMAGES, KEYS, headings, samples_of
from fedda.data.form import Reading
from fedda.data.naming import listed, plain
from fedda.data.npz import Npz
from fedda.data.odd_values import OddColumns
from fedda.data.which_files import FILES, ODD_SPLIT, SPLITS, Inside, NamedFiles, parts_of
from fedda.errors import DataError

_SPECTRUM = 8  # columns of which names that are numbers and rise are wavelengths or the like
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # how pandas calls row numbers in a file


def file_of(path: Path, reading: Reading) -> Path | None:
    """The file of a table of numbers at a path; None if there is none."""
    parts = parts_of(path, reading, Inside(path, reading.follow_links))
    if len(parts) != 1 or parts[0][0].suffix.lower() not in FILES:
        return None
    there = headings(parts[0][0], reading)
    return parts[0][0] if there and not _of_images(there, reading) else None


def can_be_site(file: Path, reading: Reading, is_target: bool = False) -> bool:
    """Whether a CSV or parquet file beside others is a site's table; a target's has no labels."""
    there, named = headings(file, reading), {*reading.values}
    if _of_images(there, reading) or not (is_target or "label" in there or named & {*there}):
        return False
    first = samples_of(file).items()  # of a parquet file nothing
    own = {reading.named.get(name, name) for name in ("label", "split", *KEYS)}
    wanted = named or {name for name, _ in first} - own
    return not first or any(number(value) is not None for name, value in first if name in wanted)


def _of_images(there: Sequence[str], reading: Reading) -> bool:
    """Whether a table with these columns is one of images, or is said to be."""
    return bool({*IMAGES} & {*there, *reading.named})


class Outline(NamedTuple):
    """What is known of a table before its numbers are read."""

    length: int  # how many rows it has
    cells: Mapping[str, ColumnCells]  # what the cells of its columns of numbers are
    splits: tuple[Any, ...]  # the different values of its column split; empty if it has none
    which: np.ndarray  # the place of each row's among them, int32 (N,)


class NumberTable(Npz):
    """An open table of numbers; every problem with it is a DataError that names it.

    Args:
        path: its file.
        reading: as the site says: names of columns, and the split to train on.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path = path
        self._reading_of = reading
        self._close = lambda: None
        there = headings(path, reading)
        known = taken(reading.needs, there)
        known = known if {*known} <= {*there} else ()
        self._indices = [name for name in there if _INDEX.fullmatch(name)]
        own = {"label", "split", *KEYS, *self._indices, *reading.dropped}
        if odd := [name for name in reading.dropped if name not in there]:
            raise DataError(
                f"{path} has no column {naming.escaped(odd[0])} to leave out (it has "
                f"{listed(there, 12)}): give --columns drop= names that are there"
            )
        self._names = reading.values or known or tuple(sorted({*there} - own))
        if not (reading.values or known):
            self._check_labels()
        if not {*self._names} & {*there}:
            raise DataError(
                f"{path} has none of the columns {listed(self._names, 12) or 'of numbers'} (it has "
                f"{listed(there, 12)}): columns of numbers are needed, or path, which names image "
                "files; give a table with some, or name them with --columns values=age+weight"
            )
        self._parts = self._splits() if "split" in there else {"": None}
        after = {part: f"_{part}" if part else "" for part in self._parts}
        self.keys = tuple(f"x{end}" for end in after.values())
        self.keys += tuple(f"y{end}" for end in after.values() if "label" in there)
        # the labels of a split, as texts
        self._labels = cache(
            lambda y: naming.names(self._chosen(y, _label_column(*self._state)), path)
        )

    def _named(self) -> tuple[str, ...]:
        return self._names

    @property
    def texts(self) -> Texts:
        cells = self._checked().cells
        return {
            name: cells[name].texts for name in self._names if name in cells and cells[name].texts
        }

    def _check_labels(self) -> None:
        """Refuse labels that would be taken for measurements, as a target's then would leave it."""
        if odd := next((name for name in self._names if naming.plain(name) == "label"), ""):
            shown = naming.escaped(odd)
            raise DataError(
                f"{self.path} has the column {shown}, which seems to hold labels: name it with "
                f"--columns label={shown}; if it holds measurements, rename it, or name the "
                "columns to take with --columns values=age+weight"
            )

    def labels(self, y: str, n: int) -> Tensor:
        names = self._labels(y)
        number = {name: i for i, name in enumerate(sorted({*names}))}
        return torch.tensor([number[name] for name in names], dtype=torch.int64)

    def classes(self, y: str, labels: Tensor) -> tuple[str, ...]:
        return tuple(sorted({*self._labels(y)}))

    def odd_columns(self, x: str, y: Tensor | None) -> list[str]:
        found, odd = [], OddColumns(len(self._names), y)
        if self._names_are_values():
            found.append(
                f"the first row, {listed(headings(self.path), 12)}, seems to hold values and no "
                "names of columns, and is left out as if it did: write a first row of names"
            )
        if passed := [name for name in self._indices if name not in self._names]:
            found.append(
                f"the column {listed([repr(name) for name in passed])} has row numbers, as pandas "
                "writes them, and is passed over"
            )
        found += filter(None, [columns.blank_rows(self.path)])
        any(not odd.add(rows) for rows in self._rows(x, 1))  # until none can be odd any more
        tells = odd.tells
        for i, name in enumerate(map(naming.escaped, self._names)):
            if odd.is_identifier(i):
                found.append(
                    f"the column {name} has another whole number in each row, as identifiers have: "
                    "leave it out if it is one, or call it id"
                )
            if tells[i]:
                found.append(
                    f"the column {name} alone says each row's class: leave it out if it is not "
                    "known where the model will be used"
                )
        return found

    def _names_are_values(self) -> bool:
        """Whether the table seems to have no heading, so that its first example is taken for one.

        Columns that are counted have such names, too, and those of a spectrum, which rise.
        """
        if any(plain(name) in map(plain, its) for name, its in self.texts.items()):
            return True
        numbers = [n for n in map(number, headings(self.path)) if n is not None and n == n]
        counted = all(n == i + numbers[0] for i, n in enumerate(numbers))
        rise = len(numbers) > _SPECTRUM and all(a < b for a, b in pairwise(numbers))
        return 2 * len(numbers) > len(self._names) and not (counted or rise)

    def unlabelled(self, x: str) -> DataError:
        there, advice = headings(self.path, self._reading_of), self._advice("label=diagnosis")
        if self._names_are_values():
            advice = f"{advice} (after a row of names was written above the first, of values)"
        return DataError(
            f"{self.path} has no column label (it has {listed(there, 12)}), but a source needs "
            f"labels: name them with {advice}, or let the site be a target (--role target, or "
            "--target)"
        )

    def _advice(self, otherwise: str) -> str:
        """The option that says which columns are meant: of images, if the table names some."""
        files = NamedFiles(self.path, self.path)
        return files.advice if files.naming else f"--columns {otherwise}"

    def row_keys(self, x: str) -> list[str]:
        there = headings(self.path, self._reading_of)
        name = next((name for name in KEYS if name in there), "")
        if not name:
            return []
        found = columns.parts(self.path, (name,), self._reading_of)
        return [str(v or "") for v in self._chosen(x, (v for some in found for v in some[name]))]

    def _splits(self) -> dict[str, int | None]:
        """The splits, each with its place among those of the outline."""
        splits, which = self._outline().splits, self._outline().which
        train = self._reading_of.split or "train"
        odd = [place for place, each in enumerate(splits) if each not in (*SPLITS, train)]
        if odd and not self._reading_of.split:
            its, row = splits[odd[0]], int(np.argmax(which == odd[0])) + 1
            raise DataError(f"{self.path} has the split {its!r} in row {row}: {ODD_SPLIT}")
        return {str(splits[i]): i for i in sorted(range(len(splits)), key=lambda i: str(splits[i]))}

    def _is_in(self, key: str, first: int = 0, last: int | None = None) -> np.ndarray | None:
        """Whether some rows are in the split of an array -> bool (n,); None: all are."""
        place = self._parts[key[2:]]
        return None if place is None else self._outline().which[first:last] == place

    def _chosen(self, key: str, values: Iterable[Any]) -> list[Any]:
        """The values of a split's rows."""
        rows = self._is_in(key)
        return [*values] if rows is None else [*compress(values, rows)]

    @property
    def _state(self) -> tuple[Path, tuple[int, ...], Reading]:
        """What tells whether what was read of the file before still holds."""
        its = self.path.stat()
        said = Reading(columns=self._reading_of.columns)
        return self.path, (its.st_ino, its.st_size, its.st_mtime_ns), said

    def _outline(self) -> Outline:
        return _outline(*self._state, self._names)

    def _checked(self) -> Outline:
        """The outline.

        Raises:
            DataError: a column has neither numbers nor a few texts.
        """
        found = self._outline()
        for name in self._names:
            its = found.cells.get(name)
            if its is not None and its.odd is not None:
                raise self._neither(name, *its.odd)
        return found

    def _neither(self, name: str, row: int, cell: Any) -> DataError:
        """The error of a cell that makes a column one of neither numbers nor a few texts."""
        there = headings(self.path, self._reading_of)
        is_file = str(cell).lower().endswith(IMAGE_ENDINGS)
        if name.lower().endswith(IMAGE_ENDINGS):
            return DataError(
                f"{self.path} has no names of columns: its first row, {listed(there, 12)}, is an "
                "example; write a row of names above it, such as path,label"
            )
        if len(there) == 1 and not is_file:
            return DataError(
                f"{self.path} has one column, {naming.quoted(name)}, and {str(cell)[:40]!r} in row "
                f"{row + 1}: separate columns by commas, semicolons or tabs"
            )
        return DataError(
            f"{self.path} has {str(cell)[:40]!r} in row {row + 1} of its column "
            f"{naming.escaped(name)} (it has {listed(there, 12)}): numbers, or a few texts "
            "without commas, are needed where no column path names image files; write numbers, "
            "with a decimal point and no other marks, or name the columns with "
            + self._advice(f"path={name}" if is_file else f"values=age+weight or drop={name}")
        )

    def _header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        rows, count = self._is_in(key), self._checked().length
        n = count if rows is None else int(rows.sum())
        return (n, len(self._names)), np.dtype(np.float32)

    def _rows(self, key: str, batch: int) -> Iterator[np.ndarray]:
        """The numbers of a split, some rows at a time -> float32 (n, d)."""
        outline, done, filled = self._checked(), 0, 0
        d = len(self._names)
        block = np.empty((npy.at_a_time((0, d), 4, batch), d), np.float32)
        for some in columns.parts(self.path, self._names, self._reading_of, self._names):
            n = len(next(iter(some.values())))
            rows = self._is_in(key, done, done + n)
            done += n
            try:
                found = self._numbers(outline.cells, some, n)
                found = found if rows is None else found[rows]
            except LookupError:
                raise self._changed() from None
            while len(found):
                some_of = found[: len(block) - filled]
                block[filled : filled + len(some_of)] = some_of
                filled, found = filled + len(some_of), found[len(some_of) :]
                if filled == len(block):
                    yield block
                    block, filled = np.empty_like(block), 0
        if done != outline.length:
            raise self._changed()
        if filled:
            yield block[:filled]

    def _changed(self) -> DataError:
        return DataError(f"{self.path} has changed while it was read: start again")

    def _numbers(
        self, cells: Mapping[str, ColumnCells], some: Mapping[str, columns.Cells], n: int
    ) -> np.ndarray:
        """Some rows as numbers -> float32 (n, d), NaN at gaps."""
        found = np.full((n, len(self._names)), np.nan, np.float32)
        with np.errstate(over="ignore"):  # infinite then, which is refused
            for i, name in enumerate(self._names):
                if name in some:
                    found[:, i] = cells[name].numbers(some[name])
        return found


@lru_cache(maxsize=4)
def _outline(
    path: Path, state: tuple[int, ...], reading: Reading, names: tuple[str, ...]
) -> Outline:
    """The outline of a file in some state, with some columns of numbers."""
    count, cells, known = 0, dict[str, ColumnCells](), {*names}
    splits, which = dict[Any, int](), [np.empty(0, np.int32)]
    for some in columns.parts(path, (*names, "split"), reading, names):
        count += len(next(iter(some.values())))
        for name, values in some.items():
            if name in known:
                cells.setdefault(name, ColumnCells()).add(values)
        if "split" in some:
            its = (splits.setdefault(value, len(splits)) for value in some["split"])
            which.append(np.fromiter(its, np.int32))
    return Outline(count, cells, tuple(splits), np.concatenate(which))


@lru_cache(maxsize=2)
def _label_column(path: Path, state: tuple[int, ...], reading: Reading) -> list[Any]:
    """The labels of all rows, of which those that are one and the same text take memory once."""
    known = dict[str, str]()
    return [
        known.setdefault(value, value) if isinstance(value, str) else value
        for some in columns.parts(path, ("label",), reading)
        for value in some["label"]
    ]
