"""Which files a site reads: regular ones that lie in the folder it was given, and no others.

Whoever made a folder or table may have put a link or a path into it that leads elsewhere, such as
to another study's images, or a pipe, which nobody ends. The path that is given may be a link.
"""

import os
from pathlib import Path
from stat import S_ISLNK, S_ISREG

from fedda.errors import DataError


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
            if not self._follow and not self._holds(file, True):
                raise self._elsewhere(file) from None
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
