"""A run: the method and its baseline, each with every seed, and the results in one file."""

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.serverapp import Grid

from fedda import __version__, plugins
from fedda.errors import RunError
from fedda.models import Meta
from fedda.ops.lock import alone
from fedda.results import transfer
from fedda.results.read import MODEL, RESULTS, begun
from fedda.settings import RunConfig, defaults, lasting

from . import checkpoint, frozen_weights, sequence
from .attendance import OF_SOURCES, Sites
from .journal import Journal
from .rehearsal import rehearse
from .start import check_start, start_of
from .strategy_modules import roster
from .tracking.curves import Tracking
from .training import Training, task_for

CONFIG, ROSTER = "config.json", "roster.json"


def execute(
    config: RunConfig, grid: Grid, journal: Journal, slots: Callable[[], int] | None = None
) -> dict[str, Any]:
    """Execute a run, or resume it -> the content of results.json.

    Args:
        config: the run.
        grid: the way to the sites.
        journal: receives every event of the run.
        slots: returns how many sites a simulation lets work at the same time; None: any number.

    Raises:
        ConfigError: a tracker that the settings ask for is not installed, a method cannot exchange
            gradients with these sites and settings, or the model to start from does not fit.
        ModelError: the model to start from cannot be read.
        RosterError: the offers of the sites that joined do not fit together.
        QuorumError: there were too few sites for longer than `wait.sites` seconds.
        RunError: the run's folder holds a run with other settings, holds a run that another
            process executes, or cannot be written.
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
    members = meet(folder, config, sites, journal)
    targets = sequence.order(config, members)
    journal.write(
        "roster",
        sites=[str(n) for n in members.nodes],
        shape=list(members.shape),
        classes=members.classes,
        targets=list(targets),
    )
    aims = {
        (method, target): sequence.facing(method, members, target, targets)
        for method, target in product(config.trainings, targets)
    }
    for (method, _), aim in aims.items():
        together = rehearse(config, method, aim)
        if together and slots and (room := slots()) < together:
            raise RunError(
                f"{method} sums gradients of {together} sites that work at the same time, but this "
                f"simulation has room for {room}, one per CPU; give --engine process, which needs "
                f"one CPU only, or use a machine with {together} CPUs."
            )
    task = task_for(config, config.method, config.seeds[0], aims[config.method, targets[0]])
    there = [node for node in members.nodes if node.id in sites.there()]
    frozen_weights.check(grid, task, there, config.wait.evaluate)
    trainings: dict[str, list[dict[str, Any]]] = {m: [] for m in config.trainings}
    without = source_only(config)
    for seed, target, method in product(config.seeds, targets, config.trainings):
        aim = sequence.facing(method, members, target, targets)
        earlier = sequence.adapted(folder, task_for(config, method, seed, aim), aim)
        training = Training(
            *(config, method, seed),
            grid=grid,
            sites=sites,
            members=aim,
            folder=folder,
            journal=journal,
            earlier=earlier,
        )
        result = training.run()
        base = [t for t in trainings.get(without, ()) if (t["seed"], t["target"]) == (seed, target)]
        if method == config.method and base:
            result |= compared(config, result, base[0], journal)
        tracking.finished(result)
        trainings[method].append(result)
        members = members.taking(training.roster)  # a site may be back under another node id
    results = summarise(config, members, trainings, journal)
    checkpoint.replace(folder / RESULTS, json.dumps(results, indent=1).encode())
    if len(targets) == 1:  # with several targets each has a model of its own, and the run has none
        kept = trainings[config.method][0].get("kept", config.method)
        model = Path(trainings[kept][0]["model"])
        checkpoint.replace(folder / MODEL, model.read_bytes())
    journal.write("done", results=str(folder / RESULTS))
    return results


def source_only(config: RunConfig) -> str:
    """The baseline's name, if it does not adapt to a target; else empty."""
    baseline = config.trainings[0]
    adapts = plugins.method(baseline).adapts
    return "" if baseline == config.method or adapts else baseline


def compared(
    config: RunConfig, training: dict[str, Any], base: Mapping[str, Any], journal: Journal
) -> dict[str, Any]:
    """Compare a training with the source-only one of its seed and target -> entries that change.

    Args:
        config: the run.
        training: the method's training.
        base: the source-only training.
        journal: receives a doubt.
    """
    baseline = config.trainings[0]
    doubt = transfer.doubt(training, base, plugins.method(baseline).title.partition(" (")[0])
    changed: dict[str, Any] = {}
    if config.run.keep == "better":
        changed["kept"] = config.method if doubt is None else baseline
    if doubt is not None:
        changed["doubts"] = [*training["doubts"], doubt.to_json()]
        about = {"method": config.method, "seed": training["seed"]}
        journal.write("doubt", **about, target=training["target"], **doubt.to_json())
    return changed


def meet(folder: Path, config: RunConfig, sites: Sites, journal: Journal) -> roster.Roster:
    """Wait for the sites; a resumed run waits for its former sites and keeps their counts.

    Raises:
        RosterError: the offers do not fit together, or differ from those the run began with.
        QuorumError: too few sites joined.
        ConfigError: the model that the run starts from does not fit the run or its sites.
        ModelError: the model that the run starts from cannot be read.
    """
    path = folder / ROSTER
    if config.run.resume and path.is_file():
        known = roster.Roster.parse(path.read_text())
        return sites.reunite(known, parts_left(folder, config, known))
    start = start_of(config)
    joined = sites.gather(classes_without_sources(config, start))
    check_start(config, start, joined)
    members = joined.bounded(config.guard.max_examples)
    for name in (n for n, count in joined.counts.items() if members.counts[n] < count):
        text = f"claims {joined.counts[name]} examples and counts as {members.counts[name]}"
        journal.trouble("bounded", name, f"{text}; guard.max-examples says how many may count")
    checkpoint.replace(path, members.text().encode())
    return members


def classes_without_sources(config: RunConfig, start: Meta | None) -> tuple[str, ...]:
    """Return the start model's class names if no source takes part in the run, else ().

    Args:
        config: the run.
        start: the model that the run starts from, or None.
    """
    parts = {part for method in config.trainings for part in config.parts(method)}
    return start.classes if start and not OF_SOURCES & parts else ()


def parts_left(folder: Path, config: RunConfig, known: roster.Roster) -> dict[str, set[str]]:
    """The parts that the remaining rounds need, by target; a target without any is left out.

    Sources may leave after the last phase in which they have a part, and a target after its
    trainings; in a chain later targets may adapt from it.
    """
    left: dict[str, set[str]] = {}
    targets = sequence.order(config, known)
    for method, seed, target in product(config.trainings, config.seeds, targets):
        aim = sequence.facing(method, known, target, targets)
        earlier = aim.targets[1:]
        state = checkpoint.read(folder / task_for(config, method, seed, aim).label)
        after = state.round if state else 0
        parts = set(config.parts(method, after, later=bool(earlier)))
        if state and checkpoint.untested(state):
            parts.add("target")
        if parts:
            left.setdefault(target, set()).update(parts)
            for node in earlier:
                left.setdefault(node.name, set()).add("collaborator")
    return left


def claim(folder: Path, config: RunConfig) -> None:
    """Write down a new run's settings, or check that a resumed run has the settings it began with.

    Raises:
        RunError: a new run's folder already holds a run, or a resumed run's folder holds none or
            one with other settings; or the folder cannot be written or read.
    """
    path = folder / CONFIG
    mine = lasting(config.flat(), config.trainings)
    try:
        held = begun(folder)  # false for settings alone: no site joined, so reuse it
        if held != config.run.resume and not (config.run.resume and path.is_file()):
            state = "holds a run already" if held else "holds no run to go on with"
            raise RunError(
                f"{folder} {state}; choose another --name for a new run, or --resume a run that "
                "exists."
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
    members: roster.Roster,
    trainings: dict[str, list[dict[str, Any]]],
    journal: Journal,
) -> dict[str, Any]:
    """Return the content of results.json."""
    targets = list(dict.fromkeys(t["target"] for runs in trainings.values() for t in runs))
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
            {"name": n.name, "role": n.role, "examples": members.counts[n.name], "tested": n.tested}
            for n in members.nodes
        ],
        "shape": list(members.shape),
        "classes": list(members.classes),
        **accuracies(config.method, trainings),
        "selected_by": "highest infomax on the target's unlabelled training images",
        "targets": {
            name: accuracies(
                config.method,
                {m: [t for t in runs if t["target"] == name] for m, runs in trainings.items()},
            )
            for name in targets
        },
        "seconds": round(sum(t["seconds"] for runs in trainings.values() for t in runs), 3),
        "untested": [
            {"method": method, "seed": t["seed"], "target": t["target"]}
            for method, runs in trainings.items()
            for t in runs
            if t["rounds"][-1].get(checkpoint.UNTESTED)
        ],
        "trainings": trainings,
        "events": journal.troubles,
    }


def accuracies(
    method: str, trainings: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, float | int | None]:
    """Mean accuracies of a method and of FedAvg over the seeds; None where no target was tested.

    With several targets, a seed's accuracy is the mean over the targets, and the standard deviation
    is that of these means.
    """

    def values(of: str, key: str) -> list[float]:
        by_seed: dict[int, list[float]] = {}
        for training in trainings.get(of, ()):
            if training[key] is not None:
                by_seed.setdefault(training["seed"], []).append(training[key])
        return [statistics.fmean(of_targets) for of_targets in by_seed.values()]

    def mean(known: list[float]) -> float | None:
        return statistics.fmean(known) if known else None

    def spread(known: list[float]) -> float | None:
        return (statistics.stdev(known) if len(known) > 1 else 0.0) if known else None

    final, fedavg = values(method, "final_accuracy"), values("fedavg", "final_accuracy")
    return {
        "final_accuracy": mean(final),
        "final_accuracy_std": spread(final),
        "final_accuracy_seeds": len(final),  # fewer than the run's if a last test is missing
        "selected_accuracy": mean(values(method, "selected_accuracy")),
        "fedavg_accuracy": mean(fedavg),
        "fedavg_accuracy_std": spread(fedavg),
    }
