"""What of this program's log may leave: `fedda logs`, where the policy has leaving.logs.

A log quotes names of files, of classes and of columns, and values. So no text of a record is kept:
a plain line has the time, the level, the place in fedda's code, and

    the words of a message as they stand in that code, with "…" for all that is put into them,
    an error's class, with the fixed sentence that the server may be told of its code,
    what the node does, of which the server knows all: connected, working for a run, done.

Of other packages' records only the level is kept, as their words may hold anything.
"""

import logging
import re
import threading
import time
from collections import deque
from pathlib import Path

import fedda
from fedda.errors import FeddaError, code_of

EVENT = "%s: %s"  # the message of an event of `clients.node.resident`: its kind, and a sentence
PLAIN_EVENTS = {"work", "done", "dropped"}  # a kind of request, a run's number and seconds only
KINDS = PLAIN_EVENTS | {"waiting", "connected", "lost", "back", "stopped", "refused", "failed"}
LINES = 400  # that are remembered
MOST_BYTES = 2**14  # of an answer
GAP = "…"
PUT_IN = re.compile(r"%(\(\w+\))?[-+ #0]*[\d*.]*[a-zA-Z]")
ROOTS = (Path(fedda.__file__).parent, Path(__file__).parents[1])  # in a wheel the second is within


class PlainLog(logging.Handler):
    """Remembers the last plain lines of this process."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=LINES)
        self._changes = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a record's plain line."""
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        with self._changes:
            self._lines.append(f"{clock} {record.levelname} {plain(record)}")

    def text(self) -> str:
        """The last lines, in MOST_BYTES at most."""
        with self._changes:
            lines = [*self._lines]
        size, first = 0, len(lines)
        while first and (size := size + len(lines[first - 1].encode()) + 1) <= MOST_BYTES:
            first -= 1
        return "\n".join(lines[first:])


LOG = PlainLog()


def plain(record: logging.LogRecord) -> str:
    """A record's words without anything that was put into them."""
    place = next((p for root in ROOTS if (p := _below(root, record.pathname))), "")
    if not place:
        return "another package wrote a line"
    args = record.args if isinstance(record.args, tuple) else ()
    if record.msg == EVENT and args and str(args[0]) in KINDS:
        return _event(*map(str, args))
    error = next((a for a in args if isinstance(a, BaseException)), None)
    error = error or (record.exc_info[1] if record.exc_info else None)
    # A message without a place for arguments may have been put together before it was logged.
    words = PUT_IN.sub(GAP, str(record.msg)) if record.args else GAP
    return " ".join(filter(None, [f"{place}:{record.lineno}", words, _error(error)]))


def _event(kind: str, sentence: str) -> str:
    return f"{kind}: {sentence}" if kind in PLAIN_EVENTS else kind


def _error(error: BaseException | None) -> str:
    """An error's class, if it is fedda's or Python's own, and what the server is told of it."""
    if error is None:
        return ""
    known = isinstance(error, FeddaError) or type(error).__module__ == "builtins"
    return f"[{type(error).__name__ if known else 'error'}: {code_of(error).public}]"


def _below(root: Path, file: str) -> str:
    """A file of fedda's code, below its folder; empty if it is none."""
    path = Path(file)
    return str(path.relative_to(root.parent)) if path.is_relative_to(root) else ""
