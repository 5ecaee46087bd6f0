"""Files that are kept: written whole or not at all, and the oldest deleted beyond some bounds.

Texts that a person wrote are UTF-8, or UTF-16 with the mark that Windows writes before it.
"""

import codecs
import errno
import glob
import math
import os
import shutil
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fedda.errors import ConfigError, DataError, RunError, reason

STALE_S = 3600.0  # no file takes longer to write from one piece to the next
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A partial file to write, which replaces `path` once the `with` block ends without error.

    A device or a pipe is no file that could be replaced: it is written to as it is.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    part = partial_path(path)
    clear_partial(path.parent, glob.escape(path.name))
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def put(path: Path, content: str | bytes) -> None:
    """Write a file whole, or not at all."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def keeping(path: Path, private: bool = False) -> Iterator[Path]:
    """Like `replacing`, and the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        if private and part != path:
            part.touch()
            part.chmod(0o600)
        yield part


def unprotected(path: Path) -> None:
    """Refuse a file that is protected from being written: to replace it would not ask.

    Raises:
        PermissionError: it is.
    """
    if path.is_file() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is write-protected")


@contextmanager
def writing(path: Path, advice: str) -> Iterator[Path]:
    """Like `replacing`, for a file that a user named: a link to a file is written through.

    Raises:
        RunError: it cannot be written, or is protected from it.
    """
    try:
        unprotected(path)
        with replacing(path.resolve() if path.is_file() else path) as part:
            yield part
    except OSError as error:
        raise RunError(f"{path} cannot be written ({reason(error)}); {advice}.") from error


@contextmanager
def filling(out: Path, called: Mapping[str, str] | None = None) -> Iterator[None]:
    """A new or empty folder to write to; if the `with` block fails, nothing of it is left.

    Args:
        out: the folder.
        called: what files that may lie in it are called in the message.

    Raises:
        DataError: it holds something, or is a file.
    """
    there = out.is_dir()
    if inside := sorted(entry.name for entry in out.iterdir()) if there else []:
        raise DataError(
            f"{out} is not empty, and nothing is overwritten: it holds "
            f"{(called or {}).get(inside[0], inside[0])}; give a new folder, or empty this one"
        )
    if not there and (out.exists() or out.is_symlink()):
        raise DataError(f"{out} is a file, and nothing is overwritten: give a new or empty folder")
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for entry in out.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not there:
            out.rmdir()
        raise


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


def states() -> Path:
    """The folder below which each site has its own, unless it says another.

    Raises:
        ConfigError: the account has no home folder, as in many containers.
    """
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # neither HOME nor an entry among the system's users
        raise ConfigError(
            "this account has no home folder to keep a site's state in: give one by --state-dir"
        ) from None
    return Path(base) / "fedda"


def keep_newest(
    entries: Iterable[Path],
    most: float = math.inf,
    room: float = math.inf,
    parts: Iterable[str] = (),
) -> None:
    """Delete all but the entries that were changed last.

    Passed over are those that are gone by now or cannot be looked at, and links, which fedda never
    makes: what they lead to is somebody else's.

    Args:
        entries: files, or folders.
        most: number of entries that stay.
        room: bytes that they may take together.
        parts: the files to delete in a folder, which itself goes if nothing else is in it.

    Raises:
        OSError: a file cannot be deleted.
    """
    by_age = []
    for entry in entries:
        if entry.is_symlink():
            continue
        with suppress(OSError):  # another process has deleted it, or it is another user's
            files = [*entry.iterdir()] if entry.is_dir() else [entry]
            size = sum(file.stat().st_size for file in files)
            by_age.append((-entry.stat().st_mtime, size, entry))
    for number, (_, size, entry) in enumerate(sorted(by_age), start=1):
        room -= size
        if number <= most and room >= 0:
            continue
        if not entry.is_dir():
            entry.unlink(missing_ok=True)
            continue
        for name in parts:
            (entry / name).unlink(missing_ok=True)
            clear_partial(entry, glob.escape(name))
        with suppress(OSError):  # it has files of somebody else
            entry.rmdir()


def encoding(path: Path) -> str:
    """The encoding of a text file."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in _UTF16 else "utf-8-sig"


def unmarked(content: bytes) -> bytes:
    """What a text file holds, as UTF-8 without a byte order mark."""
    if content[:2] in _UTF16:
        content = content.decode("utf-16", "replace").encode()
    return content.removeprefix(codecs.BOM_UTF8)


def partial_path(path: Path) -> Path:
    """Where a file lies until it is complete; only a crash leaves it there.

    Each process has a place of its own: two commands may write the same report at once.
    """
    return path.with_name(f".{path.name}.{_here()}-{os.getpid()}.part")


def _here() -> str:
    """Where the numbers of processes are those that this process sees: a machine or container."""
    with suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
        return f"{zlib.crc32(f'{socket.gethostname()} {numbers}'.encode()):08x}"
    return ""


def clear_partial(folder: Path, name: str) -> None:
    """Delete what crashes left of files with this name, which may be a pattern."""
    for part in folder.glob(f".{name}.*.part"):
        with suppress(OSError):  # another process has deleted it
            if time.time() - part.stat().st_mtime > STALE_S or _is_left(part):
                part.unlink()


def _is_left(part: Path) -> bool:
    """Whether the process that wrote this has ended, as far as can be told from here."""
    where, _, process = part.name.split(".")[-2].rpartition("-")
    return bool(where) and where == _here() and not Path(f"/proc/{process}").exists()
