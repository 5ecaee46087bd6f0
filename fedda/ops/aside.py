"""What other programs print goes to a log file, while our own lines stay on the console.

The SuperLink, its helpers and the runs' programs write to this process's output. Within `aside`
that output is a pipe, whose other end a thread writes to a file that never grows beyond a limit.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

LARGEST = 10 * 2**20  # bytes of the file, before it is put aside
KEPT = 3  # earlier files, which end in .1, .2 and .3
MODE = 0o600  # it may quote names of sites and paths
GRACE = 5.0  # seconds for what is left in the pipe
OUTPUTS = (1, 2)

Say = Callable[[str], None]


@contextlib.contextmanager
def aside(path: Path, *, also: bool = False) -> Iterator[Say]:
    """Put this process's output, and that of programs that it starts, into a file.

    Args:
        path: the file; what it holds is kept.
        also: write it to the console, too.

    Yields:
        A function that writes one line to the console itself.
    """
    flush()
    file = Rotating(path)
    console = [os.dup(number) for number in OUTPUTS]
    read, write = os.pipe()
    for number in OUTPUTS:
        os.dup2(write, number)
    os.close(write)
    arguments = (read, file, console[1] if also else None)
    pump = threading.Thread(target=_pump, args=arguments, name="log", daemon=True)
    pump.start()
    encoding = sys.stdout.encoding or "utf-8"

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone must not end a server
            os.write(console[0], f"{line}\n".encode(encoding, "replace"))

    try:
        yield say
    finally:
        flush()
        for number, former in zip(OUTPUTS, console, strict=True):
            os.dup2(former, number)
        pump.join(GRACE)  # a program that has not ended keeps the pipe open
        if not pump.is_alive():
            for number in console:
                os.close(number)
            file.close()


class Rotating:
    """A file of bytes that is put aside, as `NAME.1`, when it is large enough."""

    def __init__(self, path: Path, largest: int = LARGEST) -> None:
        """Open the file to append to it; nobody else may read it.

        Raises:
            OSError: it cannot be written.
        """
        self.path = path
        self.largest = largest
        self._open()

    def write(self, data: bytes) -> None:
        """Append bytes; what a full disk does not take is lost."""
        with contextlib.suppress(OSError):
            if self._size and self._size + len(data) > self.largest:
                self.close()
                for number in range(KEPT, 0, -1):
                    former = self.path if number == 1 else self._aside(number - 1)
                    if former.exists():
                        former.replace(self._aside(number))
                self._open()
            self._size += os.write(self._file, data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _open(self) -> None:
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.open(self.path, how, MODE)
        os.fchmod(self._file, MODE)
        self._size = os.fstat(self._file).st_size


def flush() -> None:
    """Write what Python still holds of its output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _pump(read: int, file: Rotating, console: int | None) -> None:
    """Write all that comes out of a pipe to a file, until nobody can write into it any more."""
    while data := os.read(read, 2**16):
        file.write(data)
        if console is not None:
            with contextlib.suppress(OSError):
                os.write(console, data)
    os.close(read)
