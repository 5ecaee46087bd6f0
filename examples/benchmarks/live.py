"""A real federation on this machine for the benchmarks: processes, TLS and node keys.

Its sites hold a few random vectors, so that training costs almost nothing and the measured time is
the cost of federating. Run the benchmarks, not this module.
"""

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedda.config import IMAGES_HIDE
from fedda.errors import RunError
from fedda.ops import bundle
from fedda.ops.federation import Deployment

FEATURES, CLASSES = 64, 10
SERVED, MEASURED = 'serverapp = "server.app:app"', 'serverapp = "server.measured:app"'
WARM_UP = 1  # rounds not counted: the first one makes models and opens connections


def say(text: str) -> None:
    """Print progress on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def domains(
    folder: Path, sources: int, examples: int = IMAGES_HIDE, shape: tuple[int, ...] = (FEATURES,)
) -> dict[str, tuple[str, Path]]:
    """Write random vectors, or images, for the sources and a target -> role and file of each.

    A site takes no part with fewer examples than the default, unless its `--min-images` is lower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sites = {}
    for number in range(sources + 1):
        name = f"source-{number:02}" if number < sources else "target"
        rng = np.random.default_rng(number)
        x = rng.random((examples, *shape), dtype=np.float32)
        x = x if len(shape) == 1 else (255 * x).astype(np.uint8)
        y = np.arange(examples) % CLASSES
        arrays = {"x_train": x, "x_test": x, "y_test": np.concatenate([[CLASSES - 1], y[1:]])}
        if name != "target":
            arrays["y_train"] = arrays["y_test"]
        np.savez(folder / f"{name}.npz", **arrays)
        sites[name] = ("target" if name == "target" else "source", folder / f"{name}.npz")
    return sites


def mlp(megabytes: float) -> dict[str, Any]:
    """Settings of a network with about this size in float32: two equal hidden layers."""
    numbers = megabytes * 1e6 / 4
    linear = FEATURES + CLASSES + 10  # per hidden unit: first and last layer, biases and BatchNorm
    width = (-linear + math.sqrt(linear**2 + 4 * numbers)) / 2
    return {"model.name": "mlp", "model.hidden": ",".join([str(max(4, round(width)))] * 2)}


class Served(Deployment):
    """A federation whose server takes the app that `stage` writes, too."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, server_options=["--any-app"], **more)


def stage(folder: Path) -> Path:
    """Write the Flower app with `measured.py` as its server program -> its folder."""
    app = bundle.stage(folder)
    shutil.copy(Path(__file__).with_name("measured.py"), app / "server" / "measured.py")
    project = app / "pyproject.toml"
    text = project.read_text()
    assert SERVED in text
    project.write_text(text.replace(SERVED, MEASURED))
    return app


@dataclass
class Wave:
    """One wave of messages: its seconds, and the seconds of the slowest site's own work."""

    kind: str
    began: float
    seconds: float
    waited: float
    worked: float

    @property
    def overhead(self) -> float:
        return self.seconds - self.worked


@dataclass
class Measured:
    """The content of a run's measured.json; `WARM_UP` rounds are left out of the figures."""

    start: int
    waves: list[Wave]
    phases: list[dict[str, Any]]
    model: int

    @property
    def rounds(self) -> list[list[Wave]]:
        """The waves of each round; a round begins where a training wave follows another kind."""
        rounds: list[list[Wave]] = []
        for wave in self.waves:
            begins = wave.kind == "train" and (not rounds or rounds[-1][-1].kind != "train")
            if begins:
                rounds.append([])
            rounds[-1].append(wave)
        return rounds

    def overhead(self) -> float:
        """Median seconds from the start of a round to the start of the next, less the sites' work.

        Includes Flower, packing, checking, averaging, the checkpoint and the journal.
        """
        counted = list(zip(self.rounds, self.rounds[1:], strict=False))[WARM_UP:]
        return statistics.median(
            after[0].began - round_[0].began - sum(wave.worked for wave in round_)
            for round_, after in counted
        )

    def untested(self) -> list[float]:
        """Seconds of each round but the last, from its start to the next one's, without the test.

        No round is left out as a warm-up.
        """
        return [
            after[0].began
            - round_[0].began
            - sum(wave.seconds for wave in round_ if wave.kind == "evaluate")
            for round_, after in zip(self.rounds, self.rounds[1:], strict=False)
        ]

    def per_wave(self, kind: str) -> list[Wave]:
        """The waves of one kind, without the warm-up."""
        return [w for round_ in self.rounds[WARM_UP:] for w in round_ if w.kind == kind]

    @property
    def idle(self) -> int:
        """Resident memory in bytes before the first round, after the model is made and packed."""
        return next(p["before"] for p in self.phases if p["phase"] == "train_round")

    def peak(self, above: int) -> float:
        """The highest resident memory of the training above `above` bytes, in models."""
        return (max(phase["peak"] for phase in self.phases) - above) / self.model


def run(
    deployment: Deployment, app: Path, name: str, settings: Mapping[str, Any], seconds: float = 600
) -> Measured:
    """Run once over the sites of a deployment and read the measurements.

    Raises:
        RunError: the run failed, or had events; the message quotes its journal or the events.
    """
    runs = deployment.directory / "runs"
    flat = {"train.lr": 1e-4, "train.lr-end": 1e-4, **settings}
    flat |= {"run.dir": str(runs), "run.name": name, "run.expect": len(deployment.sites)}
    state = deployment.wait(deployment.submit(app, flat), seconds)
    if state.ending != "completed":
        journal = runs / name / "journal.jsonl"
        last = journal.read_text().splitlines()[-1:] if journal.exists() else []
        raise RunError(f"the run {name} ended as {state}; the end of its journal: {' '.join(last)}")
    measured = json.loads((runs / name / "measured.json").read_text())
    results = json.loads((runs / name / "results.json").read_text())
    if results["events"]:
        raise RunError(
            f"the run {name} had events that spoil its figures; run it again: {results['events']}"
        )
    waves = [
        Wave(w["kind"], w["began"], w["seconds"], w["waited"], max(w["worked"], default=0.0))
        for w in measured["waves"]
        if w["kind"] != "query"
    ]
    training = next(iter(results["trainings"].values()))[0]
    to_source = training["rounds"][0]["bytes"]["to source model"]
    sources = sum(role == "source" for role, _ in deployment.sites.values())
    return Measured(measured["start"], waves, measured["phases"], to_source // sources)
