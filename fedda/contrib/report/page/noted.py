"""Reading the notes that clients/site/notes.py writes, on the sites' own machine.

Whoever makes the page need not trust a site's folder: everything read from it is checked for its
form, and only points, counts and class names reach the page.
"""

import glob
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedda.errors import RunError, reason
from fedda.results.read import Results, label_of, seed_of

FIRST, LAST, CONFUSION = "first.npz", "last.npz", "confusion.json"
DICTIONARY, REFINED = "dictionary.npz", "refined.npz"


T = TypeVar("T")


@dataclass(frozen=True)
class Features:
    """One site's features, computed by one model; a label of -1 means no label."""

    site: str
    z: NDArray[np.float32]  # (N, d)
    labels: NDArray[np.int64]  # (N,)
    round: int
    model: str


@dataclass(frozen=True)
class NotedDictionary:
    """The notes of FedDaDiL's target: its points, its atoms' barycenter, and the distilled set."""

    points: NDArray[np.float32]  # (N, d)
    barycenter: NDArray[np.float32]  # (n, d)
    barycenter_labels: NDArray[np.int64]
    distilled: NDArray[np.float32]  # (C spc, d)
    distilled_labels: NDArray[np.int64]


@dataclass(frozen=True)
class LastStep:
    """The notes of a target's last step: points, and the classes given before and after."""

    points: NDArray[np.float32]  # (N, d)
    before: NDArray[np.int64]  # (N,)
    after: NDArray[np.int64]  # (N,)


@dataclass
class Noted:
    """The notes of a run: folders by method, seed and site.

    With several targets, a seed also names the target of the training, such as `0 on north`.
    """

    folders: dict[tuple[str, str, str], Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[str]:
        return sorted({site for _, _, site in self.folders})

    def confusions(
        self, method: str, target: str
    ) -> dict[str, tuple[list[str], NDArray[np.int64]]]:
        """Return class names and counts (C, C) of a target's last test, by seed."""
        found = self._each(CONFUSION, _confusion, lambda *which: which[::2] == (method, target))
        return {seed: content for (_, seed, _), content in found}

    def dictionary(self, method: str, seed: str) -> NotedDictionary | None:
        """Return the target's dictionary in the last round of one training."""
        found = self._each(DICTIONARY, _dictionary, lambda *which: which[:2] == (method, seed))
        return next((content for _, content in found), None)

    def last_step(self, method: str, seed: str) -> LastStep | None:
        """Return the target's last step after one training."""
        found = self._each(REFINED, _last_step, lambda *which: which[:2] == (method, seed))
        return next((content for _, content in found), None)

    def features(self, method: str, seed: str, name: str) -> list[Features]:
        """Return each site's features and labels in the first or last round of one training."""
        found = self._each(name, _features, lambda *which: which[:2] == (method, seed))
        site_features = [Features(site, *content) for (_, _, site), content in found]
        widths = {f.z.shape[1] for f in site_features}
        if len(widths) > 1:
            self.problems.append(f"the {name} of {method}, seed {seed} come from several models")
            return []
        return site_features

    def _each(
        self, name: str, read: Callable[[Path], T], wanted: Callable[[str, str, str], bool]
    ) -> Iterator[tuple[tuple[str, str, str], T]]:
        """Read the files of a name -> method, seed and site of each, and what is in it.

        A file that cannot be read is a problem, and is left out.
        """
        for which, folder in sorted(self.folders.items()):
            path = folder / name
            if wanted(*which) and path.is_file():
                try:
                    yield which, read(path)
                except (OSError, ValueError, TypeError, LookupError, zipfile.BadZipFile) as error:
                    self.problems.append(f"{path} cannot be read ({reason(error)})")


def collect(results: Results, run: Path, given: Sequence[Path] = ()) -> Noted:
    """Find the notes of a run's sites.

    Args:
        results: results of the run.
        run: the run's folder; a simulation and the demo leave their sites' folders in it.
        given: state directories of sites on this machine.

    Raises:
        RunError: a given directory holds no notes of this run.
    """
    noted = Noted()
    for place in [run / "sites", *sorted(run.glob("state/*"))]:
        noted.folders |= _below(place, results)
    for place in given:
        folders = _below(place, results)
        if not folders:
            raise RunError(
                f"{place} holds no notes of the run {results['name']!r}; give the --state-dir of a "
                "fedda-client that took part in it without --no-notes."
            )
        noted.folders |= folders
    return noted


def _below(place: Path, results: Results) -> dict[tuple[str, str, str], Path]:
    """Find the notes in a state directory, or in one site's folder of it."""
    known = {site["name"] for site in results["sites"]}
    folders = {}
    for method, trainings in results["trainings"].items():
        for training in trainings:
            name = f"{results['name']}.{label_of(results, training, method)}"
            below = place.glob(f"*/notes/{glob.escape(name)}")
            for folder in sorted(filter(Path.is_dir, [*below, place / "notes" / name])):
                site = folder.parent.parent.name
                if site in known:
                    folders[method, seed_of(results, training), site] = folder
    return folders


def _confusion(path: Path) -> tuple[list[str], NDArray[np.int64]]:
    table = json.loads(path.read_text())
    classes = [str(name) for name in table["classes"]]
    counts = np.array(table["counts"], dtype=np.int64)
    if counts.shape != (len(classes), len(classes)) or (counts < 0).any():
        raise ValueError(f"its counts are {counts.shape}, for {len(classes)} classes")
    return classes, counts


def _dictionary(path: Path) -> NotedDictionary:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        sets = [file[name].astype(np.float32) for name in ("points", "barycenter", "distilled")]
        labels = [file[f"{name}_labels"].astype(np.int64) for name in ("barycenter", "distilled")]
    points, barycenter, distilled = sets
    widths = {s.shape[1:] for s in sets}
    pairs = zip((barycenter, distilled), labels, strict=True)
    if points.ndim != 2 or len(widths) != 1 or any(y.shape != (len(z),) for z, y in pairs):
        raise ValueError("its arrays do not have the expected shapes")
    if not all(np.isfinite(s).all() and len(s) for s in sets):
        raise ValueError("its values are not finite")
    return NotedDictionary(points, barycenter, labels[0], distilled, labels[1])


def _last_step(path: Path) -> LastStep:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        z = file["points"].astype(np.float32)
        before, after = (file[name].astype(np.int64) for name in ("before", "after"))
    if z.ndim != 2 or not len(z) or {before.shape, after.shape} != {(len(z),)}:
        raise ValueError("its arrays do not have the expected shapes")
    if not np.isfinite(z).all() or min(before.min(), after.min()) < 0:
        raise ValueError("its values are not finite")
    return LastStep(z, before, after)


def _features(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64], int, str]:
    # Opened here, because numpy leaves a file open that it opened by name but could not read.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        z = file["features"].astype(np.float32)
        labels = file["labels"] if "labels" in file else np.full(len(z), -1)
        if "test_features" in file:
            z = np.concatenate([z, file["test_features"].astype(np.float32)])
            labels = np.concatenate([labels, file["test_labels"]])
        if z.ndim != 2 or labels.shape != (len(z),) or not np.isfinite(z).all():
            raise ValueError("its arrays do not have the expected shapes")
        return z, labels.astype(np.int64), int(file["round"]), str(file["model"])
