"""Data sets and trainings for the tables of dictionary.py, and the results of a training."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedda import data, models
from fedda.config.sections import Flat
from fedda.data import digits
from fedda.errors import RunError
from fedda.halves import load
from fedda.maths import atom_heads, optimal_transport
from fedda.settings import RunConfig, defaults, lasting

# A single layer with small first weights: KD3A moves it by many norms, so the guard is off.
IDENTITY: Flat = {"model.name": "identity", "train.lr": 0.05, "guard.max-change": 0.0}
CNN: Flat = {
    "model.name": "digit-cnn",
    "input.channels": 3,
    "input.size": 16,
    "train.lr": 0.01,
    "train.lr-end": 0.0005,
}


@dataclass(frozen=True)
class Set:
    """One data set, reduced for a CPU."""

    folder: str  # within DATA; empty: drawn by fedda
    targets: tuple[str, ...]
    encoder: int  # rounds of stage 1
    settings: Flat
    images: int = 0  # per domain, drawn once; 0: all
    settle: Callable[[np.ndarray], np.ndarray] = field(default=lambda x: x)


def histograms(x: np.ndarray) -> np.ndarray:
    """Counts as shares of each image, then every feature standardised within its domain.

    This is usual for these features, and it needs no labels.
    """
    x = x.astype(np.float32)
    x = x / np.maximum(x.sum(axis=1, keepdims=True), 1)
    return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-8)


SETS = {
    "embedded": Set("", ("fonts", "blended"), 12, CNN | {"input.channels": 1}),
    "googlenet": Set(
        "office_caltech10_googlenet1024",
        ("webcam", "dslr", "amazon"),
        10,
        IDENTITY,
        settle=lambda x: x.astype(np.float32),
    ),
    "surf": Set(
        "office_caltech10_surf800",
        ("webcam", "dslr", "amazon", "caltech10"),
        10,
        IDENTITY,
        settle=histograms,
    ),
    "images64": Set(
        "office_caltech10_images64", ("webcam", "amazon"), 12, CNN | {"input.size": 24}, images=300
    ),
    "digits": Set("digits", ("usps", "mnistm"), 12, CNN, images=600),
}


@dataclass(frozen=True)
class Cell:
    """One training."""

    name: str
    set: str
    target: str
    seed: int
    settings: Flat
    split: bool = False  # half of every source's examples is held out


class Bench:
    """Trainings in a folder, and their results."""

    def __init__(self, data: Path | None, out: Path) -> None:
        self.data = data
        self.out = out

    def run(self, cell: Cell) -> tuple[dict[str, Any], Path]:
        """Train, unless this training is finished -> the content of results.json, the run's folder.

        Raises:
            RunError: the training was done with other settings.
        """
        place = self.out / cell.set / ("half" if cell.split else "all")
        source = self._prepared(cell)
        folder = place / "runs" / f"{cell.name}-{cell.target}-{cell.seed}"
        flat: Flat = {
            **SETS[cell.set].settings,
            **cell.settings,
            "run.name": folder.name,
            "run.dir": str(folder.parent),
            "run.seeds": str(cell.seed),
            "run.resume": (folder / "config.json").is_file(),
            "track.tensorboard": False,
            "wait.settle": 0.0,
        }
        config = RunConfig.parse(flat)
        if not (folder / "results.json").is_file():
            start = time.perf_counter()
            local, journal = load("server", "simulation"), load("server", "journal")
            sites = [s | {"notes": False} for s in local.folders(source, cell.target, {}, 1)]
            local.simulate(config, sites, journal.Journal(), "process")
            seconds = time.perf_counter() - start
            print(f"{cell.set}: {folder.name} took {seconds:.0f} s", flush=True)
        results = json.loads((folder / "results.json").read_text())
        # Results of an older version lack the settings that were added since: take the defaults.
        recorded = defaults() | results["config"]
        for key, value in lasting(config.flat(), [config.method]).items():
            if recorded[key] != value:
                raise RunError(
                    f"{folder} was run with {key} {recorded[key]!r}, not {value!r}; choose another "
                    "--out, or remove that folder."
                )
        return results, folder

    def _prepared(self, cell: Cell) -> Path:
        """The folder of domains that the trainings read; made if it is missing.

        Without a split the target trains on all examples without labels, and is tested on the
        same examples. In `half` every domain is split in two, in the same way for all trainings.
        """
        chosen, out = SETS[cell.set], self.out / cell.set / ("half" if cell.split else "all")
        if (out / "data").is_dir():
            return out / "data"
        part = out / "data.part"
        shutil.rmtree(part, ignore_errors=True)
        if not chosen.folder:
            digits.build(part, seed=0, train=400)
            part.rename(out / "data")
            return out / "data"
        assert self.data is not None
        files = accuracy.domains(self.data / chosen.folder)
        part.mkdir(parents=True)
        for path in files:
            with np.load(path) as file:
                both = "x_train" in file
                x, y = (file[k + "_train"] if both else file[k] for k in "xy")
                test = (file["x_test"], file["y_test"]) if both else None
            order = np.random.default_rng(0).permutation(len(y))
            x = chosen.settle(x)
            most = order[: chosen.images or None]
            train, tests = most, most
            if cell.split:
                train, tests = np.sort(most[::2]), np.sort(most[1::2])
                test = None
            x_test, y_test = (x[tests], y[tests]) if test is None else test
            held = np.arange(len(y_test))[:1000]
            arrays = {"x_train": x[train], "y_train": y[train]}
            np.savez(part / path.name, **arrays, x_test=x_test[held], y_test=y_test[held])
        part.rename(out / "data")
        return out / "data"

    def after(self, folder: Path, cell: Cell) -> "After":
        """The results of a finished training at the server and its sites."""
        return After(folder, self._prepared(cell), cell)


class After:
    """A finished training: its atoms, and each site's points in the site's own scaling."""

    def __init__(self, folder: Path, data: Path, cell: Cell) -> None:
        state = load("server", "checkpoint").read(folder / f"feddadil-{cell.seed}")
        assert state is not None
        atoms = state.arrays["atoms"].unpack()
        self.z, self.y = (torch.from_numpy(atoms[name].copy()) for name in "zy")
        self.folder, self.data, self.cell = folder, data, cell
        self.model, about = models.load(folder / "model.safetensors")
        flat = json.loads((folder / "config.json").read_text())
        config = RunConfig.parse({k: v for k, v in flat.items() if not k.startswith("run.")})
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"name": folder.name})}
        )
        self.task = config.task("feddadil", cell.seed, about.shape, about.classes, 4)

    def coordinates(self, site: str) -> Tensor:
        pattern = f"*.{self.task.rounds}.coordinates.safetensors"
        (path,) = (self.folder / "sites" / site).glob(pattern)
        return load_file(path)["alpha"]

    def scores(self, target: str) -> dict[str, float]:
        """Accuracy of the heads, as the target fits and tests them after the last round."""
        o, alpha = self.task.options, self.coordinates(target)
        _, _, tests, labels = self.points(target)
        b = optimal_transport.barycenter(
            self.z, self.y, alpha, most=o.fixed_points, entropy=o.entropy
        )
        anchor = self.dictionary(target)[0].anchor()
        W, bias = atom_heads.fit_heads(b.z[None], b.y[None], o.head_decay, anchor=anchor)
        heads = atom_heads.fit_heads(self.z, self.y, o.head_decay, anchor=anchor)
        p = {
            "FedAvg head": models.predict(self.model, self.tests(target)),
            "FedDaDiL-R": atom_heads.ensemble(tests, W, bias, alpha.new_ones(1)),
            "FedDaDiL-E": atom_heads.ensemble(tests, *heads, alpha),
        }
        return {row: float((q.argmax(dim=1) == labels).float().mean()) for row, q in p.items()}

    def tests(self, name: str) -> Tensor:
        """A domain's test inputs, as they are in its file."""
        test = self._load(name)[1]
        return test.x

    def _load(self, name: str) -> tuple[data.Labelled, data.Labelled]:
        path = next(p for p in self.data.iterdir() if name in (p.stem, p.name))
        shape = self.task.dims
        channels, size = (shape[0], shape[1]) if len(shape) == 3 else (0, 0)
        train = data.load_source(path, channels=channels, size=size)
        test = data.load_evaluation(path, channels=channels, size=size)
        assert test is not None
        return train, test

    def sites(self) -> list[str]:
        return sorted(p.stem if p.suffix else p.name for p in self.data.iterdir())

    def dictionary(self, name: str) -> tuple[Any, data.Labelled, data.Labelled]:
        """A domain's part of the dictionary, and its training and test examples."""
        train, test = self._load(name)
        site = load("clients", "site.memory").Site(
            {"role": "source", "name": name, "data": "", "device": "cpu"}
        )
        made = load("clients", "shared.dictionary").Dictionary(site, self.task, self.model, train)
        return made, train, test

    def points(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Training and test points of a domain, in its own scaling, with their labels."""
        made, train, test = self.dictionary(name)
        return made.points, train.y, made.scaling(made.encoded(test.x)), test.y
