"""What other programs print goes to a log file, while our own lines stay on the console.

The SuperLink, its helpers and the runs' programs write to this process's output. Within `aside`
that output is a pipe, whose other end a thread writes to a file that never grows beyond a limit.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

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


class Rotating(RotatingFileHandler):
    """A file of text that is put aside, as `NAME.1`, when it is large enough; nobody else reads it.

    What a full disk does not take is lost.

    Raises:
        OSError: it cannot be written.
    """

    terminator = ""

    def __init__(self, path: Path, largest: int = LARGEST) -> None:
        super().__init__(path, maxBytes=largest + 1, backupCount=KEPT, encoding="utf-8")

    def _open(self) -> Any:
        def opened(path: str, how: int) -> int:
            file = os.open(path, how | os.O_NOFOLLOW, MODE)
            os.fchmod(file, MODE)
            return file

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=opened)

    def write(self, data: bytes) -> None:
        """Append some bytes of text."""
        text = data.decode(errors="replace")
        self.handle(logging.makeLogRecord({"msg": text}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Go on without the text, without a word: the console is somebody else's."""


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
