"""Where the images lie that a table names, and which of its columns names them.

A name is a path from the table's folder, of a list also from the one above, or without the domain's
name; or the name of an image in any folder below, with its ending or without.
"""

import os
from functools import cached_property
from pathlib import Path

from fedda.data.columns import headings, samples_of
from fedda.data.file_lists import ENDING as LIST
from fedda.data.naming import listed
from fedda.data.samples import EXTENSIONS, is_image
from fedda.errors import DataError

_LABELS = ("label", "class", "classname", "category", "diagnosis", "dx", "target", "y")
COLUMN = "COLUMN"


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
        if self._table.suffix == LIST:  # the domain's folder may have another name
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
        path = self._naming or next(ending, COLUMN)
        rest = [column for column in columns if column != path]
        plain = {"".join(filter(str.isalnum, column.lower())): column for column in rest}
        label = next((plain[name] for name in _LABELS if name in plain), "")
        label = label or (rest[0] if len(rest) == 1 else COLUMN)
        return f"--columns path={path},label={label}"

    @cached_property
    def _naming(self) -> str:
        """The first column that names an image of the table's folder in the first row, or none."""
        columns = samples_of(self._table).items()
        return next((column for column, value in columns if self.knows(value)), "")

    @property
    def names_images(self) -> bool:
        """Whether a column of the table names images of its folder."""
        return bool(self._naming)

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


def unread(folder: Path, tables: list[Path]) -> str:
    """What to do about the first of a folder's tables that names its images but is not read."""
    for table in tables:
        places = NamedFiles(table, folder)
        if places.names_images:
            there = listed(headings(table), 12)
            return (
                f"{table} names images, but its columns ({there}) are not known: say which are "
                f"meant with {places.advice}"
            )
    return ""
