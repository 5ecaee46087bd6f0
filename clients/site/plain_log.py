"""What of this program's log may leave: `fedda logs`, where the policy has leaving.logs.

A log quotes names of files, of classes and of columns, and values. So no text of a record is kept:
a plain line has the time, the level, the place in fedda's code, and

    the words of a message as they stand in that code, with "…" for all that is put into them,
    an error's class, with the fixed sentence that the server may be told of its code,
    what the node does, of which the server knows all: connected, working for a run, done.

The words are looked up in the code, at the line that logs: a message that was put together before
it was logged, or that is logged in another's name, has none. Of other packages' records only the
level is kept, as their words may hold anything; an error's class of theirs counts as the one of
fedda or Python that it derives from.
"""

import ast
import logging
import re
import threading
import time
from collections import deque
from functools import cache
from pathlib import Path

import fedda
from fedda import errors

EVENT = "%s: %s"  # the message of an event of `clients.node.resident`: its kind, and a sentence
EVENTS = "fedda.client.events"  # the logger of these alone
PLAIN_EVENTS = {"work", "done", "dropped"}  # a kind of request, a run's number and seconds only
KINDS = PLAIN_EVENTS | {"waiting", "connected", "lost", "back", "stopped", "refused", "failed"}
LINES = 400  # that are remembered
MOST_BYTES = 2**14  # of an answer
GAP = "…"
OWN = ("builtins", errors.__name__)  # modules whose classes of errors everybody knows
PUT_IN = re.compile(r"%(\(\w+\))?[-+ #0]*[\d*.]*[a-zA-Z]")
LEVELS = {level: logging.getLevelName(level) for level in (10, 20, 30, 40, 50)}
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
        level = LEVELS.get(record.levelno, "OTHER")  # a package may give levels names of its own
        with self._changes:
            self._lines.append(f"{clock} {level} {plain(record)}")

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
    if record.name == EVENTS and record.msg == EVENT and args and str(args[0]) in KINDS:
        return _event(*map(str, args))
    error = next((a for a in args if isinstance(a, BaseException)), None)
    error = error or (record.exc_info[1] if record.exc_info else None)
    text = str(record.msg)
    stands = (record.lineno, text) in _messages(record.pathname)
    words = PUT_IN.sub(GAP, text) if stands else GAP
    return " ".join(filter(None, [f"{place}:{record.lineno}", words, _error(error)]))


@cache
def _messages(file: str) -> frozenset[tuple[int, str]]:
    """The texts that calls in a file of code begin with, each at every line of its call."""
    try:
        code = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # only its compiled form is installed
        return frozenset()
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call) and node.args]
    return frozenset(
        (line, call.args[0].value)
        for call in calls
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
        for line in range(call.lineno, (call.end_lineno or call.lineno) + 1)
    )


def _event(kind: str, sentence: str) -> str:
    return f"{kind}: {sentence}" if kind in PLAIN_EVENTS else kind


def _error(error: BaseException | None) -> str:
    """An error's class, if it is fedda's or Python's own, and what the server is told of it."""
    if error is None:
        return ""
    known = next(kind for kind in type(error).__mro__ if kind.__module__ in OWN)
    return f"[{known.__name__}: {errors.code_of(error).public}]"


def _below(root: Path, file: str) -> str:
    """A file of fedda's code, below its folder; empty if it is none."""
    path = Path(file)
    return str(path.relative_to(root.parent)) if path.is_relative_to(root) else ""
