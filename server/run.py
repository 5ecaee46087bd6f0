"""A run: the method and its baseline, each with every seed, and the results in one file."""

import fcntl
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.serverapp import Grid

from fedda import __version__, plugins
from fedda.errors import RunError
from fedda.models import Meta
from fedda.results.read import begun
from fedda.settings import RunConfig, defaults, lasting

from . import checkpoint
from .attendance import OF_SOURCES, Sites
from .journal import Journal
from .rehearsal import rehearse
from .start import MODEL, check_start, start_of
from .strategy_modules import roster
from .tracking.curves import Tracking
from .training import Training, task_for

RESULTS, CONFIG, ROSTER, LOCK = "results.json", "config.json", "roster.json", ".lock"
LEAVE = 15.0  # seconds that a run which was stopped may need to end


class GoingOnError(RunError):
    """Another process works on the run."""


def execute(
    config: RunConfig, grid: Grid, journal: Journal, slots: Callable[[], int] | None = None
) -> dict[str, Any]:
    """Run everything the configuration names, resuming what was begun -> results.json's content.

    Args:
        config: the run.
        grid: the way to the sites.
        journal: told what happens.
        slots: how many sites a simulation lets work at the same time; by default any number.

    Raises:
        ConfigError: a tracker is asked for that is not installed, a method cannot do with these
            sites what it is there for, or the model to start from does not fit.
        ModelError: the model to start from cannot be read.
        RosterError: the sites that joined make no run.
        QuorumError: too few sites, for too long.
        RunError: the run's folder holds a run of other settings or one that is going on, or cannot
            be written.
    """
    folder = Path(config.run.dir) / config.run.name
    with Tracking(config, folder, journal) as tracking, alone(folder):
        claim(folder, config)
        return _train(config, grid, journal, folder, tracking, slots)


def _train(
    config: RunConfig,
    grid: Grid,
    journal: Journal,
    folder: Path,
    tracking: Tracking,
    slots: Callable[[], int] | None,
) -> dict[str, Any]:
    sites = Sites(grid, config, journal)
    who = meet(folder, config, sites, journal)
    aims = who.aims(config.run.target)
    targets = [aim.target.name for aim in aims]
    journal.write(
        "roster",
        sites=[str(n) for n in who.nodes],
        shape=list(who.shape),
        classes=who.classes,
        targets=targets,
    )
    for method, aim in product(config.trainings, aims):
        together = rehearse(config, method, aim)
        if together and slots and (found := slots()) < together:
            raise RunError(
                f"{method} sums gradients of {together} sites that work at the same time, but this "
                f"simulation has room for {found}, one per CPU; give --engine process, which needs "
                f"one CPU only, or use a machine with {together} CPUs."
            )
    trainings: dict[str, list[dict[str, Any]]] = {m: [] for m in config.trainings}
    for seed, target, method in product(config.seeds, targets, config.trainings):
        (aim,) = who.aims(target)
        training = Training(
            *(config, method, seed),
            grid=grid,
            sites=sites,
            who=aim,
            folder=folder,
            journal=journal,
        )
        found = training.run()
        tracking.finished(found)
        trainings[method].append(found)
        who = who.taking(training.roster)  # a site may be back under another node id
    results = summarise(config, who, trainings, journal)
    checkpoint.replace(folder / RESULTS, json.dumps(results, indent=1).encode())
    if len(targets) == 1:  # else there is a model per target, and no one model of the run
        model = Path(trainings[config.method][0]["model"])
        checkpoint.replace(folder / MODEL, model.read_bytes())
    journal.write("done", results=str(folder / RESULTS))
    return results


def meet(folder: Path, config: RunConfig, sites: Sites, journal: Journal) -> roster.Roster:
    """Wait for the sites; a resumed run waits for those it began with, and counts them as then.

    Raises:
        RosterError: the offers make no run, or differ from those the run began with.
        QuorumError: too few sites came.
        ConfigError, ModelError: there is no starting from the model that the run starts from.
    """
    path = folder / ROSTER
    if config.run.resume and path.is_file():
        known = roster.Roster.parse(path.read_text())
        return sites.reunite(known, parts_left(folder, config, known))
    start = start_of(config)
    joined = sites.gather(classes_without_sources(config, start))
    check_start(config, start, joined)
    who = joined.bounded(config.guard.max_examples)
    for name in (n for n, count in joined.counts.items() if who.counts[n] < count):
        text = f"claims {joined.counts[name]} examples and counts as {who.counts[name]}"
        journal.trouble("bounded", name, f"{text}; guard.max-examples says how many may count")
    checkpoint.replace(path, who.text().encode())
    return who


def classes_without_sources(config: RunConfig, start: Meta | None) -> tuple[str, ...]:
    """The class names of a run in which sources have no part; () if they have one.

    Args:
        config: the run.
        start: the model that it starts from, if it starts from one.
    """
    parts = {part for method in config.trainings for part in config.parts(method)}
    return start.classes if start and not OF_SOURCES & parts else ()


def parts_left(folder: Path, config: RunConfig, known: roster.Roster) -> dict[str, set[str]]:
    """The parts that are still to be played, by target; one whose trainings are over is left out.

    Sources may have gone home after their phases, and a target after its trainings.
    """
    left: dict[str, set[str]] = {}
    for method, seed, aim in product(config.trainings, config.seeds, known.aims(config.run.target)):
        state = checkpoint.read(folder / task_for(config, method, seed, aim).label)
        if parts := config.parts(method, after=state.round if state else 0):
            left.setdefault(aim.target.name, set()).update(parts)
    return left


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a run's folder if need be, and hold it: two runs would ruin each other's checkpoints.

    Raises:
        GoingOnError: another process holds it.
        RunError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise RunError(f"The run's folder {folder} cannot be written ({error}).") from error
    deadline = time.monotonic() + LEAVE
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise GoingOnError(
                        f"The run in {folder} is still going on; wait for its end or stop it, or "
                        "choose another --name for a new run."
                    ) from None
            time.sleep(0.1)
        yield


def claim(folder: Path, config: RunConfig) -> None:
    """Note the settings of a new run, or with `run.resume` check that they are those it began with.

    Raises:
        RunError: it holds another run, or none to go on with.
    """
    path = folder / CONFIG
    mine = lasting(config.flat(), config.trainings)
    try:
        held = begun(folder)  # settings alone, of a run that met no sites, hold nobody up
        if held != config.run.resume and not (config.run.resume and path.is_file()):
            found = "holds a run already" if held else "holds no run to go on with"
            raise RunError(
                f"{folder} {found}; choose another --name for a new run, or --resume a run that "
                "is there."
            )
        if held:
            theirs = lasting(json.loads(path.read_text()), config.trainings)
            theirs = {**{k: v for k, v in defaults().items() if k in mine}, **theirs}
            odd = sorted(k for k in theirs if mine.get(k) != theirs[k])
            if odd:
                raise RunError(
                    f"The run in {folder} began with {odd[0]} {theirs[odd[0]]!r}, not "
                    f"{mine.get(odd[0])!r}; resume it with the settings it began with."
                )
        checkpoint.replace(path, json.dumps(mine, indent=1).encode())
    except OSError as error:
        raise RunError(f"The run's folder {folder} cannot be written ({error}).") from error
    except (ValueError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore it, or choose another --name for a new run."
        ) from error


def summarise(
    config: RunConfig,
    who: roster.Roster,
    trainings: dict[str, list[dict[str, Any]]],
    journal: Journal,
) -> dict[str, Any]:
    """What results.json says."""
    targets = list(dict.fromkeys(t["target"] for found in trainings.values() for t in found))
    return {
        "name": config.run.name,
        "method": config.method,
        "titles": {method: plugins.method(method).title for method in trainings},
        "config": config.flat(),
        "seeds": config.seeds,
        "versions": {
            "fedda": __version__,
            "flwr": flwr.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "sites": [
            {"name": n.name, "role": n.role, "examples": who.counts[n.name], "tested": n.tested}
            for n in who.nodes
        ],
        "shape": list(who.shape),
        "classes": list(who.classes),
        **accuracies(config.method, trainings),
        "selected_by": "highest infomax on the target's unlabelled training images",
        "targets": {
            name: accuracies(
                config.method,
                {m: [t for t in found if t["target"] == name] for m, found in trainings.items()},
            )
            for name in targets
        },
        "seconds": round(sum(t["seconds"] for found in trainings.values() for t in found), 3),
        "trainings": trainings,
        "events": journal.troubles,
    }


def accuracies(
    method: str, trainings: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, float | None]:
    """A method's accuracies and FedAvg's beside it: means over the seeds, None without a test.

    Of several targets an accuracy is the mean over them, and its deviation that of this mean.
    """

    def values(of: str, key: str) -> list[float]:
        by_seed: dict[int, list[float]] = {}
        for training in trainings.get(of, ()):
            if training[key] is not None:
                by_seed.setdefault(training["seed"], []).append(training[key])
        return [statistics.fmean(of_targets) for of_targets in by_seed.values()]

    def mean(found: list[float]) -> float | None:
        return statistics.fmean(found) if found else None

    def spread(found: list[float]) -> float | None:
        return (statistics.stdev(found) if len(found) > 1 else 0.0) if found else None

    final, fedavg = values(method, "final_accuracy"), values("fedavg", "final_accuracy")
    return {
        "final_accuracy": mean(final),
        "final_accuracy_std": spread(final),
        "selected_accuracy": mean(values(method, "selected_accuracy")),
        "fedavg_accuracy": mean(fedavg),
        "fedavg_accuracy_std": spread(fedavg),
    }
