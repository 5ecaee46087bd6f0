"""What each test costs in seconds of wall clock and of processors, and the table that says so.

    make test-times     runs all rings and writes the table of tests/README.md

The processors' seconds count the test's own process and all that it started, dead or alive.
"""

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .rings import RINGS, ring_of

TABLE = Path(__file__).parent / "README.md"
TICKS = os.sysconf("SC_CLK_TCK")
DEAREST = 20  # tests that are listed one by one
HEAD = "| file | tests | fast | gate | nightly | seconds | processor |"
SPENT, RING = "processor", "ring"  # what a test's reports say of it


def processor_seconds() -> float:
    """Seconds that this process and all its descendants have computed so far."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    alive = sum(map(_ticks, _descendants(os.getpid())))
    return sum(each.ru_utime + each.ru_stime for each in ended) + alive / TICKS


def _descendants(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):  # nothing where there is no /proc
        try:
            children = [int(child) for child in file.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield child
            yield from _descendants(child)


def _ticks(pid: int) -> int:
    """What a process, and those of its children that have ended, have computed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0
    return sum(map(int, fields[11:15]))


class Meter:
    """Notes at each of a test's reports what was computed since the report before."""

    def __init__(self) -> None:
        self._before = processor_seconds()

    def note(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Add to a report, which xdist carries to the process that prints."""
        now = processor_seconds()
        report.user_properties.append((SPENT, now - self._before))
        report.user_properties.append((RING, ring_of(item)))
        self._before = now


@dataclass
class Cost:
    """What one test took."""

    ring: str = "fast"
    seconds: float = 0.0
    processor: float = 0.0


@dataclass
class Row:
    """What the tests of one file took."""

    count: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    of_ring: dict[str, float] = field(default_factory=dict)


def costs(reports: Iterable[Any]) -> dict[str, Cost]:
    """Add up the reports of setup, call and teardown -> by the test's id."""
    found: dict[str, Cost] = {}
    for report in reports:
        if isinstance(report, pytest.TestReport):
            cost = found.setdefault(report.nodeid, Cost())
            said: dict[str, Any] = dict(report.user_properties)
            cost.seconds += report.duration
            cost.processor += said.get(SPENT, 0.0)
            cost.ring = said.get(RING, cost.ring)
    return found


def write(found: Mapping[str, Cost]) -> None:
    """Write the table, dearest files first, and the dearest tests."""
    model = next(
        (x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    about = f"Measured with {os.cpu_count()} cores ({model.partition(': ')[2] or 'unknown'})."
    rows: dict[str, Row] = {}
    for name, cost in found.items():
        row = rows.setdefault(name.partition("::")[0].rpartition("/")[2], Row())
        row.count += 1
        row.seconds += cost.seconds
        row.processor += cost.processor
        row.of_ring[cost.ring] = row.of_ring.get(cost.ring, 0.0) + cost.seconds
    lines = [HEAD, "| --- |" + " ---: |" * (HEAD.count("|") - 2)]
    for name, row in [("all", _sum(rows.values())), *_dearest(rows)]:
        rings = " | ".join(f"{row.of_ring[r]:.1f}" if r in row.of_ring else "" for r in RINGS)
        lines.append(
            f"| {name} | {row.count} | {rings} | {row.seconds:.1f} | {row.processor:.1f} |"
        )
    lines += ["", "| test | ring | seconds | processor |", "| --- | --- | ---: | ---: |"]
    for name, cost in _dearest(found)[:DEAREST]:
        short = name.rpartition("/")[2].replace("|", "\\|")
        lines.append(f"| `{short}` | {cost.ring} | {cost.seconds:.1f} | {cost.processor:.1f} |")
    text = TABLE.read_text().partition("Measured ")[0].rstrip()
    TABLE.write_text("\n".join([text, "", about, "", *lines, ""]))


def _sum(rows: Iterable[Row]) -> Row:
    total = Row()
    for row in rows:
        total.count += row.count
        total.seconds += row.seconds
        total.processor += row.processor
        for ring, seconds in row.of_ring.items():
            total.of_ring[ring] = total.of_ring.get(ring, 0.0) + seconds
    return total


def _dearest(costly: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(costly.items(), key=lambda item: -item[1].seconds)


def seconds_by_file() -> dict[str, float]:
    """What the table says of each file's seconds, nightly ones aside; nothing without a table."""
    found: dict[str, float] = {}
    if TABLE.exists():
        for line in TABLE.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == HEAD.count("|") - 1 and cells[0].startswith("test_"):
                found[cells[0]] = float(cells[2] or 0) + float(cells[3] or 0)
    return found
