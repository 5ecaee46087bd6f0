"""Which files of a site are read: its table, the images that this names, and no file elsewhere.

table.csv, table.parquet            a table of its own
manifest.csv                        in a folder: the folder's table
DOMAIN_train.txt, DOMAIN_test.txt   lists of files (`fedda.data.file_lists`)
train-*.parquet, test-*.parquet     in a folder or its data/: one split each, also others
train.csv, test.csv                 in a folder: likewise
labels.csv                          in a folder: the only one with the columns path and label, or
                                    all that is in it
state.json, *.arrow                 Dataset.save_to_disk of Hugging Face
dataset_dict.json, <split>/         DatasetDict.save_to_disk: one such folder for each split

A folder is looked at in this order. A table names an image by a path from the table's folder, of a
list also from the one above, or without the domain's name; or by the name of an image in any folder
below, with its ending or without.

Whoever made a folder or table may have put a link or a path into it that leads elsewhere, such as
to another study's images, or a pipe, which nobody ends (`Inside`).
"""

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import Any

from fedda.data.columns import IMAGES, headings, samples_of
from fedda.data.file_lists import ENDING, lists_of
from fedda.data.form import AS_IT_IS, Reading
from fedda.data.naming import listed
from fedda.data.samples import EXTENSIONS, is_image
from fedda.errors import DataError, reason
from fedda.files import encoding


class Inside:
    """The folder that all files of a site lie in.

    Args:
        path: the site's data, a folder or a file in one.
        follow: whether links and paths may lead out of it (`--follow-links`).
    """

    def __init__(self, path: Path, follow: bool = False) -> None:
        self._folder = path if path.is_dir() else path.parent
        self._real = os.path.realpath(self._folder)
        self._follow = follow
        self._known: dict[str, bool] = {}  # folders, and whether they lie in this one

    def check(self, file: Path) -> None:
        """Refuse what is no regular file of the folder; one that is missing fails when it is read.

        Raises:
            DataError: it is a pipe, a device or a folder, or lies elsewhere.
        """
        try:
            kind = os.lstat(file).st_mode
            if not self._follow and not self._holds(file, S_ISLNK(kind)):
                raise self._elsewhere(file)
            if S_ISLNK(kind):
                kind = os.stat(file).st_mode
        except (OSError, ValueError):
            self.check_folder(file)
            return
        if not S_ISREG(kind):
            raise DataError(
                f"{self._name(file)} in {self._folder} is a pipe, a device or a folder, but a "
                f"regular file is needed: remove it, or put the file itself there"
            )

    def within(self, file: Path) -> Path | None:
        """Where a file lies in the folder, relative to it; None if it lies elsewhere."""
        real = Path(os.path.realpath(file))
        return real.relative_to(self._real) if real.is_relative_to(self._real) else None

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder that lies elsewhere.

        Raises:
            DataError: it does.
        """
        if not self._follow and not self._holds(folder, True):
            raise self._elsewhere(folder)

    def _holds(self, path: Path, whole: bool) -> bool:
        """Whether a path lies in the folder; of one that is no link its own folder decides."""
        place = str(path) if whole or path.name == ".." else str(path.parent)
        if whole or place not in self._known:
            real = os.path.realpath(place.replace("\0", "\ufffd"))
            found = os.path.commonpath([real, self._real]) == self._real
            if whole:
                return found
            self._known[place] = found
        return self._known[place]

    def _elsewhere(self, path: Path) -> DataError:
        return DataError(
            f"{self._name(path)} in {self._folder} leads out of this folder, by a link or as a "
            f"path: copy what it means into the folder, or give --follow-links if you trust "
            f"whoever made it"
        )

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self._folder)


_LABELS = ("label", "class", "classname", "category", "diagnosis", "dx", "target", "y")


class NamedFiles:
    """The image files of one table.

    Args:
        table: its file.
        site: the file or folder that the site gave; nothing else is searched.
    """

    def __init__(self, table: Path, site: Path) -> None:
        self._table = table
        self._top = site if site.is_dir() else table.parent

    def find(self, name: str) -> Path:
        """The file of a name; where there is none, where it should be.

        Raises:
            DataError: it could be one image as well as another.
        """
        folder = self._table.parent
        places = [folder / name]
        if self._table.suffix == ENDING:  # the domain's folder may have another name
            places += [folder.parent / name, folder / name.partition("/")[2]]
        for place in places:
            file = str(place).replace("\0", "\ufffd")
            if os.path.lexists(file) and not os.path.isdir(file):
                return place
        return self._below(name) or self._table.parent / name

    def knows(self, name: str) -> bool:
        """Whether a text names an image of the table's folder."""
        try:
            found = self.find(name.strip()) if name.strip() else self._top
        except DataError:
            return True
        return is_image(found) and found.is_file()

    @cached_property
    def advice(self) -> str:
        """`--columns` with names for this table, as far as its headings and first row tell them."""
        columns = samples_of(self._table)
        ending = (c for c, value in columns.items() if Path(value).suffix.lower() in EXTENSIONS)
        path = self.naming or next(ending, "COLUMN")
        rest = [column for column in columns if column != path]
        plain = {"".join(filter(str.isalnum, column.lower())): column for column in rest}
        label = next((plain[name] for name in _LABELS if name in plain), "")
        label = label or (rest[0] if len(rest) == 1 else "COLUMN")
        return f"--columns path={path},label={label}"

    @cached_property
    def naming(self) -> str:
        """The first column that names an image of the table's folder in the first row, or none."""
        columns = samples_of(self._table).items()
        return next((column for column, value in columns if self.knows(value)), "")

    def _below(self, name: str) -> Path | None:
        """An image in the folders below, whose path ends in a name, with its ending or without."""
        wanted = name.replace("\\", "/").strip("/")
        base = wanted.rpartition("/")[2]
        found = [
            file
            for file in self._by_name.get(base, ())
            if f"/{file.as_posix()}".endswith(f"/{wanted}")
            or f"/{file.with_suffix('').as_posix()}".endswith(f"/{wanted}")
        ]
        if len(found) > 1:
            some = [os.path.relpath(file, self._top) for file in found]
            raise DataError(
                f"{self._table} names {name!r}, which could be {listed(some)}: write paths from "
                f"the table's folder"
            )
        return found[0] if found else None

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        """All images below, by their name and by it without its ending."""
        found: dict[str, list[Path]] = {}
        for folder, folders, files in os.walk(self._top):
            folders[:] = sorted(each for each in folders if not each.startswith("."))
            for file in sorted(files):
                stem, ending = os.path.splitext(file)
                if ending.lower() in EXTENSIONS and not file.startswith("."):
                    for name in (file, stem):
                        found.setdefault(name, []).append(Path(folder) / file)
        return found


def unread(folder: Path) -> str:
    """What to do about the first of a folder's tables that names its images but is not read."""
    for table in csvs(folder):
        places = NamedFiles(table, folder)
        if places.naming:
            there = listed(headings(table), 12)
            return (
                f"{table} names images, but its columns ({there}) are not known: say which are "
                f"meant with {places.advice}"
            )
    return ""


MANIFEST = "manifest.csv"
SPLITS = ("train", "test")
ODD_SPLIT = "train or test is needed in each row, or name the split to train on with --split"
FILES = (".csv", ".parquet")  # tables of one file

_DICT, _STATE = "dataset_dict.json", "state.json"  # of `datasets`


def parts_of(
    path: Path, reading: Reading = AS_IT_IS, inside: Inside | None = None
) -> list[tuple[Path, str | None]]:
    """The files of a table with the split of each, as far as it is known without opening them.

    Args:
        path: a file or folder.
        reading: as the site says: the split to train on, and names of columns.
        inside: where the files have to lie; None: in the path's folder.

    Returns:
        Pairs; empty if the path is no table.

    Raises:
        DataError: a data set that `datasets` saved is not complete, or its splits do not include
            the one to train on; or a file is no regular one of the folder.
    """
    inside = inside or Inside(path)
    if path.is_file():
        return [(path, None)] if path.suffix.lower() in FILES else []
    if lists := [] if (path / MANIFEST).is_file() else lists_of(path):
        for file, _ in lists:
            if file.parent != path.absolute().parent:
                inside.check(file)
        return list(lists)
    found = _parts(path, reading, inside)
    for file, _ in found:
        inside.check(file)
    return found


def _parts(path: Path, reading: Reading, inside: Inside) -> list[tuple[Path, str | None]]:
    """The files of a folder's table, wherever they lie."""
    split = reading.split
    if (path / MANIFEST).is_file():
        return [(path / MANIFEST, None)]
    if (path / _DICT).is_file():
        return _of_splits(path, split, inside)
    if (path / _STATE).is_file() and any(path.glob("*.arrow")):
        files, its = _saved(path, inside)
        return [(file, its if split else None) for file in files]
    found = sorted(p for place in (path, path / "data") for p in place.glob("*.parquet"))
    if named := _of_split(found, split):
        return named
    return [(found[0], None)] if len(found) == 1 else _csv_of(path, reading)


def _of_split(files: Sequence[Path], split: str) -> list[tuple[Path, str | None]]:
    """Those of some files that are called after a split, with it."""
    splits = dict.fromkeys((*SPLITS, *filter(None, [split])))
    return [(p, s) for p in files for s in splits if p.name.startswith((f"{s}-", f"{s}."))]


def csvs(folder: Path) -> list[Path]:
    """The CSV files in a folder, by name."""
    files = sorted(folder.glob("*.[cC][sS][vV]"))
    return [file for file in files if not file.name.startswith(".") and file.is_file()]


def _csv_of(folder: Path, reading: Reading) -> list[tuple[Path, str | None]]:
    """The CSV files that are a folder's table: with columns path and label, or train and test.

    Where class folders lie in the folder of the training split, these count.

    Raises:
        DataError: it could be one as well as another; or a site names columns that none has.
    """
    files = csvs(folder)
    names = {file: {*headings(file, reading)} for file in files}
    tables = [file for file in files if names[file] & {*IMAGES}]
    labelled = [file for file in tables if "label" in names[file]]
    labelled = labelled or (tables if reading.named else [])  # a target's has no labels
    if not labelled and reading.named and files:
        what = "; ".join(f"{p.name}: {listed(headings(p), 12) or 'nothing'}" for p in files)
        raise DataError(
            f"{folder} has no CSV file with all the columns of --columns {reading.columns} "
            f"({what}): give names that are there"
        )
    trained = reading.split or "train"
    if not reading.named and (folder / trained).is_dir() and any((folder / trained).glob("*/")):
        return []
    if (parted := _of_split(tables, trained)) and any(s == trained for _, s in parted):
        return parted if labelled else []
    if len(labelled) > 1:
        found = listed([file.name for file in labelled])
        raise DataError(
            f"{folder} holds {len(labelled)} tables of images ({found}), and a site has one: give "
            f"the file to use, such as {labelled[0]}"
        )
    alone = files if sorted(folder.glob("[!.]*")) == files else []
    if len(alone) > 1 and not labelled:
        raise DataError(
            f"{folder} holds {len(alone)} tables ({listed([file.name for file in alone])}), and a "
            "site has one: put their rows into one, with a column split that says of each whether "
            "it is for train or test"
        )
    return [(file, None) for file in labelled or alone]


def others(path: Path, reading: Reading, inside: Inside) -> str:
    """A warning about the splits and files of a data set that a site does not use; else empty."""
    if (path / _DICT).is_file():
        there = _json(path / _DICT, inside).get("splits", []) if not reading.split else []
        unused, what = [str(name) for name in there if name not in SPLITS], "splits"
    else:
        used = {file for file, _ in parts_of(path, reading, inside)}
        there = [p for place in (path, path / "data") for p in sorted(place.glob("*.parquet"))]
        there += csvs(path) if path.is_dir() else []
        unused, what = [p.name for p in there if p not in used], "further tables"
    return f"{path}: {what} are passed over ({listed(unused)})" if unused else ""


def _of_splits(path: Path, split: str, inside: Inside) -> list[tuple[Path, str | None]]:
    """The files of a `DatasetDict`."""
    names = _json(path / _DICT, inside).get("splits", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path / _DICT} names no splits: save the data set again")
    train = split or "train"
    if train not in names:
        which = f"no split {split}" if split else "several splits and none called train"
        raise DataError(
            f"{path} has {which}; its splits are {listed(names, 12) or 'none'}: name the one to "
            f"train on with --split"
        )
    used = dict.fromkeys(name for name in (train, "test") if name in names)
    return [(file, name) for name in used for file in _saved(path / name, inside)[0]]


def _saved(folder: Path, inside: Inside) -> tuple[list[Path], str | None]:
    """The files of a saved `Dataset`, and the split that it says it is."""
    state = _json(folder / _STATE, inside)
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} is saved with an index of its rows, which is not read: save it again after "
            f"flatten_indices()"
        )
    try:
        files = [folder / Path(each["filename"]).name for each in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / _STATE} names no files: save the data set again") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(
            f"{folder} lacks {listed(missing)}, which its {_STATE} names: copy the whole folder"
        )
    return files, state.get("_split")


def _json(file: Path, inside: Inside) -> dict[str, Any]:
    inside.check(file)
    try:
        found = json.loads(file.read_text(encoding=encoding(file)))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read ({reason(error)}): save the data set again"
        ) from error
    return found if isinstance(found, dict) else {}
