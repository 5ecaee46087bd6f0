"""What crosses the wire in short runs of each method, and the reviewed list of it, crossing.txt.

    python -m tests.crossed     writes crossing.txt anew

The list shows as a difference in review what a change lets cross.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedda import plugins
from fedda.config import LazyConfig
from tests.local_grid import SOURCES, Node, ScriptedGrid, make_domains, run, stop_after

LIST = Path(__file__).with_name("crossing.txt")
EXCHANGE = {
    f"exchange: {key}"
    for key in ("name", "certificate", "ticket", "port", "node", "wait", "rejoin")
}
EXCHANGE |= {f"exchange: {key}" for key in ("groups", *LazyConfig().flat())}

# Settings with which the first of two rounds is in a method's first phase.
FIRST_PHASE: dict[str, dict[str, Any]] = {
    "centring": {"centring.plain-share": 0.5},
    "comda": {"comda.epochs": 1},
    "decision": {"decision.epochs": 1},
    "dils": {"dils.pretrain": 1},
    "fada": {"fada.parts": "attention", "fada.weighting": "attention"},
    "fdan": {"fdan.scale": 0.0},
    "feddadil": {"feddadil.encoder-share": 0.5},
    "fruda": {"fruda.pretrain": 1},
    "shot": {"shot.epochs": 1},
}

# Per direction, role and request: arrays with their kinds, and names of numbers.
Crossings = dict[tuple[str, str, str], tuple[dict[str, str], set[str]]]


def seen(grid: ScriptedGrid) -> Crossings:
    """What crossed in a run, apart from questions; it must be equal for a role's sites."""
    found: Crossings = {}
    for c in grid.crossed:
        if c.kind != "query":
            key = (c.way, c.role, c.hop if c.hop in ("take", "refit") else c.kind)
            assert found.setdefault(key, (c.arrays, c.numbers)) == (c.arrays, c.numbers)
    return found


def whole(method: str, domains: list[Node], folder: Path) -> ScriptedGrid:
    """Do a run of one round, in the method's last phase."""
    grid = ScriptedGrid(domains)
    results, _ = run(domains, {"run.dir": str(folder), "method": method, "rounds": 1}, grid=grid)
    assert results["events"] == []
    return grid


def first_phase(method: str, domains: list[Node], folder: Path) -> ScriptedGrid:
    """Do one round of a method's first phase."""
    assert method in FIRST_PHASE, f"say here with what settings {method} begins with its first"
    grid, troubles = ScriptedGrid(domains), []
    settings = {"run.dir": str(folder), "method": method, "rounds": 2} | FIRST_PHASE[method]
    try:
        run(domains, settings, troubles.append, stop_after(1), grid=grid)
    except KeyboardInterrupt:
        assert "trouble" not in {event["event"] for event in troubles}
        return grid
    raise AssertionError("the run was to stop")


def lines(title: str, found: Crossings) -> str:
    """A paragraph of the list."""

    def told(arrays: Mapping[str, str], numbers: set[str]) -> Iterator[str]:
        yield from (n if n == k else f"{n} ({k})" for n, k in sorted(starred(arrays).items()))
        yield from sorted(starred(dict.fromkeys(numbers - EXCHANGE)))
        if numbers & EXCHANGE:
            yield "an invitation" if numbers >= EXCHANGE else "a part of an invitation"

    rows = [
        f"    {way} {role}, {request}: {', '.join(told(*content)) or 'nothing'}"
        for (way, role, request), content in sorted(found.items())
    ]
    return "\n".join([title, *rows])


def starred(names: Mapping[str, Any]) -> dict[str, Any]:
    """Write `NAME/*` for names that are there once for every source."""
    stems = {name.split("/")[0] for name in names if "/" in name}
    every = {s: {f"{s}/{site}" for site in SOURCES} for s in stems}
    short = {s: names[f"{s}/{SOURCES[0]}"] for s in stems if every[s] <= set(names)}
    gone = set().union(*(every[s] for s in short))
    return {n: v for n, v in names.items() if n not in gone} | {f"{s}/*": short[s] for s in short}


def titles(methods: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield title, method and run of each paragraph."""
    for method in methods:
        yield method, method, whole
        if plugins.method(method).phases[1:]:
            yield f"{method}, first phase", method, first_phase


def reviewed() -> dict[str, str]:
    """The paragraphs of the list, by title."""
    return {p.partition("\n")[0]: p for p in LIST.read_text().strip().split("\n\n")}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        domains = make_domains(Path(folder))
        made = [
            lines(title, seen(perform(method, domains, Path(folder, title))))
            for title, method, perform in titles(plugins.own_methods())
        ]
    LIST.write_text("\n\n".join(made) + "\n")


if __name__ == "__main__":
    main()
