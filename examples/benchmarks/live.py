"""A real federation on this machine for the benchmarks: processes, TLS and node keys.

Its sites hold a handful of random vectors, so that training costs next to nothing and what is left
is the cost of federating. Run the benchmarks, not this module.
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

from fedda.errors import RunError
from fedda.ops import bundle
from fedda.ops.federation import Deployment

FEATURES, CLASSES = 64, 10
SERVED, MEASURED = 'serverapp = "server.app:app"', 'serverapp = "server.measured:app"'
WARM_UP = 1  # rounds not counted: the first one makes models and opens connections


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def domains(folder: Path, sources: int, examples: int = 16) -> dict[str, tuple[str, Path]]:
    """Files of random vectors for so many sources and a target -> role and data by site."""
    folder.mkdir(parents=True, exist_ok=True)
    sites = {}
    for number in range(sources + 1):
        name = f"source-{number:02}" if number < sources else "target"
        rng = np.random.default_rng(number)
        x = rng.random((examples, FEATURES), dtype=np.float32)
        y = np.arange(examples) % CLASSES
        arrays = {"x_train": x, "x_test": x, "y_test": np.concatenate([[CLASSES - 1], y[1:]])}
        if name != "target":
            arrays["y_train"] = arrays["y_test"]
        np.savez(folder / f"{name}.npz", **arrays)
        sites[name] = ("target" if name == "target" else "source", folder / f"{name}.npz")
    return sites


def mlp(megabytes: float) -> dict[str, Any]:
    """Settings of a network of about so many MB in float32: two equal hidden layers."""
    numbers = megabytes * 1e6 / 4
    linear = FEATURES + CLASSES + 10  # weights of the ends, and BatchNorm, per unit
    width = (-linear + math.sqrt(linear**2 + 4 * numbers)) / 2
    return {"model.name": "mlp", "model.sizes": ",".join([str(max(4, round(width)))] * 2)}


def stage(folder: Path) -> Path:
    """The Flower app with `measured.py` as its server program."""
    app = bundle.stage(folder)
    shutil.copy(Path(__file__).with_name("measured.py"), app / "server" / "measured.py")
    project = app / "pyproject.toml"
    text = project.read_text()
    assert SERVED in text
    project.write_text(text.replace(SERVED, MEASURED))
    return app


@dataclass
class Wave:
    """One wave of messages: seconds it took, and of them the slowest site's own work."""

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
    """What a run left in measured.json, without its warm-up."""

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
        """Median seconds from one round's begin to the next one's, less the sites' own work.

        Everything is in it: Flower, packing, checking, averaging, the checkpoint, the journal.
        """
        counted = list(zip(self.rounds, self.rounds[1:], strict=False))[WARM_UP:]
        return statistics.median(
            after[0].began - round_[0].began - sum(wave.worked for wave in round_)
            for round_, after in counted
        )

    def per_wave(self, kind: str) -> list[Wave]:
        """The waves of one kind, without the warm-up."""
        return [w for round_ in self.rounds[WARM_UP:] for w in round_ if w.kind == kind]

    @property
    def idle(self) -> int:
        """Resident memory between rounds, before the first: the model is there, and packed."""
        return next(p["before"] for p in self.phases if p["phase"] == "train_round")

    def peak(self, above: int) -> float:
        """The highest resident memory of the training above that much, in models."""
        return (max(phase["peak"] for phase in self.phases) - above) / self.model


def run(
    deployment: Deployment, app: Path, name: str, settings: Mapping[str, Any], seconds: float = 600
) -> Measured:
    """Run once over the sites of a deployment and read what was measured.

    Raises:
        RunError: the run failed; with what its journal says.
    """
    runs = deployment.directory / "runs"
    flat = {"train.lr": 1e-4, "train.lr-end": 1e-4, **settings}
    flat |= {"run.dir": str(runs), "run.name": name, "run.expect": len(deployment.sites)}
    state = deployment.wait(deployment.submit(app, flat), seconds)
    if not state.succeeded:
        journal = runs / name / "journal.jsonl"
        said = journal.read_text().splitlines()[-1:] if journal.exists() else []
        raise RunError(f"the run {name} ended as {state}; {' '.join(said)}")
    found = json.loads((runs / name / "measured.json").read_text())
    results = json.loads((runs / name / "results.json").read_text())
    if results["events"]:
        raise RunError(
            f"the run {name} had trouble, so its figures mean little: {results['events']}"
        )
    waves = [
        Wave(w["kind"], w["began"], w["seconds"], w["waited"], max(w["worked"], default=0.0))
        for w in found["waves"]
        if w["kind"] != "query"
    ]
    training = next(iter(results["trainings"].values()))[0]
    to_source = training["rounds"][0]["bytes"]["to source model"]
    sources = sum(role == "source" for role, _ in deployment.sites.values())
    return Measured(found["start"], waves, found["phases"], to_source // sources)
