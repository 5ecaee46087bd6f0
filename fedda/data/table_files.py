"""Which files of a site's folder are its table.

table.csv, table.parquet            a table of its own
manifest.csv                        in a folder: the folder's table
DOMAIN_train.txt, DOMAIN_test.txt   lists of files (`fedda.data.file_lists`)
train-*.parquet, test-*.parquet     in a folder or its data/: one split each, also others
train.csv, test.csv                 in a folder: likewise
labels.csv                          in a folder: the only one with the columns path and label, or
                                    all that is in it
state.json, *.arrow                 Dataset.save_to_disk of Hugging Face
dataset_dict.json, <split>/         DatasetDict.save_to_disk: one such folder for each split

A folder is looked at in this order.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedda.data import file_lists
from fedda.data.columns import IMAGES, headings
from fedda.data.form import AS_IT_IS, Reading
from fedda.data.inside import Inside
from fedda.data.naming import listed
from fedda.errors import DataError, reason
from fedda.files import encoding

MANIFEST = "manifest.csv"
SPLITS = ("train", "test")
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
    if lists := [] if (path / MANIFEST).is_file() else file_lists.lists_of(path):
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
