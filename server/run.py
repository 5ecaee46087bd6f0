"""A run: the method and its baseline, each with every seed, and the results in one file."""

import fcntl
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.serverapp import Grid

from fedda import __version__
from fedda.config import RunConfig, defaults, lasting
from fedda.errors import RunError
from fedda.folders import load_half
from fedda.results import begun

from . import checkpoint
from .folders import roster
from .journal import Journal
from .rehearsal import rehearse
from .sites import Sites
from .tracking import Tracking
from .training import Training

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
        ConfigError: a tracker is asked for that is not installed, or a method cannot do with
            these sites what it is there for.
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
    journal.write(
        "roster", sites=[str(n) for n in who.nodes], shape=list(who.shape), classes=who.classes
    )
    for method in config.trainings:
        together = rehearse(config, method, who)
        if together and slots and (found := slots()) < together:
            raise RunError(
                f"{method} sums gradients of {together} sites that work at the same time, but this "
                f"simulation has room for {found}, one per CPU; give --engine process, which needs "
                f"one CPU only, or use a machine with {together} CPUs."
            )
    trainings: dict[str, list[dict[str, Any]]] = {m: [] for m in config.trainings}
    for seed in config.seeds:
        for method in config.trainings:
            training = Training(
                config,
                method,
                seed,
                grid=grid,
                sites=sites,
                who=who,
                folder=folder / f"{method}-{seed}",
                journal=journal,
            )
            found = training.run()
            tracking.finished(found)
            trainings[method].append(found)
            who = training.roster  # a site may have come back under another node id
    results = summarise(config, who, trainings, journal)
    checkpoint.replace(folder / RESULTS, json.dumps(results, indent=1).encode())
    model = Path(trainings[config.method][0]["model"])
    checkpoint.replace(folder / "model.safetensors", model.read_bytes())
    journal.write("done", results=str(folder / RESULTS))
    return results


def meet(folder: Path, config: RunConfig, sites: Sites, journal: Journal) -> roster.Roster:
    """Wait for the sites; a resumed run waits for those it began with, and counts them as then.

    Raises:
        RosterError: the offers make no run, or differ from those the run began with.
        QuorumError: too few sites came.
    """
    path = folder / ROSTER
    if config.run.resume and path.is_file():
        known = roster.Roster.parse(path.read_text())
        return sites.reunite(known, roles_of(config))
    joined = sites.gather()
    who = joined.bounded(config.guard.max_examples)
    for name in (n for n, count in joined.counts.items() if who.counts[n] < count):
        text = f"claims {joined.counts[name]} examples and counts as {who.counts[name]}"
        journal.trouble("bounded", name, f"{text}; guard.max-examples says how many may count")
    checkpoint.replace(path, who.text().encode())
    return who


def roles_of(config: RunConfig) -> set[str]:
    """The roles that train in any of the run's methods."""
    halves = (load_half("strategies", method) for method in config.trainings)
    return {role for half in halves for role in half.STRATEGY.roles}


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
    """What results.json says; accuracies are means over the seeds, None if nothing was tested."""

    def mean(method: str, key: str, statistic: Any = statistics.fmean) -> float | None:
        found = [t[key] for t in trainings.get(method, []) if t[key] is not None]
        return statistic(found) if found else None

    def spread(values: list[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0

    return {
        "name": config.run.name,
        "method": config.method,
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
        "final_accuracy": mean(config.method, "final_accuracy"),
        "final_accuracy_std": mean(config.method, "final_accuracy", spread),
        "selected_accuracy": mean(config.method, "selected_accuracy"),
        "selected_by": "highest infomax on the target's unlabelled training images",
        "fedavg_accuracy": mean("fedavg", "final_accuracy"),
        "fedavg_accuracy_std": mean("fedavg", "final_accuracy", spread),
        "seconds": round(sum(t["seconds"] for found in trainings.values() for t in found), 3),
        "trainings": trainings,
        "events": journal.troubles,
    }
