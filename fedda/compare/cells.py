"""The trainings of a comparison: run once each, several at a time, and kept for the next time."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedda.config import Flat, RunConfig, defaults, lasting, methods
from fedda.data import describe
from fedda.errors import RunError
from fedda.folders import load
from fedda.results import RESULTS, begun

from . import workers
from .variants import Variant
from .workers import Notify

CELLS = "cells"  # in OUT
BEGUN, CELL = "config.json", "cell.json"  # in a cell's folder: its run's settings, and the rest
_described = cache(describe)  # which reads the header of every image


@dataclass(frozen=True)
class Cell:
    """One training: a variant, a target and a seed."""

    variant: Variant
    target: str
    seed: int

    @property
    def name(self) -> str:
        """Of its run, and of its folder."""
        return f"{self.variant.slug}.{_plain(self.target)}.{self.seed}"


@dataclass(frozen=True)
class Score:
    """What a finished cell found. Accuracies are None where the target brought no tests."""

    variant: str
    target: str
    seed: int
    last: float | None  # accuracy after the last round
    selected: float | None  # of the round with the highest infomax, chosen without labels
    selected_round: int | None
    seconds: float
    bytes: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """All cells of a comparison.

    Args:
        data: a folder with one folder or `.npz` per domain.
        out: where everything is kept.
        variants: what is compared.
        targets: each takes a turn, the other domains are its sources.
        seeds: of every variant.
        settings: flat settings that all variants share; a variant's own win.
        poison: percent of flipped labels by source, for all variants.
        engine: `process`, or `ray` for Flower's simulation engine.
        threads: CPU threads of a training.
    """

    data: Path
    out: Path
    variants: Sequence[Variant]
    targets: Sequence[str]
    seeds: Sequence[int]
    settings: Flat = field(default_factory=dict)
    poison: Mapping[str, float] = field(default_factory=dict)
    engine: Literal["process", "ray"] = "process"
    threads: int = 1

    def cells(self) -> list[Cell]:
        """Seed by seed, so that an interrupted comparison holds whole tables of fewer seeds."""
        found = (Cell(v, t, s) for s in self.seeds for t in self.targets for v in self.variants)
        return list(dict.fromkeys(found))

    def config(self, cell: Cell) -> RunConfig:
        """The run of one cell.

        Raises:
            ConfigError: its settings contradict each other.
        """
        own = {
            "run.name": cell.name,
            "run.dir": str(self.out / CELLS),
            "run.seeds": str(cell.seed),
            "run.baseline": "",
            "track.tensorboard": False,  # its files would lie among those that are removed
        }
        others = tuple(f"{m}." for m in methods() if m != cell.variant.method)
        shared = {k: v for k, v in self.settings.items() if not k.startswith(others)}
        return RunConfig.parse({**shared, **cell.variant.flat(), **own})

    def sites(self, cell: Cell) -> list[dict[str, Any]]:
        """The sites of one cell.

        Raises:
            RunError: the data has no such target, or a poisoned site is not there.
        """
        poison = {
            site: percent
            for site, percent in {**self.poison, **cell.variant.poison}.items()
            if site != cell.target and site not in cell.variant.without
        }
        found = load("server", "local").folders(self.data, cell.target, poison, self.threads)
        return [
            {**site, "notes": False} for site in found if site["name"] not in cell.variant.without
        ]

    def folder(self, cell: Cell) -> Path:
        """Where a cell's run is kept."""
        return self.out / CELLS / cell.name

    def results(self, cell: Cell) -> dict[str, Any] | None:
        """What a cell found, or None if it has not finished.

        Raises:
            RunError: it was run with other settings, or cannot be read.
        """
        found = _read(self.folder(cell) / RESULTS)
        if found is not None:
            self._same_settings(cell, found.get("config"))
        return found

    def _same_settings(self, cell: Cell, flat: Any) -> None:
        if not isinstance(flat, dict):
            raise RunError(f"{self.folder(cell)} is damaged; remove it.")
        trained = [cell.variant.method]
        mine, theirs = (lasting(f, trained) for f in (self.config(cell).flat(), flat))
        usual = defaults()  # an older version's results lack what has come since
        self._same(cell, mine, {k: theirs.get(k, usual.get(k)) for k in {*mine, *theirs}})

    def _same(self, cell: Cell, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                raise RunError(
                    f"{self.folder(cell)} was run with {key} {theirs.get(key)!r}, not "
                    f"{mine.get(key)!r}; choose another --out, or remove that folder."
                )

    def note(self, cell: Cell, sites: Sequence[Mapping[str, Any]]) -> None:
        """Keep what a cell is trained with that its settings do not say."""
        about = _about(sites) | {"threads": self.threads, "engine": self.engine}
        (self.folder(cell) / CELL).write_text(json.dumps(about))

    def noted(self, cell: Cell) -> dict[str, Any]:
        """What `note` kept; nothing if there is none."""
        return _read(self.folder(cell) / CELL) or {}

    def untested(self) -> list[str]:
        """Targets without labelled tests, among those that are still to be trained for."""
        open_cells = {c.target: c for c in self.cells() if self.results(c) is None}
        found = [
            site for c in open_cells.values() for site in self.sites(c) if site["role"] == "target"
        ]
        return [s["name"] for s in found if not _described(s["data"], "target").test]

    def scores(self) -> list[Score]:
        """Those of the finished cells."""
        found = []
        for cell in self.cells():
            results = self.results(cell)
            if results is None:
                continue
            (training,) = results["trainings"][cell.variant.method]
            found.append(
                Score(
                    cell.variant.name,
                    cell.target,
                    cell.seed,
                    training["final_accuracy"],
                    training["selected_accuracy"],
                    training["selected_round"],
                    training["seconds"],
                    sum(training["bytes"].values()),
                    training["rounds"][-1].get("weights", {}),
                )
            )
        return found

    def begin(self) -> None:
        """Make the folder, or check that what it holds was made from the same data.

        Raises:
            RunError: it was made from other data, or cannot be written.
        """
        path, mine = self.out / "comparison.json", {"data": str(self.data.resolve())}
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                theirs = json.loads(path.read_text())
                if theirs != mine:
                    raise RunError(
                        f"{self.out} compares methods on {theirs['data']}, not on "
                        f"{mine['data']}; choose another --out."
                    )
            else:
                path.write_text(json.dumps(mine))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{self.out} cannot be used ({error}); choose another --out.") from None

    def check(self) -> None:
        """Find before the first training what would end the last.

        Raises:
            ConfigError: settings contradict each other.
            DataError: a domain cannot be read, or as a source has no labels.
            RosterError: the domains make no run, for example because their classes differ.
            RunError: the data has no such sites, or the folder holds other trainings.
        """
        names = Counter(v.name for v in dict.fromkeys(self.variants))
        if twice := next((n for n, count in names.items() if count > 1), None):
            raise RunError(f"Two variants are called '{twice}'; give one of them another label.")
        slugs = Counter(v.slug for v in dict.fromkeys(self.variants))
        if twice := next((v.name for v in self.variants if slugs[v.slug] > 1), None):
            raise RunError(f"Two variants are the same training as '{twice}'; leave out one.")
        for cell in self.cells():
            sites = self.sites(cell)
            if begun(self.folder(cell)):
                mine, theirs = _about(sites), self.noted(cell)
                self._same(cell, mine, {k: theirs.get(k, v) for k, v in mine.items()})
                self._same_settings(cell, _read(self.folder(cell) / BEGUN))
            if self.results(cell) is None:
                load("server", "local").rehearse(self.config(cell), sites, _described)

    def run(self, jobs: int, notify: Notify) -> dict[Cell, str]:
        """Train what is missing -> what went wrong, by cell; the other cells go on.

        Args:
            jobs: trainings at a time, each in a process of its own if more than one.
            notify: told of every begin, round and end.

        Raises:
            FeddaError: as `check`, or a process cannot be started.
        """
        if jobs > 1 and self.engine == "ray":
            raise RunError("Flower's simulation uses all cores by itself; give --jobs 1 with it.")
        self.check()
        self.begin()
        open_cells = [cell for cell in self.cells() if self.results(cell) is None]
        failed: dict[Cell, str] = {}

        def note(what: str, cell: Cell, value: Any) -> None:
            if what == "done" and value is not None:
                failed[cell] = value
            notify(what, cell, value)

        # Flower knows one simulation per process, so that each has one of its own.
        if jobs == 1 and self.engine == "process":
            for cell in open_cells:
                workers.train(self, cell, note)
        elif open_cells:
            workers.in_parallel(self, open_cells, min(jobs, len(open_cells)), note)
        return failed


def _read(path: Path) -> dict[str, Any] | None:
    """A file of JSON, None if it is not there."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); remove {path.parent}.") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged; remove {path.parent}.")
    return found


def domains(data: Path) -> list[str]:
    """The names of a folder's domains.

    Raises:
        RunError: it is not there.
    """
    if not data.is_dir():
        raise RunError(f"{data} is not a folder; give one that holds a folder per domain.")
    names = [
        path.stem if path.suffix == ".npz" else path.name
        for path in sorted(data.iterdir())
        if path.suffix == ".npz" or path.is_dir()
    ]
    return [n for n in dict.fromkeys(names) if not n.startswith(".")]


def _about(sites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    poison = {s["name"]: s["poison"] for s in sites if s["poison"]}
    return {"sites": [s["name"] for s in sites], "poison": poison}


def _plain(name: str) -> str:
    """A domain's name as a part of a run's, the same if it can be one."""
    plain = re.sub(r"[^\w.-]", "-", name)
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return name if plain == name else f"{plain}-{digest}"
