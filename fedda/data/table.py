"""Tables of images: a CSV or parquet file with a row per image, also as Hugging Face writes them.

    path    an image file, relative to the table's folder, in which it has to lie;
    image   or, in parquet, the image file's bytes itself, in a struct with the field `bytes`
    label   the class: a text, or a number that Hugging Face's metadata names
    split   optional: train or test; without it all rows are training images

A folder is such a table if it holds `manifest.csv`, or `train-*.parquet` and `test-*.parquet`, in
itself or in `data/`, or what `save_to_disk` of Hugging Face's `datasets` wrote. Other columns are
not read. Of a target's training images no label is used. With `Reading.follow_links` images may lie
anywhere, also by absolute paths.

A site may train on another split than `train` (`Reading.split`); the rows of further splits are
then passed over.
"""

import csv
import io
import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from fedda.data.columns import MANIFEST, SPLITS, Columns, others, parts_of, read
from fedda.data.form import AS_IT_IS, Form, Reading
from fedda.data.inside import Inside
from fedda.data.optional import needed
from fedda.data.pixels import Encoded, broken, digest, read_images, survey
from fedda.data.sets import (
    Description,
    Labelled,
    Progress,
    Role,
    Unlabelled,
    listed,
    odd_classes,
)
from fedda.errors import DataError
from fedda.files import place

Image = Path | Encoded

IMAGES = Path("images")  # in the folder of a site that was cut from a table


class Table:
    """One site's table of images.

    Args:
        path: its file or folder.
        reading: as the site says.
    """

    def __init__(self, path: Path, reading: Reading = AS_IT_IS) -> None:
        self.path = path
        self._inside = Inside(path, reading.follow_links)
        # Table files, each with its split if known.
        self.files = parts_of(path, reading.split, self._inside)
        self._reading = reading
        self._train = reading.split or "train"

    def source(self, form: Form, progress: Progress | None) -> Labelled:
        images, names = self._rows(self._train, labels=True)
        classes = tuple(sorted(set(names)))
        self._test_names(classes)
        return _labelled(images, names, classes, form, progress)

    def target(self, form: Form, progress: Progress | None) -> Unlabelled:
        return Unlabelled(read_images(self._target(), form, progress))

    def evaluation(self, form: Form, progress: Progress | None) -> Labelled | None:
        images, names = self._tests()
        if not images:
            return None
        return _labelled(images, names, tuple(sorted(set(names))), form, progress)

    def identities(self, role: Role) -> list[bytes]:
        if role == "target":
            return [digest(image) for image in self._target()]
        rows = zip(*self._rows(self._train, labels=True), strict=True)
        return [digest(image, name) for image, name in rows]

    def broken(self, role: Role) -> list[str]:
        """A sentence for each image that cannot be read, those of the test included."""
        images = self._rows(self._train, labels=True)[0] if role == "source" else self._target()
        return broken([*images, *self._tests()[0]], self._reading.gray)

    def describe(self, role: Role) -> Description:
        counts: dict[str, int] = {}
        if role == "source":
            train, names = self._rows(self._train, labels=True)
            counts = {name: names.count(name) for name in sorted(set(names))}
            test = self._test_names(tuple(counts))
        else:
            train, test = self._target(), self._tests()[1]
        found = survey(train)
        odd = (
            found.mixed,
            others(self.path, self._reading.split, self._inside),
            *odd_classes(counts),
        )
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
        return ([], []) if self._train == "test" else self._rows("test", labels=True)

    def _target(self) -> list[Image]:
        images, _ = self._rows(self._train, labels=False)
        random.Random(0).shuffle(images)  # the order of the rows may reveal a class
        return images

    def _test_names(self, classes: tuple[str, ...]) -> list[str]:
        names = self._tests()[1]
        if unknown := sorted(set(names) - set(classes)):
            raise DataError(
                f"{self.path} tests on the class {unknown[0]!r}, which no training row has "
                f"({listed(classes)}): rename it, or add training images of it"
            )
        return names

    def _rows(self, split: str, labels: bool) -> tuple[list[Image], list[str]]:
        """The images of a split, and their labels if these are asked for."""
        images, names = [], []
        there: set[str] = set()
        for file, its in self.files:
            columns = read(file, ("path", "image", "split", *(("label",) if labels else ())))
            splits = columns.get("split") or [its or "train"] * _length(columns)
            there.update(map(str, splits))
            self._check(file, columns, splits)
            chosen = [i for i, each in enumerate(splits) if each == split]
            if labels and split == "test" and "label" not in columns:
                continue  # nothing to test on
            images += [self._image(file, columns, i) for i in chosen]
            names += self._names(file, columns, chosen) if labels else []
        if split == self._train and not images:
            raise DataError(
                f"{self.path} has no training rows: give rows of the split {split}"
                + (f", or another --split ({listed(sorted(there), 12)})" if there else "")
            )
        return images, names

    def _check(self, file: Path, columns: Columns, splits: Sequence[str]) -> None:
        if "path" not in columns and "image" not in columns:
            raise DataError(
                f"{file} has no column path, which names the image files: the columns path, label "
                f"and optionally split are needed"
            )
        odd = [each for each in splits if each not in SPLITS]
        if odd and not self._reading.split:
            raise DataError(
                f"{file} has the split {odd[0]!r}: train or test is needed in each row, or name "
                f"the split to train on with --split"
            )

    def _image(self, file: Path, columns: Columns, row: int) -> Image:
        if "image" not in columns:
            image = _place(file, columns, row)
            self._inside.check(image)
            return image
        found = columns["image"][row]
        content = found.get("bytes") if isinstance(found, dict) else None
        if not content:
            raise DataError(f"{file} has no image in row {row + 1}: fill or remove it")
        return Encoded(f"row {row + 1} of {file}", content)

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


def _place(file: Path, columns: Columns, row: int) -> Path:
    """The image file that a row names."""
    name = columns["path"][row]
    if not isinstance(name, str) or not name:
        raise DataError(f"{file} has no path in row {row + 1}: fill or remove it")
    return file.parent / name


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


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


def split(
    path: Path, out: Path, by: str, part: str = "", follow_links: bool = False
) -> dict[str, int]:
    """Cut a table into sites by a column -> the number of rows of each site, by its name.

    Each becomes a folder of OUT: with a `manifest.csv` and its images, which are links to the same
    files (or copies, on another disk), or, if the images are in the table, with a `train-0.parquet`
    and a `test-0.parquet`.

    Args:
        path: the table.
        out: a new or empty folder.
        by: the column that names each row's site.
        part: the split whose rows become the sites' training images; empty for `train`. Rows of
            the split `test` become their test images, and those of others are left out.
        follow_links: whether images may lie outside of the table's folder; the sites' tables then
            name them where they are.

    Raises:
        DataError: it is no table, it lacks the column, a site cannot be named after a value, or an
            image lies elsewhere or is missing.
    """
    inside = Inside(path, follow_links)
    files = parts_of(path, part, inside)
    if not files:
        raise DataError(
            f"{path} is no table of images: give a CSV or parquet file, or a data set that Hugging "
            f"Face's save_to_disk wrote"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not an empty folder, and nothing is overwritten: give another")
    there = {
        s for file, its in files for s in read(file, ("split",)).get("split", [its or "train"])
    }
    if part and part not in there:
        raise DataError(
            f"{path} has no rows of the split {part}: give the name of another by --split "
            f"({listed(sorted(map(str, there)), 12) or 'there are no rows'})"
        )
    counts: dict[str, int] = {}
    for file, its in files:
        columns = read(file)
        if by not in columns:
            raise DataError(
                f"{file} has no column {by} ({listed(list(columns))}): give one of these"
            )
        columns.setdefault("split", [its or "train"] * _length(columns))
        if part:
            columns = _renamed(columns, part)
        for site in sorted(set(map(str, columns[by]))):
            if not site.strip() or site.startswith(".") or "/" in site or len(site) > 64:
                raise DataError(f"{file} has {site!r} in {by}, which cannot name a site: rename it")
            rows = [i for i, value in enumerate(columns[by]) if str(value) == site]
            _write(file, columns, rows, out / site, counts.get(site, 0), inside)
            counts[site] = counts.get(site, 0) + len(rows)
    return counts


def _placed(file: Path, columns: Columns, row: int, folder: Path, inside: Inside) -> Path:
    """The path of a row's image for a site's table: in the site's folder, or where it is."""
    image = _place(file, columns, row)
    inside.check(image)
    if (its := inside.within(image)) is None:
        return image.absolute()
    new = folder / IMAGES / its
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        if not new.exists():
            place(Path(os.path.realpath(image)), new)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} names {columns['path'][row]!r} in row {row + 1}, which cannot be linked or "
            f"copied to {folder} ({error}): mend the row or the file"
        ) from error
    return IMAGES / its


def _renamed(columns: Columns, part: str) -> Columns:
    """The rows of a split as `train`, and, unless it is this split, those of `test` as they are."""
    chosen = [i for i, each in enumerate(columns["split"]) if each in (part, "test")]
    found = {name: [values[i] for i in chosen] for name, values in columns.items()}
    return found | {"split": ["train" if each == part else each for each in found["split"]]}


def _write(
    file: Path, columns: Columns, rows: list[int], folder: Path, before: int, inside: Inside
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
    names = [name for name in columns if name != "path"]
    if not before:
        writer.writerow(["path", *names])
    for i in rows:
        image = _placed(file, columns, i, folder, inside)
        writer.writerow([image, *(columns[name][i] for name in names)])
    with (folder / MANIFEST).open("a", encoding="utf-8", newline="") as stream:
        stream.write(text.getvalue())
