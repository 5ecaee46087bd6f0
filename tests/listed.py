"""What may cross, read from the table that `fedda methods --wire` prints, and from nothing else.

The checks of the code under test are not used here, so that the two can be compared.
"""

import re
from dataclasses import dataclass, field
from functools import cache

from typer.testing import CliRunner

from fedda import cli

TABLES = {"answers", "answers-refined"}  # of whole numbers, by class
KINDS = {"model", "atoms", "statistics", "gradient"}
SITE = r"[^./][^/]{0,63}"  # what `*` stands for: the name of a site, which is printable, too


@dataclass
class Cell:
    """One cell of the table: arrays by name with their kind, and numbers."""

    arrays: dict[str, str] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, text: str) -> "Cell":
        cell = cls()
        for part in text.split("; "):
            if part == "nothing" or part.startswith("sums of gradients"):
                continue
            items = re.findall(r"`([^`]+)`(?: \((\w+)\))?", part)
            if all(kind or name in KINDS for name, kind in items):
                cell.arrays |= {name: kind or name for name, kind in items}
            else:
                cell.numbers |= {name for names, _ in items for name in names.split(", ")}
        return cell


def fits(name: str, pattern: str) -> bool:
    """Whether a name is the pattern's, with the name of a site for `*`."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", SITE), name)
    return found is not None and name.isprintable()


@cache
def table() -> dict[tuple[str, str, str], tuple[Cell, Cell]]:
    """What enters and leaves, by method, part and phase or hop as the table has them."""
    printed = CliRunner().invoke(cli.app, ["methods", "--wire"])
    assert printed.exit_code == 0, printed.output
    rows = [line.strip("| ").split(" | ") for line in printed.output.splitlines()]
    found = {}
    for methods, parts, when, enters, leaves in (row for row in rows if len(row) == 5):
        if methods in ("method", "---"):
            continue
        for method in methods.split(", "):
            for part in parts.split(", "):
                found[method, part, when] = (Cell.read(enters), Cell.read(leaves))
    return found


def cells(method: str, part: str, phase: str, hop: str) -> tuple[Cell, Cell]:
    """What enters and leaves in one kind of request, of whose names the table may have fewer.

    A phase with the same test as an earlier one has no row of its own for it.
    """
    known = table()
    for when in (hop, f"{phase}: {hop}", f"last round: {hop}"):
        if (found := known.get((method, part, when))) is not None:
            return found
    for (of, player, when), found in known.items():
        if hop == "test" and (of, player) == (method, part) and when.endswith(": test"):
            return found
    raise AssertionError((method, part, phase, hop))
