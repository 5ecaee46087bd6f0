"""The trainings of a comparison: each is run once, and its results are kept for the next time."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedda import plugins
from fedda.config.sections import Flat
from fedda.data import Reading, describe, leaks, state_of
from fedda.data.form import AS_IT_IS
from fedda.errors import DataError, RunError, reason
from fedda.files import put
from fedda.halves import REFERENCE, load
from fedda.results.read import REFINED, RESULTS, begun
from fedda.settings import RunConfig, defaults, lasting

from . import workers
from .cells import Cell, Notify
from .variants import Variant

CELLS = "cells"  # the folder of all cells, in OUT
SETTINGS, FACTS = "config.json", "cell.json"  # in a cell's folder: its settings, its notes
LABELS = "target-labels"  # the oracle's source
BENCHMARK = "benchmark.json"  # in a folder of data: how `fedda data import` made it
AUTO, RELAY = "auto", ".relay"  # a value, and what a key ends in, that a run settles by its sites
WITHOUT = "the last step averages FedAvg's model with the same seed, and that training failed"
_described = cache(describe)  # cached, as describing reads the header of every image


@dataclass(frozen=True)
class Score:
    """The results of a finished cell."""

    variant: str
    target: str
    seed: int
    # the accuracy after the last round; None if the target has no labelled tests
    last: float | None
    # likewise, after the round with the highest infomax, which needs no labels
    selected: float | None
    selected_round: int | None  # that round
    seconds: float
    bytes: int
    weights: Mapping[str, float]
    # whether the method trains on the very images, without their labels, on which the target is
    # tested
    transductive: bool = False
    oracle: bool = False  # whether it was trained on the target's labels
    refined: float | None = None  # the accuracy of the model that the target's last step has made


@dataclass(frozen=True)
class Plan:
    """All cells of a comparison.

    Args:
        data: a folder with one folder or `.npz` per domain.
        out: the folder of all results.
        variants: what is compared.
        targets: the domains to adapt to, one per cell; all other domains are its sources.
        seeds: every variant is trained with each.
        settings: flat settings that all variants share; a variant's own override them.
        poison: percent of flipped labels by source, for all variants.
        engine: `process`, or `ray` for Flower's simulation engine.
        threads: CPU threads of a training.
        reading: which split of the files every site trains on, and how gray ones are read.
        device: of the trainings: auto, cpu or cuda:N.
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
    reading: Reading = AS_IT_IS
    device: str = "auto"

    def cells(self) -> list[Cell]:
        """All cells, seed by seed."""
        every = (Cell(v, t, s) for s in self.seeds for t in self.targets for v in self.variants)
        return list(dict.fromkeys(every))

    def source_only(self, cell: Cell) -> Cell | None:
        """The FedAvg training whose model a target's last step averages, too, as in a run's."""
        variant = cell.variant.source_only
        refines = self.settings.get("run.refine") != "none"
        return None if variant is None or not refines else replace(cell, variant=variant)

    def trainings(self) -> list[Cell]:
        """The source-only trainings that the cells need, then all other cells.

        A cell that is one of them stands for it, whatever its label.
        """
        cells = self.cells()
        first = [base for cell in cells if (base := self.source_only(cell)) is not None]
        return [*{cell.name: cell for cell in [*first, *cells]}.values()]

    def config(self, cell: Cell) -> RunConfig:
        """The settings of one cell's run.

        Raises:
            ConfigError: its settings contradict each other.
        """
        own = {
            "run.name": cell.name,
            "run.dir": str(self.out / CELLS),
            "run.seeds": str(cell.seed),
            "run.baseline": "",
            "track.tensorboard": False,  # its files would be removed with the checkpoints
        }
        others = tuple(f"{m}." for m in plugins.methods() if m != cell.variant.method)
        shared = {k: v for k, v in self.settings.items() if not k.startswith(others)}
        return RunConfig.parse({**shared, **cell.variant.flat(), **own})

    def sites(self, cell: Cell) -> list[dict[str, Any]]:
        """The sites of one cell.

        Raises:
            RunError: the data have no such target, or no such site to poison.
        """
        poison = {
            site: percent
            for site, percent in {**self.poison, **cell.variant.poison}.items()
            if site != cell.target and site not in cell.variant.without
        }
        local = load("server", "simulation")
        sites = local.folders(self.data, cell.target, poison, self.threads, self.reading)
        own = {"notes": False} | self.reading.flat()
        own |= {} if self.device == "auto" else {"device": self.device}
        if (base := self.source_only(cell)) is not None:
            kept = f"{base.training}.{REFINED}.safetensors"
            place = self.folder(base).absolute() / local.SITES / cell.target / kept
            of_target = {"source-only": str(place)}
            sites = [s | of_target if s["role"] == "target" else s for s in sites]
        if cell.variant.oracle:
            sites = [site for site in sites if site["name"] == cell.target]
            sites = [{**site, "role": "source", "name": LABELS} for site in sites] + sites
        return [{**site, **own} for site in sites if site["name"] not in cell.variant.without]

    def where(self, target: str) -> list[str]:
        """The options of `fedda run` for these sites."""
        return ["--simulate", str(self.data), "--target", target, *self.reading.words]

    def folder(self, cell: Cell) -> Path:
        """Where a cell's run is kept."""
        return self.out / CELLS / cell.name

    def results(self, cell: Cell) -> dict[str, Any] | None:
        """A cell's results, or None if it has not finished.

        Raises:
            RunError: the cell was run with other settings, or its results cannot be read.
        """
        results = _read(self.folder(cell) / RESULTS)
        if results is not None:
            self._check_settings(cell, results.get("config"))
        return results

    def _check_settings(self, cell: Cell, flat: Any) -> None:
        """Refuse to go on if a cell's folder is of a run with the other settings `flat`."""
        if not isinstance(flat, dict):
            raise RunError(f"{self.folder(cell)} is damaged; remove it.")
        methods = [cell.variant.method]
        wanted, used = (lasting(f, methods) for f in (self.config(cell).flat(), flat))
        # A run settles by what its sites can do whether models are sealed (`RunConfig.hiding`).
        auto = {k for k, v in wanted.items() if v == AUTO and k.endswith(RELAY)}
        wanted |= {k: used[k] for k in auto if k in used}
        usual = defaults()  # an older version's results lack the settings added since
        self._check_same(cell, wanted, {k: used.get(k, usual.get(k)) for k in {*wanted, *used}})

    def _check_same(self, cell: Cell, wanted: Mapping[str, Any], used: Mapping[str, Any]) -> None:
        for key in sorted({*wanted, *used}):
            if wanted.get(key) != used.get(key):
                raise RunError(
                    f"{self.folder(cell)} was run with {key} {used.get(key)!r}, not "
                    f"{wanted.get(key)!r}; choose another --out, or remove that folder."
                )

    def note(self, cell: Cell, sites: Sequence[Mapping[str, Any]]) -> None:
        """Save what a cell is trained with beyond its settings: sites, poison, threads, engine."""
        how = {"threads": self.threads, "engine": self.engine}
        about = _about(sites, self.reading, state_of) | how
        put(self.folder(cell) / FACTS, json.dumps(about))

    def noted(self, cell: Cell) -> dict[str, Any]:
        """What `note` saved for a cell; empty if it saved nothing."""
        return _read(self.folder(cell) / FACTS) or {}

    def untested(self) -> list[str]:
        """The targets of unfinished cells that have no labelled tests."""
        open_cells = {c.target: c for c in self.cells() if self.results(c) is None}
        targets = [
            site for c in open_cells.values() for site in self.sites(c) if site["role"] == "target"
        ]
        described = {s["name"]: _described(s["data"], "target", self.reading) for s in targets}
        return [s["name"] for s in targets if not described[s["name"]].test]

    def leaks(self) -> list[str]:
        """What `fedda.data.leaks` says of unfinished cells; they may be meant to test so."""
        able = (c for c in self.cells() if not c.variant.oracle and self.results(c) is None)
        cells = {} if self.tests_on_training else {c.target: c for c in able}
        return [text for cell in cells.values() for text in leaks(self.sites(cell))]

    def scores(self) -> list[Score]:
        """The scores of the finished cells."""
        scores = []
        for cell in self.cells():
            results = self.results(cell)
            if results is None:
                continue
            (training,) = results["trainings"][cell.variant.method]
            scores.append(
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
                    self.tests_on_training and plugins.method(cell.variant.method).adapts,
                    oracle=cell.variant.oracle,
                    refined=(training.get(REFINED) or {}).get("accuracy"),
                )
            )
        return scores

    @property
    def tests_on_training(self) -> bool:
        """Whether the data's benchmark.json, if any, says that all images are also tested on."""
        try:
            record = json.loads((self.data / BENCHMARK).read_text())
            return record["options"]["transductive"] is True
        except (OSError, ValueError, LookupError, TypeError):
            return False  # not from `fedda data import`, or of a benchmark with a split

    def begin(self) -> None:
        """Make the folder OUT, or check that the comparison in it is of the same data.

        Raises:
            RunError: it is of other data, or OUT cannot be written.
        """
        path, wanted = self.out / "comparison.json", {"data": str(self.data.resolve())}
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                present = json.loads(path.read_text())
                if present != wanted:
                    raise RunError(
                        f"{self.out} compares methods on {present['data']}, not on "
                        f"{wanted['data']}; choose another --out."
                    )
            else:
                put(path, json.dumps(wanted))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.out} cannot be used ({reason(error)}); choose another --out."
            ) from None

    def check(self) -> None:
        """Find, before the first training, whatever would make one of them fail.

        Raises:
            ConfigError: settings contradict each other.
            DataError: a domain cannot be read, or a source has no labels.
            RosterError: the domains cannot form a run, for example because their classes differ.
            RunError: the data have no such sites, or OUT holds other trainings.
        """
        self.check_variants()
        state = cache(state_of)
        if self.tests_on_training and any(v.oracle for v in self.variants):
            raise RunError(
                f"{self.data} tests on all training examples, and an oracle has learnt their "
                "labels by heart; leave out --oracle, or import the data without --transductive."
            )
        for cell in self.trainings():
            sites = self.sites(cell)
            if cell.variant.oracle:
                self._check_labels(sites[0])
            if begun(self.folder(cell)):
                wanted, used = _about(sites, self.reading, state), self.noted(cell)
                files = wanted.pop("files")
                self._check_same(cell, wanted, {k: used.get(k, v) for k, v in wanted.items()})
                before = files | used.get("files", {})
                if odd := [n for n, now in files.items() if before[n] != now]:
                    raise RunError(
                        f"The data of {', '.join(odd)} have changed since {self.folder(cell)} was "
                        "begun; choose another --out, or remove that folder."
                    )
                self._check_settings(cell, _read(self.folder(cell) / SETTINGS))
            if self.results(cell) is None:
                load("server", "simulation").rehearse(self.config(cell), sites, _described)

    def check_variants(self) -> None:
        """Refuse variants that cannot be told apart.

        Raises:
            RunError: two have one name, or are the same training.
        """
        names = Counter(v.name for v in dict.fromkeys(self.variants))
        if same := next((n for n, count in names.items() if count > 1), None):
            raise RunError(f"Two variants are called '{same}'; give one of them another label.")
        slugs = Counter(v.slug for v in dict.fromkeys(self.variants))
        if same := next((v.name for v in self.variants if slugs[v.slug] > 1), None):
            raise RunError(f"Two variants are the same training as '{same}'; leave out one.")

    def _check_labels(self, site: Mapping[str, Any]) -> None:
        """Refuse an oracle whose target has no labels to train on."""
        try:
            _described(site["data"], "source", self.reading)
        except DataError as error:
            raise RunError(
                f"--oracle trains on the labels of the target's training examples: {error}"
            ) from None

    def run(self, jobs: int, notify: Notify) -> dict[Cell, str]:
        """Train the unfinished cells -> errors by cell; a failed cell does not stop the others.

        Args:
            jobs: trainings at a time, each in a process of its own if more than one.
            notify: called when a training begins, after every round and at the end.

        Raises:
            FeddaError: as for `check`, or a process cannot be started.
        """
        if jobs > 1 and self.engine == "ray":
            raise RunError("Flower's simulation uses all cores by itself; give --jobs 1 with it.")
        self.check()
        self.begin()
        failed: dict[Cell, str] = {}

        def listen(what: str, cell: Cell, value: Any) -> None:
            if what == "done" and value is not None:
                failed[cell] = value
            notify(what, cell, value)

        todo = [cell for cell in self.trainings() if self.results(cell) is None]
        first = [cell for cell in todo if cell.variant.method == REFERENCE]
        self.execute(first, jobs, listen)
        able = []
        for cell in (cell for cell in todo if cell not in first):
            base = self.source_only(cell)
            if base is None or self.results(base) is not None:
                able.append(cell)
            else:
                listen("done", cell, WITHOUT)
        self.execute(able, jobs, listen)
        return failed

    def execute(self, cells: Sequence[Cell], jobs: int, notify: Notify) -> None:
        """Train cells, and tell of each, also when it is done."""
        # Flower allows one simulation per process, so each gets a process of its own.
        if jobs == 1 and self.engine == "process":
            for cell in cells:
                workers.train(self, cell, notify)
        elif cells:
            workers.in_parallel(self, cells, min(jobs, len(cells)), notify)


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file does not exist."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({reason(error)}); remove {path.parent}.") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged; remove {path.parent}.")
    return content


def _about(
    sites: Sequence[Mapping[str, Any]], reading: Reading, state: Callable[[Path], str]
) -> dict[str, Any]:
    """The sites' names and files, how these are read, and the percent of wrong labels if any."""
    poison = {s["name"]: s["poison"] for s in sites if s["poison"]}
    files = {s["name"]: state(Path(s["data"])) for s in sites}
    return {"sites": [*files], "poison": poison, "files": files} | reading.flat()
