"""Tables of images: a CSV or parquet file with a row per image, also as Hugging Face writes them.

    path    an image file, relative to the table's folder or absolute;
    image   or, in parquet, the image file's bytes itself, in a struct with the field `bytes`
    label   the class: a text, or a number that Hugging Face's metadata names
    split   optional: train or test; without it all rows are training images

A folder is such a table if it holds `manifest.csv`, or `train-*.parquet` and `test-*.parquet`, in
itself or in `data/`. Other columns are not read. Of a target's training images no label is used.
"""

import csv
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedda.data.form import Form
from fedda.data.optional import needed
from fedda.data.pixels import Encoded, digest, read_images, survey
from fedda.data.sets import Description, Labelled, Progress, Role, Unlabelled, listed
from fedda.errors import DataError

MANIFEST = "manifest.csv"
ENDINGS = (".csv", ".parquet")
_SPLITS = ("train", "test")

Image = Path | Encoded
Columns = dict[str, list[Any]]


class Table:
    """One site's table of images."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = parts_of(path)  # table files, each with the split that its name says

    def source(self, form: Form, progress: Progress | None) -> Labelled:
        images, names = self._rows("train", labels=True)
        classes = tuple(sorted(set(names)))
        self._test_names(classes)
        return _labelled(images, names, classes, form, progress)

    def target(self, form: Form, progress: Progress | None) -> Unlabelled:
        return Unlabelled(read_images(self._target(), form, progress))

    def evaluation(self, form: Form, progress: Progress | None) -> Labelled | None:
        images, names = self._rows("test", labels=True)
        if not images:
            return None
        return _labelled(images, names, tuple(sorted(set(names))), form, progress)

    def identities(self, role: Role) -> list[bytes]:
        if role == "target":
            return [digest(image) for image in self._target()]
        rows = zip(*self._rows("train", labels=True), strict=True)
        return [digest(image, name) for image, name in rows]

    def describe(self, role: Role) -> Description:
        counts: dict[str, int] = {}
        if role == "source":
            train, names = self._rows("train", labels=True)
            counts = {name: names.count(name) for name in sorted(set(names))}
            test = self._test_names(tuple(counts))
        else:
            train, test = self._target(), self._rows("test", labels=True)[1]
        found = survey(train)
        return Description(
            path=self.path,
            role=role,
            kind="image",
            shape=found.shape,
            train=len(train),
            test=len(test),
            classes=tuple(counts) or tuple(sorted(set(test))),
            counts=counts,
            warnings=(found.mixed,) if found.mixed else (),
        )

    def _target(self) -> list[Image]:
        images, _ = self._rows("train", labels=False)
        random.Random(0).shuffle(images)  # the order of the rows may reveal a class
        return images

    def _test_names(self, classes: tuple[str, ...]) -> list[str]:
        names = self._rows("test", labels=True)[1]
        if unknown := sorted(set(names) - set(classes)):
            raise DataError(
                f"{self.path} tests on the class {unknown[0]!r}, which no training row has "
                f"({listed(classes)}): rename it, or add training images of it"
            )
        return names

    def _rows(self, split: str, labels: bool) -> tuple[list[Image], list[str]]:
        """The images of a split, and their labels if these are asked for."""
        images, names = [], []
        for file, its in self.files:
            columns = read(file, ("path", "image", "split", *(("label",) if labels else ())))
            splits = columns.get("split") or [its or "train"] * _length(columns)
            self._check(file, columns, splits)
            chosen = [i for i, each in enumerate(splits) if each == split]
            if labels and split == "test" and "label" not in columns:
                continue  # nothing to test on
            images += [_image(file, columns, i) for i in chosen]
            names += self._names(file, columns, chosen) if labels else []
        if split == "train" and not images:
            raise DataError(f"{self.path} has no training rows: give rows of the split train")
        return images, names

    def _check(self, file: Path, columns: Columns, splits: Sequence[str]) -> None:
        if "path" not in columns and "image" not in columns:
            raise DataError(
                f"{file} has no column path, which names the image files: the columns path, label "
                f"and optionally split are needed"
            )
        if odd := [each for each in splits if each not in _SPLITS]:
            raise DataError(f"{file} has the split {odd[0]!r}: train or test is needed in each row")

    def _names(self, file: Path, columns: Columns, chosen: Sequence[int]) -> list[str]:
        """The labels of some rows."""
        if "label" not in columns:
            raise DataError(
                f"{file} has no column label, but a source needs labels: add it, or let the site "
                f"be a target (--role target)"
            )
        names = [columns["label"][i] for i in chosen]
        for i, name in zip(chosen, names, strict=True):
            if name in (None, ""):
                raise DataError(f"{file} has no label in row {i + 1}: fill or remove it")
        return [str(name) for name in names]


def parts_of(path: Path) -> list[tuple[Path, str | None]]:
    """The files of a table with the split that their names say; empty if the path is no table."""
    if path.is_file():
        return [(path, None)] if path.suffix.lower() in ENDINGS else []
    if (path / MANIFEST).is_file():
        return [(path / MANIFEST, None)]
    found = sorted(p for place in (path, path / "data") for p in place.glob("*.parquet"))
    named = [(p, s) for p in found for s in _SPLITS if p.name.startswith((f"{s}-", f"{s}."))]
    return [*named] if named or len(found) != 1 else [(found[0], None)]


def read(file: Path, wanted: Sequence[str] = ()) -> Columns:
    """Some columns of a CSV or parquet file, by default all; those that it lacks are left out.

    Raises:
        DataError: it cannot be read, or needs a package that is not installed.
    """
    if file.suffix.lower() == ".csv":
        return _read_csv(file, wanted)
    parquet = needed("pyarrow.parquet", "parquet", f"{file} is a parquet file, which")
    try:
        schema = parquet.read_schema(file)
        names = [name for name in schema.names if not wanted or name in wanted]
        columns = parquet.read_table(file, columns=names).to_pydict()
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file} cannot be read as parquet ({error}): write it again") from error
    features = about.get("info", {}).get("features", {})
    for name in names:
        if texts := features.get(name, {}).get("names"):  # numbers that have names
            columns[name] = [_text(file, name, texts, v) for v in columns[name]]
    return columns


def _text(file: Path, column: str, texts: Sequence[str], number: int | None) -> str | None:
    """The name of a number; None if it has none: Hugging Face writes -1 for an unknown label."""
    if number is None or number == -1:
        return None
    if not 0 <= number < len(texts):
        raise DataError(
            f"{file} has the number {number} in its column {column}, which its metadata gives "
            f"{len(texts)} names: mend the numbers or the names"
        )
    return texts[number]


def _read_csv(file: Path, wanted: Sequence[str]) -> Columns:
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            rows = csv.DictReader(stream, strict=True)
            names = [name for name in rows.fieldnames or () if not wanted or name in wanted]
            columns: Columns = {name: [] for name in names}
            for row in rows:
                if None in row or None in row.values():
                    raise DataError(
                        f"{file} has more or fewer values than columns in line {rows.line_num}: "
                        f"mend it, or put texts with commas into quotation marks"
                    )
                for name in names:
                    columns[name].append(row[name])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as CSV ({error}): write it as UTF-8") from error
    return columns


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _image(file: Path, columns: Columns, row: int) -> Image:
    if "image" not in columns:
        return file.parent / columns["path"][row]
    content = (columns["image"][row] or {}).get("bytes")
    if not content:
        raise DataError(f"{file} has no image in row {row + 1}: fill or remove it")
    return Encoded(f"row {row + 1} of {file}", content)


def _labelled(
    images: Sequence[Image],
    names: Sequence[str],
    classes: tuple[str, ...],
    form: Form,
    progress: Progress | None,
) -> Labelled:
    index = {name: i for i, name in enumerate(classes)}
    y = torch.tensor([index[name] for name in names], dtype=torch.int64)
    return Labelled(read_images(images, form, progress), y, classes)


def split(path: Path, out: Path, by: str) -> dict[str, int]:
    """Cut a table into sites by a column -> the number of rows of each site, by its name.

    Each becomes a folder of OUT: with a `manifest.csv`, or, if the images are in the table, with
    a `train-0.parquet` and a `test-0.parquet`.

    Raises:
        DataError: it is no table, it lacks the column, or a site cannot be named after a value.
    """
    files = parts_of(path)
    if not files:
        raise DataError(f"{path} is no table of images: give a CSV or parquet file")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not an empty folder, and nothing is overwritten: give another")
    counts: dict[str, int] = {}
    for file, its in files:
        columns = read(file)
        if by not in columns:
            raise DataError(
                f"{file} has no column {by} ({listed(list(columns))}): give one of these"
            )
        columns.setdefault("split", [its or "train"] * _length(columns))
        for site in sorted(set(map(str, columns[by]))):
            if not site.strip() or site.startswith(".") or "/" in site or len(site) > 64:
                raise DataError(f"{file} has {site!r} in {by}, which cannot name a site: rename it")
            rows = [i for i, value in enumerate(columns[by]) if str(value) == site]
            _write(file, columns, rows, out / site, counts.get(site, 0))
            counts[site] = counts.get(site, 0) + len(rows)
    return counts


def _write(file: Path, columns: Columns, rows: list[int], folder: Path, before: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if "image" in columns:
        arrow = needed("pyarrow", "parquet", "writing parquet")
        parquet = needed("pyarrow.parquet", "parquet", "writing parquet")
        for part in _SPLITS:
            if chosen := [i for i in rows if columns["split"][i] == part]:
                some = {k: [v[i] for i in chosen] for k, v in columns.items() if k != "split"}
                parquet.write_table(arrow.table(some), folder / f"{part}-{before}.parquet")
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name for name in columns if name != "path"]
    if not before:
        writer.writerow(["path", *names])
    for i in rows:
        place = (file.parent / columns["path"][i]).absolute()
        writer.writerow([place, *(columns[name][i] for name in names)])
    with (folder / MANIFEST).open("a", encoding="utf-8", newline="") as stream:
        stream.write(text.getvalue())
