"""Tables of images: a CSV or parquet file with a row per image, also as Hugging Face writes them.

    path    an image file in the table's folder (`fedda.data.which_files` says how it is found);
    image   the same, or in parquet the image file's bytes, also in a struct with a field `bytes`
    label   the class: a text, or a number that Hugging Face's metadata names (`fedda.data.naming`)
    split   optional: train or test; without it all rows are training images
    id      optional, or key: what predictions call the row beside its number

`fedda.data.which_files` says when a folder is such a table. Columns may have other names
(`Reading.columns`), and further ones are not read. Of a target's training images no label is used.
With `Reading.follow_links` images may lie anywhere, also by absolute paths.

A site may train on another split than `train` (`Reading.split`); the rows of further splits are
then passed over.
"""

import csv
import io
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.data import naming
from fedda.data.columns import IMAGES, KEYS, Columns, blank_rows, headings, read
from fedda.data.form import AS_IT_IS, Form, Reading
from fedda.data.naming import listed
from fedda.data.optional import needed
from fedda.data.pixels import Encoded, broken, digest, labelled, read_images, sound, survey
from fedda.data.reader import SiteData
from fedda.data.sets import Description, Labelled, Progress, Role, Unlabelled, odd_classes
from fedda.data.which_files import MANIFEST, ODD_SPLIT, SPLITS, Inside, NamedFiles, others, parts_of
from fedda.errors import DataError
from fedda.files import place

Image = Path | Encoded

PICTURES = Path("images")  # in the folder of a site that was cut from a table


class Row(NamedTuple):
    """One image of a table."""

    number: str  # of its row from 0; of several files with the file's name, as "train-0.parquet/3"
    key: str  # what the table itself calls it: its id, or the path of its image; may be empty
    image: Image  # its file, or the file's bytes
    label: Any  # as the table has it; None if labels were not asked for


class Table(SiteData):
    """One site's table of images."""

    def __init__(self, path: Path, reading: Reading = AS_IT_IS) -> None:
        self.path = path
        self._inside = Inside(path, reading.follow_links)
        # Table files, each with its split if known.
        self.files = parts_of(path, reading, self._inside)
        self._places = {file: NamedFiles(file, path) for file, _ in self.files}
        self._reading = reading
        self._train = reading.split or "train"

    def source(self, form: Form, progress: Progress | None) -> Labelled:
        images, names = self._labelled(self._train)
        classes = tuple(sorted(set(names)))
        self._test_names(classes)
        return labelled(images, names, classes, form, progress)

    def target(self, form: Form, progress: Progress | None) -> Unlabelled:
        return Unlabelled(read_images([row.image for row in self._target()], form, progress))

    def evaluation(self, form: Form, progress: Progress | None) -> Labelled | None:
        images, names = self._tests()
        if not images:
            return None
        return labelled(images, names, tuple(sorted(set(names))), form, progress)

    def identities(self, role: Role) -> list[bytes]:
        if role == "target":
            return [digest(row.image) for row in self._target()]
        rows = zip(*self._labelled(self._train), strict=True)
        return [digest(image, name) for image, name in rows]

    def tests(self) -> list[bytes]:
        return [digest(image) for image in self._tests()[0]]

    def names(self) -> list[str]:
        return [row.number for row in self._target()]

    def keys(self) -> list[str]:
        return [row.key for row in self._target()]

    def every(self) -> list[Row]:
        """All rows in their order, of every split unless the site names one; no label is read."""
        return self._rows(self._reading.split)

    def broken(self, role: Role) -> list[str]:
        train = self._rows(self._train) if role == "source" else self._target()
        return broken([*(row.image for row in train), *self._tests()[0]], self._reading.gray)

    def describe(self, role: Role) -> Description:
        counts: dict[str, int] = {}
        if role == "source":
            train, names = self._labelled(self._train)
            counts = dict(sorted(Counter(names).items()))
            test = self._test_names(tuple(counts))
        else:
            train, test = [row.image for row in self._target()], self._tests()[1]
        found = survey(train)
        left = others(self.path, self._reading, self._inside)
        blank = (blank_rows(file) for file, _ in self.files)
        odd = (found.mixed, left, *blank, *odd_classes(counts))
        return Description(
            path=self.path,
            role=role,
            kind="image",
            shape=found.shape,
            train=len(train),
            test=len(test),
            classes=tuple(counts) or tuple(sorted(set(test))),
            counts=counts,
            warnings=tuple(filter(None, odd)),
            gray=found.gray(self._reading.gray),
            needs_window=found.needs_window,
        )

    def _tests(self) -> tuple[list[Image], list[str]]:
        """The test images and their labels; none if the site trains on them."""
        return ([], []) if self._train == "test" else self._labelled("test")

    def _target(self) -> list[Row]:
        rows = self._rows(self._train)
        random.Random(0).shuffle(rows)  # the order of the rows may reveal a class
        return rows

    def _test_names(self, classes: tuple[str, ...]) -> list[str]:
        names = self._tests()[1]
        if unknown := sorted(set(names) - set(classes)):
            raise DataError(
                f"{self.path} tests on the class {unknown[0]!r}, which no training row has "
                f"({listed(classes)}): rename it, or add training images of it"
            )
        return names

    def _labelled(self, split: str) -> tuple[list[Image], list[str]]:
        """The images of a split and their classes."""
        rows = self._rows(split, labelled=True)

        def at(i: int) -> str:
            file, _, number = rows[i].number.rpartition("/")
            return f"row {int(number) + 1}" + (f" of {file}" if file else "")

        named = naming.names([row.label for row in rows], self.path, at)
        return [row.image for row in rows], named

    def _rows(self, split: str, labelled: bool = False) -> list[Row]:
        """The rows of a split, or of all, with their labels if these are asked for."""
        found: list[Row] = []
        there: set[str] = set()
        for file, its in self.files:
            wanted = *IMAGES, *KEYS, "split", *(("label",) if labelled else ())
            columns = _read(file, wanted, self._reading)
            splits = columns.get("split") or [its or "train"] * _length(columns)
            there.update(map(str, splits))
            self._check(file, columns, splits)
            if labelled and "label" not in columns:
                if split == "test" or (split and split not in splits):
                    continue  # nothing to test on, or nothing to train on
                raise DataError(
                    f"{file} has no column label ({listed(headings(file), 12)}), but a source "
                    f"needs labels: say which it is with {self._places[file].advice}, add it, "
                    f"or let the site be a target (--role target, or --target)"
                )
            before = f"{file.name}/" if len(self.files) > 1 else ""
            chosen = (i for i, each in enumerate(splits) if split in ("", each))
            found += [self._row(file, columns, i, before) for i in chosen]
        if self._reading.skip_broken:
            good = {*map(id, sound([row.image for row in found], self._reading.gray, self.path))}
            found = [row for row in found if id(row.image) in good]
        if split in ("", self._train) and not found:
            raise DataError(
                f"{self.path} has no training rows: give rows of the split {self._train}"
                + (f", or another --split ({listed(sorted(there), 12)})" if there else "")
            )
        return found

    def _check(self, file: Path, columns: Columns, splits: Sequence[str]) -> None:
        if not any(name in columns for name in IMAGES):
            there = listed(headings(file), 12)
            raise DataError(
                f"{file} has no column path, which names the image files"
                + (f" (it has {there})" if there else "")
                + ": the columns path, label and optionally split are needed, or names for them, "
                + f"such as {self._places[file].advice}"
            )
        odd = [each for each in splits if each not in SPLITS]
        if odd and not self._reading.split:
            raise DataError(f"{file} has the split {odd[0]!r}: {ODD_SPLIT}")

    def _row(self, file: Path, columns: Columns, i: int, before: str) -> Row:
        keys = [columns[name][i] for name in KEYS if name in columns]
        image, path = self._image(file, columns, i)
        key = next((str(key) for key in keys if key not in (None, "")), path)
        return Row(f"{before}{i}", key, image, columns["label"][i] if "label" in columns else None)

    def _image(self, file: Path, columns: Columns, row: int) -> tuple[Image, str]:
        """A row's image, and what the table names it."""
        if "image" in columns:
            found = columns["image"][row]
            about = found if isinstance(found, dict) else {"bytes": found}
            content, path = about.get("bytes"), about.get("path") or ""
            if not isinstance(content, bytes) or not content:
                raise DataError(f"{file} has no image in row {row + 1}: fill or remove it")
            own = columns["path"][row] if "path" in columns else path
            return Encoded(f"row {row + 1} of {file}", content), str(own or path)
        image = _place(file, columns, row, self._places[file])
        self._inside.check(image)
        return image, columns["path"][row]


def _read(file: Path, wanted: Sequence[str] = (), reading: Reading = AS_IT_IS) -> Columns:
    """As `read`; a column `image` of texts names files, as `path` does."""
    columns = read(file, wanted, reading)
    if any(isinstance(each, str) for each in columns.get("image", ())):
        columns.setdefault("path", columns["image"])
        del columns["image"]
    return columns


def _place(file: Path, columns: Columns, row: int, places: NamedFiles) -> Path:
    """The image file that a row names."""
    name = columns["path"][row]
    if not isinstance(name, str) or not name:
        raise DataError(f"{file} has no path in row {row + 1}: fill or remove it")
    return places.find(name)


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def split(
    path: Path, out: Path, by: str, reading: Reading = AS_IT_IS, test_share: float = 0.0
) -> dict[str, int]:
    """Cut a table into sites by a column -> the number of rows of each site, by its name.

    Each becomes a folder of OUT: with a `manifest.csv` and its images, if the table names some,
    which are links to the same files (or copies, on another disk), or, if the images are in the
    table, with a `train-0.parquet` and a `test-0.parquet`.

    Args:
        path: the table.
        out: a new or empty folder.
        by: the column that names each row's site.
        reading: names of columns, and the split whose rows become the sites' training images; rows
            of the split `test` become their test images, and those of others are left out. Images
            that links lead to elsewhere are named where they are.
        test_share: the share of each class to test on, drawn at random, where it has no split test.

    Raises:
        DataError: it is no table, it lacks the column, a site cannot be named after a value, or an
            image lies elsewhere or is missing.
    """
    part, inside = reading.split, Inside(path, reading.follow_links)
    files = parts_of(path, reading, inside)
    if not files:
        raise DataError(
            f"{path} is no table: give a CSV or parquet file, or a data set that Hugging "
            f"Face's save_to_disk wrote"
        )
    there = {
        s
        for file, its in files
        for s in read(file, ("split",), reading).get("split", [its or "train"])
    }
    if part and part not in there:
        raise DataError(
            f"{path} has no rows of the split {part}: give the name of another by --split "
            f"({listed(sorted(map(str, there)), 12) or 'there are no rows'})"
        )
    counts: dict[str, int] = {}
    draws = random.Random(0)
    for file, its in files:
        columns = _read(file, reading=reading)
        if by not in columns:
            raise DataError(
                f"{file} has no column {by} ({listed(list(columns))}): give one of these"
            )
        columns.setdefault("split", [its or "train"] * _length(columns))
        if part:
            columns = _renamed(columns, part)
        if test_share and "test" not in there:
            kinds = [*zip(columns[by], columns.get("label", columns[by]), strict=True)]
            columns["split"] = _drawn(kinds, test_share, draws)
        whose = ["" if value is None or value != value else str(value) for value in columns[by]]
        if not {*IMAGES} & {*columns}:
            del columns[by]  # of a table of numbers it would be one of them
        for site in sorted({*whose}):
            if not site.strip() or site.startswith(".") or "/" in site or len(site) > 64:
                raise DataError(f"{file} has {site!r} in {by}, which cannot name a site: rename it")
            rows = [i for i, value in enumerate(whose) if value == site]
            places = NamedFiles(file, path)
            _write(file, columns, rows, out / site, counts.get(site, 0), inside, places)
            counts[site] = counts.get(site, 0) + len(rows)
    return counts


def _drawn(kinds: Sequence[object], share: float, draws: random.Random) -> list[str]:
    """The split of each row, so that a share of every kind of them is drawn to test on."""
    rows: dict[object, list[int]] = {}
    for i, kind in enumerate(kinds):
        rows.setdefault(kind, []).append(i)
    tests = {i for its in rows.values() for i in draws.sample(its, round(share * len(its)))}
    return ["test" if i in tests else "train" for i in range(len(kinds))]


def _placed(
    file: Path, columns: Columns, row: int, folder: Path, inside: Inside, places: NamedFiles
) -> Path:
    """The path of a row's image for a site's table: in the site's folder, or where it is."""
    image = _place(file, columns, row, places)
    inside.check(image)
    if (its := inside.within(image)) is None:
        return image.absolute()
    new = folder / PICTURES / its
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        if not new.exists():
            place(Path(os.path.realpath(image)), new)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} names {columns['path'][row]!r} in row {row + 1}, which cannot be linked or "
            f"copied to {folder} ({error}): mend the row or the file"
        ) from error
    return PICTURES / its


def _renamed(columns: Columns, part: str) -> Columns:
    """The rows of a split as `train`, and, unless it is this split, those of `test` as they are."""
    chosen = [i for i, each in enumerate(columns["split"]) if each in (part, "test")]
    found = {name: [values[i] for i in chosen] for name, values in columns.items()}
    return found | {"split": ["train" if each == part else each for each in found["split"]]}


def _write(
    file: Path,
    columns: Columns,
    rows: list[int],
    folder: Path,
    before: int,
    inside: Inside,
    places: NamedFiles,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if "image" in columns:
        arrow = needed("pyarrow", "parquet", "writing parquet")
        parquet = needed("pyarrow.parquet", "parquet", "writing parquet")
        for part in SPLITS:
            if chosen := [i for i in rows if columns["split"][i] == part]:
                some = {k: [v[i] for i in chosen] for k, v in columns.items() if k != "split"}
                parquet.write_table(arrow.table(some), folder / f"{part}-{before}.parquet")
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not before:
        writer.writerow(columns)
    for i in rows:
        its = {name: values[i] for name, values in columns.items()}
        if "path" in its:
            its["path"] = _placed(file, columns, i, folder, inside, places)
        writer.writerow(its.values())
    with (folder / MANIFEST).open("a", encoding="utf-8", newline="") as stream:
        stream.write(text.getvalue())
