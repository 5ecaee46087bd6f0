"""Reading the notes that clients/site/notes.py writes, on the sites' own machine.

A site's folder is its own, but the page is somebody else's: what is read here is checked for its
form, and only points, counts and class names of it reach the page.
"""

import glob
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedda.errors import RunError
from fedda.results.read import Results, label_of, seed_of

FIRST, LAST, CONFUSION = "first.npz", "last.npz", "confusion.json"
DICTIONARY = "dictionary.npz"


@dataclass(frozen=True)
class Features:
    """One site's features under one model; a label of -1 is none."""

    site: str
    z: NDArray[np.float32]  # (N, d)
    labels: NDArray[np.int64]  # (N,)
    round: int
    model: str


@dataclass(frozen=True)
class Dictionary:
    """What FedDaDiL's target noted: its points, and what its atoms make of them."""

    points: NDArray[np.float32]  # (N, d)
    barycenter: NDArray[np.float32]  # (n, d)
    barycenter_labels: NDArray[np.int64]
    distilled: NDArray[np.float32]  # (C spc, d)
    distilled_labels: NDArray[np.int64]


@dataclass
class Noted:
    """The notes found of a run: folders by method, seed (`0`; `0 on north` of several) and site."""

    folders: dict[tuple[str, str, str], Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[str]:
        return sorted({site for _, _, site in self.folders})

    def confusions(
        self, method: str, target: str
    ) -> dict[str, tuple[list[str], NDArray[np.int64]]]:
        """Class names and counts (C, C) of a target's last test, by seed."""
        found = {}
        for (of, seed, site), folder in sorted(self.folders.items()):
            path = folder / CONFUSION
            if (of, site) == (method, target) and path.is_file():
                try:
                    found[seed] = _confusion(json.loads(path.read_text()))
                except (OSError, ValueError, TypeError, LookupError) as error:
                    self.problems.append(f"{path} cannot be read ({error})")
        return found

    def dictionary(self, method: str, seed: str) -> Dictionary | None:
        """The target's dictionary in the last round of one training."""
        for (of, its, _), folder in sorted(self.folders.items()):
            path = folder / DICTIONARY
            if (of, its) == (method, seed) and path.is_file():
                try:
                    return _dictionary(path)
                except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
                    self.problems.append(f"{path} cannot be read ({error})")
        return None

    def features(self, method: str, seed: str, name: str) -> list[Features]:
        """What the sites saw in one training's first or last round, and which classes there are."""
        found = []
        for (of, its, site), folder in sorted(self.folders.items()):
            path = folder / name
            if (of, its) == (method, seed) and path.is_file():
                try:
                    found.append(_features(site, path))
                except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
                    self.problems.append(f"{path} cannot be read ({error})")
        widths = {f.z.shape[1] for f in found}
        if len(widths) > 1:
            self.problems.append(f"the {name} of {method}, seed {seed} are of several models")
            return []
        return found


def collect(results: Results, run: Path, given: Sequence[Path] = ()) -> Noted:
    """Find the notes of a run's sites.

    Args:
        results: of the run.
        run: its folder; a simulation and the demo leave their sites' folders in it.
        given: state directories of sites on this machine.

    Raises:
        RunError: a given directory holds no notes of this run.
    """
    noted = Noted()
    for place in [run / "sites", *sorted(run.glob("state/*"))]:
        noted.folders |= _below(place, results)
    for place in given:
        found = _below(place, results)
        if not found:
            raise RunError(
                f"{place} holds no notes of the run {results['name']!r}; give the --state-dir of a "
                "fedda-client that took part in it without --no-notes."
            )
        noted.folders |= found
    return noted


def _below(place: Path, results: Results) -> dict[tuple[str, str, str], Path]:
    """Notes below a state directory, or below one site's folder in it."""
    known = {site["name"] for site in results["sites"]}
    found = {}
    for method, trainings in results["trainings"].items():
        for training in trainings:
            name = f"{results['name']}.{label_of(results, training, method)}"
            below = place.glob(f"*/notes/{glob.escape(name)}")
            for folder in _existing([*below, place / "notes" / name]):
                site = folder.parent.parent.name
                if site in known:
                    found[method, seed_of(results, training), site] = folder
    return found


def _existing(folders: Iterable[Path]) -> list[Path]:
    return sorted(folder for folder in folders if folder.is_dir())


def _confusion(table: Any) -> tuple[list[str], NDArray[np.int64]]:
    classes = [str(name) for name in table["classes"]]
    counts = np.array(table["counts"], dtype=np.int64)
    if counts.shape != (len(classes), len(classes)) or (counts < 0).any():
        raise ValueError(f"its counts are {counts.shape}, for {len(classes)} classes")
    return classes, counts


def _dictionary(path: Path) -> Dictionary:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        sets = [file[name].astype(np.float32) for name in ("points", "barycenter", "distilled")]
        labels = [file[f"{name}_labels"].astype(np.int64) for name in ("barycenter", "distilled")]
    points, barycenter, distilled = sets
    widths = {s.shape[1:] for s in sets}
    pairs = zip((barycenter, distilled), labels, strict=True)
    if points.ndim != 2 or len(widths) != 1 or any(y.shape != (len(z),) for z, y in pairs):
        raise ValueError("its arrays have another form")
    if not all(np.isfinite(s).all() and len(s) for s in sets):
        raise ValueError("its values are not finite")
    return Dictionary(points, barycenter, labels[0], distilled, labels[1])


def _features(site: str, path: Path) -> Features:
    # numpy leaves a file that it was given by name open where it cannot read it.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        z = file["features"].astype(np.float32)
        labels = file["labels"] if "labels" in file else np.full(len(z), -1)
        if "test_features" in file:
            z = np.concatenate([z, file["test_features"].astype(np.float32)])
            labels = np.concatenate([labels, file["test_labels"]])
        if z.ndim != 2 or labels.shape != (len(z),) or not np.isfinite(z).all():
            raise ValueError("its arrays have another form")
        return Features(site, z, labels.astype(np.int64), int(file["round"]), str(file["model"]))
