"""Lists of image files, as DomainNet and PACS publish them: a line names a file and a number.

    clipart_train.txt                clipart/zebra/clipart_343_000001.jpg 343
    art_painting_train_kfold.txt     art_painting/dog/pic_001.jpg 1

The file's folder is its class; the number has to be the same for all files of a folder and for no
others. A domain's lists lie in its folder, whatever its name, beside it, or in the one that
holds it alone.
"""

import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fedda.data.naming import listed
from fedda.errors import DataError, reason
from fedda.files import encoding

ENDING = ".txt"

_SPLITS = {"train": "train", "test": "test", "trainkfold": "train", "crossvalkfold": "test"}


class Line(NamedTuple):
    """One line of a list."""

    where: str  # "FILE, line N"
    path: PurePosixPath  # of the image, below the folder of the domains
    label: int  # its number


def lines(file: Path) -> list[Line]:
    """The lines of a list.

    Raises:
        DataError: it cannot be read, a line is none of a list, or there are none.
    """
    try:
        text = file.read_text(encoding=encoding(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({reason(error)}): a text file is needed"
        ) from error
    found = []
    for n, entry in enumerate(text.splitlines(), start=1):
        where = f"{file}, line {n}"
        if not entry.strip():
            continue
        path, _, label = entry.strip().replace("\t", " ").rpartition(" ")
        if not path or not re.fullmatch(r"-?[0-9]+", label):
            raise DataError(f"{where}: {entry[:80]!r} is not a path and label such as 'a/b.jpg 3'")
        clean = PurePosixPath(path.strip().replace("\\", "/"))
        if clean.is_absolute() or ".." in clean.parts or len(clean.parts) < 2:
            raise DataError(f"{where}: {path!r} is no path below the domains' folder")
        found.append(Line(where, clean, int(label)))
    if not found:
        raise DataError(f"{file} names no images: lines such as 'a/b.jpg 3' are needed")
    return found


def class_of(line: Line, names: dict[int, tuple[str, str]]) -> str:
    """The class of a line's image.

    Args:
        line: it.
        names: the class of each number and the line that had it first; a new one is added.

    Raises:
        DataError: the number belongs to another class, or the class to another number.
    """
    name = line.path.parent.name
    if line.label not in names:
        if name in (its for its, _ in names.values()):
            raise DataError(
                f"{line.where}: the class folder {name!r} had another label before: one label per "
                f"class folder is needed"
            )
        names[line.label] = name, line.where
    owner, where = names[line.label]
    if owner != name:
        raise DataError(
            f"{line.where}: {line.path} has the label that {where} gives to {owner!r}: one label "
            f"per class folder is needed"
        )
    return name


def lists_of(site: Path) -> list[tuple[Path, str]]:
    """The lists of a site that is one domain, each with its split; none if it has none.

    Args:
        site: the domain's folder, with the lists in it or beside it, or the folder that holds
            both it and them. Links beside it are left alone.

    Raises:
        DataError: it has lists of several domains.
    """
    place = site.absolute()
    try:
        with os.scandir(place) as scan:
            inner = [place / entry.name for entry in scan if entry.is_dir()]
    except OSError:
        return []  # whoever reads the folder says so
    own = [place] if place.name else []
    beside = [its for its in _lists(place.parent, own) if not its[0].is_symlink()]
    if found := [*_lists(place, own)] or beside:
        return found
    of = {each.name: its for each in inner if (its := [*_lists(place, [each])])}
    if len(of) > 1:
        raise DataError(
            f"{site} holds lists of {len(of)} domains ({listed(sorted(of))}), and a site is one: "
            f"give the folder of one of them, such as {site / min(of)}"
        )
    within = [*_lists(inner[0], inner)] if len(inner) == 1 else []
    return next(iter(of.values()), within) or _of_renamed(place, {each.name for each in inner})


def _of_renamed(place: Path, classes: set[str]) -> list[tuple[Path, str]]:
    """The lists in a domain's folder that has another name than they, such as clp for clipart."""
    of: dict[str, list[tuple[Path, str]]] = {}
    for file in sorted(place.glob(f"*_*{ENDING}")):
        stem = key(file.stem)
        for split in (s for end, s in _SPLITS.items() if stem.endswith(end) and file.is_file()):
            with suppress(DataError):  # it is no list
                if {line.path.parent.name for line in lines(file)} <= classes:
                    of.setdefault(file.stem.rpartition("_")[0], []).append((file, split))
    return next(iter(of.values())) if len(of) == 1 else []


def _lists(place: Path, domains: list[Path]) -> Iterator[tuple[Path, str]]:
    """The lists in a folder that are of some domains, each with its split."""
    names = {key(folder.name) for folder in domains}
    for file in sorted(place.glob(f"*_*{ENDING}")) if names else ():
        stem = key(file.stem)
        its = (s for end, s in _SPLITS.items() if stem.removesuffix(end) in names - {stem})
        if (split := next(its, None)) and file.is_file():
            yield file, split


def key(name: str) -> str:
    """A name without case, spaces and punctuation, for comparing names; letters of any alphabet."""
    text = unicodedata.normalize("NFC", name).casefold()
    return "".join(c for c in text if unicodedata.category(c)[0] in "LMN")
