"""What a label is, for files of every kind and for the library: the name of one class.

    "cat", 3, 3.0             the classes cat, 3 and 3
    "", NaN, None, -1, "n/a"  no label: refused, with the row
    ["a", "b"], "a|b", "a;b"  several: refused
    0.25                      a measurement: refused
    b"cat"                    as text

Names that mean the same number, such as 1 and 01, are refused, as one class would be two. Of two
sets, such as training and test, only the names are comparable: every set may number its own.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

from fedda.config.inputs import WHOLE, plain
from fedda.errors import DataError

NOTHING = frozenset({"nan", "null", "none", "na", "n/a", "<na>", "#n/a", "nat", "?", "-"})
_NONE = NOTHING | {"inf", "-inf", "unlabeled", "unlabelled"}
_NEGATIVE = re.compile(r"-\d+(\.0*)?")
_FRACTION = re.compile(r"-?\d*\.\d*[1-9]\d*")
_SEVERAL = re.compile(r".*[|;].*|\[.*,.*\]|\{.*\}|\(.*,.*\)", re.DOTALL)
_JOINED = re.compile(r"[,+&/]")
_BRIEF = 2**14  # letters of all names of columns that travel with each request
LETTERS = 256  # of one, and of a class

_NO_ONE = "which means that there is none: fill it, or remove the example"
_ONE = "one class per example is needed"
_MANY = f"which means several: {_ONE}"


def fault(name: str) -> str:
    """Why a text is the name of no class, as the rest of a sentence; empty if it is one."""
    text = name.strip()
    if text.lower() in _NONE or _NEGATIVE.fullmatch(text):
        return f"{_NO_ONE}, or rename it if it is a class"
    if _SEVERAL.fullmatch(text):
        return _MANY
    if not name.isprintable():
        return "which is not one line of plain text (UTF-8): rename it"
    return ""


def names(
    values: Sequence[Any], whose: object, at: Callable[[int], str] = lambda i: f"row {i + 1}"
) -> list[str]:
    """The classes' names of labels as a table or a program has them.

    Args:
        values: the labels.
        whose: the table or argument, for messages.
        at: where in it the label of an index is.

    Raises:
        DataError: one of them names no class, or two would name one class twice.
    """
    found, known = [], dict[str, str]()  # each different one is looked at, and in memory, once
    for i, value in enumerate(values):
        text = _text(value)
        if not text:
            raise DataError(f"{whose} has no label in {at(i)}: fill or remove it")
        why = "" if text in known else fault(text)
        if _FRACTION.fullmatch(text):
            why = "a measurement: give whole numbers, or names"
        if why := why or (_MANY if is_several(value) else ""):
            raise DataError(f"{whose} has the label {quoted(text)} in {at(i)}, {why}")
        found.append(known.setdefault(text, text))
    if all(map(WHOLE.fullmatch, known)):  # of a column with gaps, 1 is written as 1.0
        known = {text: text.partition(".")[0] for text in known}
        found = [known[text] for text in found]
    known = dict.fromkeys(found)
    for text in known:
        parts = [part.strip() for part in _JOINED.split(text)]
        if len(parts) > 1 and all(part in known for part in parts):
            its = f"the label {quoted(text)} in {at(found.index(text))}"
            raise DataError(f"{whose} has {its}, whose parts are classes, too: {_ONE}")
    _check_alike(known, whose)
    return found


def check(names: Iterable[str], whose: object) -> None:
    """Check names of classes, as folders or a list of names give them.

    Raises:
        DataError: one is the name of no class, or two mean the same number.
    """
    names = list(names)
    for name in names:
        if why := fault(name) if name.strip() else "which is empty: give it a name":
            raise DataError(f"{whose} has the class {quoted(name)}, {why}")
    _check_alike(names, whose)


def united(of: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The classes of several sites, by name: numbers in their order, then names in theirs.

    Sites that have the same classes in one order keep it.

    Raises:
        DataError: two sites call one class differently, in case, spaces or digits; or one numbers
            its classes and another names them.
    """
    lists = list(dict.fromkeys(tuple(classes) for classes in of.values()))
    every = {name: site for site, classes in of.items() for name in classes}
    if len(lists) == 1:
        return lists[0]
    seen: dict[str, str] = {}
    for name, site in every.items():
        other = seen.setdefault(plain(name), name)
        if other != name:
            raise DataError(
                f"{every[other]} has the class {quoted(other)} and {site} {quoted(name)}: give "
                f"both the same name if they are one class, else names that differ in more than "
                f"case, spaces or zeros"
            )
    numbered = {site: all(n.isdecimal() for n in classes) for site, classes in of.items()}
    if len(set(numbered.values())) > 1:
        number, name = (next(s for s in numbered if numbered[s] is kind) for kind in (True, False))
        raise DataError(f"{number} numbers its classes and {name} names them: do the same at both")
    return tuple(sorted(every, key=lambda n: (not n.isdecimal(), int(n) if n.isdecimal() else n)))


def brief(columns: Sequence[str]) -> tuple[str, ...]:
    """Names of columns as sites compare them: if they are no such names, one digest of all.

    Names are different, one line of plain text each, and not so many that requests grow by them.
    """
    whole = "\n".join(columns)
    if all(map(is_one_line, columns)) and len(whole) <= _BRIEF and len({*columns}) == len(columns):
        return tuple(columns)
    digest = hashlib.sha256(whole.encode(errors="surrogateescape")).hexdigest()
    return (f"{len(columns)} columns with the SHA-256 {digest[:16]}",)


def can_be_brief(columns: Sequence[str], d: int) -> bool:
    """Whether names can be `brief`'s of d columns, or none; a site may send any."""
    return len(columns) in {0, min(d, 1), d} and brief(columns) == tuple(columns)


def unlike(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """How names of columns differ from others', as the rest of "mine has"; empty if they do not."""
    if tuple(mine) == tuple(theirs):
        return ""
    known = {*mine}, {*theirs}
    own, other = ([c for c in a if c not in b] for a, b in ((mine, known[1]), (theirs, known[0])))
    some = partial(listed, most=12, show=quoted)
    if not own and not other:
        return f"the columns in another order: {some(mine)}, not {some(theirs)}"
    more = f"the columns {some(own)}" if own else "no further columns"
    return f"{more}{f', and lacks {some(other)}' if other else ''}"


def is_one_line(name: str) -> bool:
    """Whether a name of a class or a column is one line of plain text, and not long."""
    return 0 < len(name) <= LETTERS and name.isprintable()


def is_several(value: Any) -> bool:
    """Whether a label is a list or the like."""
    return not isinstance(value, str | bytes) and hasattr(value, "__len__")


def escaped(name: str) -> str:
    """A name in one line: what is no plain text becomes escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def option(setting: str, value: str) -> str:
    """A setting as an option that somebody may paste into a shell, whoever chose its value."""
    text = f"{setting}={escaped(value)}"
    return "-c '" + text.replace("'", "'\"'\"'") + "'"


def quoted(name: str) -> str:
    """The beginning of a name for a message."""
    return f"'{escaped(name[:60])}'"


def listed(names: Sequence[str], most: int = 5, show: Callable[[str], str] = escaped) -> str:
    """The first few of `names`, for a message, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(show, names[:most])) + more


def _text(value: Any) -> str:
    """A label as text; empty if there is none."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape").strip()
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return ""
    if isinstance(value, Real) and not isinstance(value, Integral):
        number = float(value)
        return "" if math.isnan(number) else f"{number:.0f}" if number % 1 == 0 else str(number)
    return str(value).strip()


def _check_alike(names: Iterable[str], whose: object) -> None:
    """Refuse names of one and the same number."""
    numbers: dict[str, str] = {}
    for name in names:
        other = numbers.setdefault(plain(name), name) if WHOLE.fullmatch(name) else name
        if other != name:
            raise DataError(
                f"{whose} has the labels {other!r} and {name!r}, which are one number: write them "
                f"alike"
            )
