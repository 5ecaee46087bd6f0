"""A log to which lines are only added, and in which each line holds the hash of the line before.

    {"n": 7, "prev": "9f2c...", "time": 1764000000.123, "event": ...}

`n` counts the lines from 1. `prev` is the SHA-256 of the line before, without its line break; in
the first line it is 64 zeros. So a line that is changed, removed or put in later breaks the chain
there. Lines removed from the end do not, nor does a log that was written anew as a whole: only a
second log, kept elsewhere, shows these.

A process that is ended in mid-line leaves a torn line. The next line to be added says so, with the
hash of the torn piece, and the chain goes on from the last whole line. A large file is put aside
as NAME.000001.jsonl and so on; the chain goes on in a new one.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from fedda.errors import DataError

from . import system

START = "0" * 64
TORN = "torn"
MOST = 16 * 2**20  # bytes of a file, after which a new one is begun
TAIL = 2**16  # bytes read at a time to find the last line

Entry = dict[str, Any]


@dataclass
class CheckedChain:
    """What a check of a chain found."""

    entries: list[Entry] = field(default_factory=list)  # the lines that hold, in order
    last: str = START  # hash of the last of them
    bad: str = ""  # the first line that does not hold, and why; empty if all do
    notes: list[str] = field(default_factory=list)  # what is no tampering, but worth knowing


class Chain:
    """Adds lines to a log; several processes may add to the same one.

    Args:
        path: the newest file, whose name ends in .jsonl.
        durable: whether a line is on the disk when `add` returns, so that it survives a power cut.
        most: bytes of a file, after which a new one is begun.
    """

    def __init__(self, path: Path, durable: bool = True, most: int = MOST) -> None:
        self.path = path
        self._durable, self._most = durable, most
        self._end = (0, 0, 0, START)  # inode and size of the file as this object left it; n, hash

    def add(self, **facts: Any) -> None:
        """Add one line.

        Raises:
            OSError: it cannot be written.
        """
        try:
            self._add(facts)
        except OSError as error:  # a file that is open is not named, as when a disk is full
            error.filename = error.filename or str(self.path)
            raise

    def _add(self, facts: Entry) -> None:
        with self._locked() as file:
            n, last, lines, torn = self._last(file)
            if torn:
                about = {"event": TORN, "bytes": len(torn), "sha256": sha256(torn).hexdigest()}
                n, last, line = _line(n, last, about)
                lines += line
            n, last, line = _line(n, last, facts)
            file.write(lines + line)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())
            now = os.fstat(file.fileno())
            self._end = (now.st_ino, now.st_size, n, last)

    def _locked(self) -> IO[bytes]:
        """Open and lock the newest file, or a new one; closing it ends the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = self.path.open("ab+")
            system.lock(file.fileno(), wait=True)
            mine = os.fstat(file.fileno())
            if not self.path.exists() or self.path.stat().st_ino != mine.st_ino:
                file.close()  # another process has put it aside
                continue
            if mine.st_size < self._most:
                return file
            number = len(aside(self.path)) + 1
            self.path.rename(self.path.with_name(f"{self.path.stem}.{number:06}.jsonl"))
            file.close()

    def _last(self, file: IO[bytes]) -> tuple[int, str, bytes, bytes]:
        """Number and hash of the last whole line; the line break that is missing; a torn piece."""
        now = os.fstat(file.fileno())
        if (now.st_ino, now.st_size) == self._end[:2]:
            return self._end[2], self._end[3], b"", b""
        lines, rest = _tail(file, now.st_size)
        if not lines and (before := aside(self.path)):
            with before[-1].open("rb") as earlier:
                lines, _ = _tail(earlier, before[-1].stat().st_size)
        gap, torn = (b"\n" if rest else b""), b""
        if rest or (lines and _read(lines[-1]) is None):
            rest = rest or lines.pop()
            if _read(rest) is None:
                torn = rest
            else:  # it only lacks its line break
                lines.append(rest)
        line = lines[-1] if lines else b""
        return _number(line), _hash(line), gap, torn


def aside(path: Path) -> list[Path]:
    """The files of a log that have been put aside, the oldest first."""
    return sorted(path.parent.glob(f"{path.stem}.[0-9][0-9][0-9][0-9][0-9][0-9].jsonl"))


def check(path: Path) -> CheckedChain:
    """Read a log, and check that each line holds the hash of the line before.

    Raises:
        DataError: there is no such log.
    """
    files = [*aside(path), *([path] if path.exists() else [])]
    if not files:
        raise DataError(f"{path} does not exist; give the folder in which it was written.")
    found, torn, n = CheckedChain(), b"", 0
    for file in files:
        for number, line in _lines(file):
            place = f"{file.name}, line {number}"
            entry = _read(line)
            if torn:
                piece = {"event": TORN, "sha256": sha256(torn[0]).hexdigest()}
                if entry is None or not piece.items() <= entry.items():
                    found.bad = f"{torn[1]} cannot be read"
                    return found
                found.notes.append(f"{torn[1]} was cut short by the end of a process")
            elif entry is None:
                torn = (line, place)
                continue
            torn = b""
            n += 1
            if entry is None or entry.get("prev") != found.last or entry.get("n") != n:
                found.bad = f"{place} does not follow from the line before it"
                return found
            found.entries.append(entry)
            found.last = _hash(line)
    if torn:
        found.notes.append(f"{torn[1]} is incomplete: a process was ended while it wrote it")
    return found


def _line(n: int, last: str, facts: Entry) -> tuple[int, str, bytes]:
    """The next line's number, its hash, and the line."""
    entry = {"n": n + 1, "prev": last, "time": round(time.time(), 3), **facts}
    line = json.dumps(entry, separators=(",", ":")).encode()
    return n + 1, _hash(line), line + b"\n"


def _hash(line: bytes) -> str:
    return sha256(line).hexdigest() if line else START


def _number(line: bytes) -> int:
    entry = _read(line)
    return int(entry["n"]) if entry else 0


def _read(line: bytes) -> Entry | None:
    """A line's entry; None if it is none of this module's lines."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(entry, dict) and type(entry.get("n")) is int
    return entry if whole else None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        # So that no line is read while it is written.
        system.lock(file.fileno(), shared=True, wait=True)
        for number, line in enumerate(file, 1):
            yield number, line.removesuffix(b"\n")


def _tail(file: IO[bytes], size: int) -> tuple[list[bytes], bytes]:
    """The last lines that end with a line break, two or more if there are, and what follows."""
    end, data = size, b""
    while end and data.count(b"\n") < 4:
        start = max(0, end - TAIL)
        file.seek(start)
        data = file.read(end - start) + data
        end = start
    *lines, rest = data.split(b"\n")
    return lines if not end else lines[1:], rest
