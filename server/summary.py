"""The content of results.json: what all trainings of a run have found, and means over its seeds."""

import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import flwr
import torch

from fedda import __version__, plugins
from fedda.halves import REFERENCE
from fedda.results.read import REFINED
from fedda.settings import RunConfig

from . import checkpoint
from .journal import Journal
from .strategy_modules import roster


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
            {"name": n.name, "role": n.role, "examples": n.examples, "tested": n.tested}
            for n in members.nodes
        ],
        "shape": list(members.shape),
        "classes": list(members.classes),
        **accuracies(config.method, trainings),
        "selected_by": "highest infomax on the target's unlabelled training examples",
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
    is that of these means; None of one seed.
    """

    def values(of: str, key: str) -> list[float]:
        by_seed: dict[int, list[float]] = {}
        for training in trainings.get(of, ()):
            value = training[key]
            if key == REFINED:
                value = (value or {}).get("accuracy")
            if value is not None:
                by_seed.setdefault(training["seed"], []).append(value)
        return [statistics.fmean(of_targets) for of_targets in by_seed.values()]

    def mean(known: list[float]) -> float | None:
        return statistics.fmean(known) if known else None

    def spread(known: list[float]) -> float | None:
        return statistics.stdev(known) if len(known) > 1 else None

    final, fedavg = values(method, "final_accuracy"), values(REFERENCE, "final_accuracy")
    return {
        "final_accuracy": mean(final),
        "final_accuracy_std": spread(final),
        "final_accuracy_seeds": len(final),  # fewer than the run's if a last test is missing
        "selected_accuracy": mean(values(method, "selected_accuracy")),
        "refined_accuracy": mean(values(method, REFINED)),
        "fedavg_accuracy": mean(fedavg),
        "fedavg_accuracy_std": spread(fedavg),
    }
