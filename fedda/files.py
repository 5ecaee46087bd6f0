"""Writing files so that they exist complete or not at all, and saying why one cannot be."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedda.errors import RunError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A partial file to write, which replaces `path` once the `with` block ends without error."""
    part = partial_path(path)
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def writing(path: Path, advice: str) -> Iterator[None]:
    """Turn an error of the disk in the `with` block into a sentence for the user.

    Args:
        path: the file that the block writes.
        advice: what to do if it cannot be written.

    Raises:
        RunError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); {advice}.") from error


def place(file: Path, new: Path) -> bool:
    """Link a file to a new name, or copy it where that cannot be -> whether it was linked.

    Raises:
        OSError: it cannot be read, or the new one not written.
    """
    try:
        os.link(file, new)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(file, new)
        return False
    return True


def keep_newest(files: Iterable[Path], most: int) -> None:
    """Delete all but the files that were changed last.

    Raises:
        OSError: a file is gone, or cannot be deleted.
    """
    by_age = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
    for old in by_age[most:]:
        old.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where a file lies until it is complete; only a crash leaves it there."""
    return path.with_name(f".{path.name}.part")
