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
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedda.data import naming, npy
from fedda.data.categories import Texts, number, numbered, taken
from fedda.data.columns import FILES, IMAGES, KEYS, SPLITS, headings, parts_of, read, samples_of
from fedda.data.form import Reading
from fedda.data.inside import Inside
from fedda.data.named_files import NamedFiles
from fedda.data.naming import listed
from fedda.data.npz import Npz
from fedda.data.pixels import EXTENSIONS
from fedda.errors import DataError

_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # how pandas calls row numbers in a file
IMAGE_ENDINGS = tuple(EXTENSIONS)  # such a text names a file, and no kind of thing
LEAST = 40  # values, of which it means something that no two are the same


def file_of(path: Path, reading: Reading) -> Path | None:
    """The file of a table of numbers at a path; None if there is none."""
    parts = parts_of(path, reading, Inside(path, reading.follow_links))
    if len(parts) != 1 or parts[0][0].suffix.lower() not in FILES:
        return None
    there = headings(parts[0][0], reading)
    return parts[0][0] if there and not _of_images(there, reading) else None


def can_be_site(file: Path, reading: Reading) -> bool:
    """Whether a CSV or parquet file beside others is a site's table of numbers."""
    there, named = headings(file, reading), {*reading.values}
    if _of_images(there, reading) or not ("label" in there or named & {*there}):
        return False
    first = samples_of(file).items()  # of a parquet file nothing
    own = {reading.named.get(name, name) for name in ("label", "split", *KEYS)}
    wanted = named or {name for name, _ in first} - own
    return not first or any(number(value) is not None for name, value in first if name in wanted)


def _of_images(there: Sequence[str], reading: Reading) -> bool:
    """Whether a table with these columns is one of images, or is said to be."""
    return bool({*IMAGES} & {*there, *reading.named})


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
        own = {"label", "split", *KEYS, *self._indices}
        self._names = reading.values or known or tuple(sorted({*there} - own))
        if not (reading.values or known):
            self._check_labels()
        if not {*self._names} & {*there}:
            raise DataError(
                f"{path} has none of the columns {listed(self._names, 12) or 'of numbers'} (it has "
                f"{listed(there, 12)}): columns of numbers are needed, or path, which names image "
                "files; give a table with some, or name them with --columns values=age+weight"
            )
        rows = self._column("split") if "split" in there else None
        self._rows_of = {"": None} if rows is None else self._parts(rows)
        after = {part: f"_{part}" if part else "" for part in self._rows_of}
        self.keys = tuple(f"x{end}" for end in after.values())
        self.keys += tuple(f"y{end}" for end in after.values() if "label" in there)
        self._known: dict[str, np.ndarray] = {}
        self._found: Texts | None = None

    def _named(self) -> tuple[str, ...]:
        return self._names

    @property
    def texts(self) -> Texts:
        if self._found is None:
            self._array(self.keys[0])
        assert self._found is not None, "the columns have been read"
        return self._found

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
        found, array = [], self._array(x)
        if passed := [name for name in self._indices if name not in self._names]:
            found.append(
                f"the column {listed([repr(name) for name in passed])} has row numbers, as pandas "
                "writes them, and is passed over"
            )
        for name, values in zip(map(naming.escaped, self._names), array.T, strict=True):
            here = values[~np.isnan(values)]
            if len(here) >= LEAST and not (here % 1).any() and len(np.unique(here)) == len(here):
                found.append(
                    f"the column {name} has another whole number in each row, as identifiers have: "
                    "leave it out if it is one, or call it id"
                )
            if y is not None and _tells(values, y.numpy()):
                found.append(
                    f"the column {name} alone says each row's class: leave it out if it is not "
                    "known where the model will be used"
                )
        return found

    def unlabelled(self, x: str) -> DataError:
        there, advice = headings(self.path, self._reading_of), self._advice("label=diagnosis")
        return DataError(
            f"{self.path} has no column label (it has {listed(there, 12)}), but a source needs "
            f"labels: name them with {advice}, or let the site be a target (--role target)"
        )

    def _advice(self, otherwise: str) -> str:
        """The option that says which columns are meant: of images, if the table names some."""
        files = NamedFiles(self.path, self.path)
        return files.advice if files.names_images else f"--columns {otherwise}"

    def row_keys(self, x: str) -> list[str]:
        there = headings(self.path, self._reading_of)
        name = next((name for name in KEYS if name in there), "")
        return [str(v or "") for v in self._chosen(x, self._column(name))] if name else []

    def _labels(self, y: str) -> list[str]:
        return naming.names(self._chosen(y, self._column("label")), self.path)

    def _parts(self, splits: list[Any]) -> dict[str, list[int] | None]:
        """The rows of each split."""
        train = self._reading_of.split or "train"
        odd = [i for i, each in enumerate(splits) if each not in (*SPLITS, train)]
        if odd and not self._reading_of.split:
            raise DataError(
                f"{self.path} has the split {splits[odd[0]]!r} in row {odd[0] + 1}: train or test "
                "is needed in each row, or name the split to train on with --split"
            )
        parts = {part: [i for i, each in enumerate(splits) if each == part] for part in {*splits}}
        return {str(part): parts[part] for part in sorted(parts)}

    def _chosen(self, key: str, values: list[Any]) -> list[Any]:
        """The values of a split's rows."""
        rows = self._rows_of[key[2:]]
        return values if rows is None else [values[i] for i in rows]

    def _column(self, name: str) -> list[Any]:
        return read(self.path, (name,), self._reading_of)[name]

    def _header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        array = self._array(key)
        return array.shape, array.dtype

    def _array(self, key: str) -> np.ndarray:
        """The numbers of a split -> float32 (n, d)."""
        if key not in self._known:
            found = read(self.path, self._names, self._reading_of)
            n = len(next(iter(found.values())))
            self.check_room(key, 4 * n * len(self._names))
            gap = np.full(n, np.nan, np.float32)
            texts: dict[str, Sequence[str]] = {}
            every = [self._numbers(name, found[name], texts) if name in found else gap
                     for name in self._names]  # fmt: skip
            whole, self._found = np.stack(every, axis=1), texts
            parts = {f"x_{p}" if p else "x": rows for p, rows in self._rows_of.items()}
            self._known = {k: whole if rows is None else whole[rows] for k, rows in parts.items()}
        return self._known[key]

    def _rows(self, key: str, batch: int) -> Iterator[np.ndarray]:
        array = self._array(key)
        many = npy.at_a_time(array.shape, array.dtype.itemsize, batch)
        yield from (array[i : i + many] for i in range(0, len(array), many))

    def _numbers(self, name: str, values: list[Any], texts: dict[str, Sequence[str]]) -> np.ndarray:
        """A column's values -> float32 (n,), NaN at its gaps; texts are added to the others'."""
        try:
            numbers, its = numbered(values)
            if any(text.lower().endswith(IMAGE_ENDINGS) for text in its):
                raise ValueError(next(i for i, v in enumerate(values) if number(v) is None))
        except ValueError as error:
            row, there = error.args[0], headings(self.path, self._reading_of)
            is_file = str(values[row]).lower().endswith(IMAGE_ENDINGS)
            raise DataError(
                f"{self.path} has {str(values[row])[:40]!r} in row {row + 1} of its column "
                f"{naming.escaped(name)} (it has {listed(there, 12)}): numbers, or a few texts "
                "without commas, are needed where no column path names image files; write numbers, "
                "with a decimal point, or name the columns with "
                + self._advice(f"path={name}" if is_file else "values=age+weight")
            ) from None
        texts |= {name: its} if its else {}
        with np.errstate(over="ignore"):  # infinite then, which is refused
            return numbers.astype(np.float32)


def _tells(values: np.ndarray, y: np.ndarray) -> bool:
    """Whether a column has one value in each class, and another in each other."""
    each = [np.unique(values[y == c]) for c in np.unique(y)]
    return len(each) > 1 and len(np.unique(np.concatenate(each))) == len(each) == sum(
        map(len, each)
    )
