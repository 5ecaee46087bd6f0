"""Writing an import: one folder per domain in OUT, all of them or none.

Domains are written to OUT/.unfinished, which nothing reads, and moved to OUT when all are complete.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedda.contrib.benchmarks.common import (
    ByClass,
    ImportedImages,
    ImportRequest,
    Options,
    Sites,
    count,
)
from fedda.contrib.benchmarks.splits import unique_names
from fedda.data.sets import Progress
from fedda.files import filling, place
from fedda.settings.presets import FOR_ALL

_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Result:
    """What an import wrote.

    Attributes:
        out: the folder with a folder per domain.
        counts: per domain the numbers of training and of test examples.
        classes: the number of classes.
        split: which examples train and which test, in words.
        settings: what a run over all domains must set, as options of `fedda run`.
        notes: sentences on what a user should know.
    """

    out: Path
    counts: dict[str, tuple[int, int]]
    classes: int
    split: str
    settings: tuple[str, ...]
    notes: tuple[str, ...]


def write(request: ImportRequest, sites: Sites, out: Path, progress: Progress | None) -> Result:
    """Write every domain to OUT/<domain>, and how it was created to OUT/benchmark.json.

    Raises:
        DataError: OUT is not empty, or a file of the benchmark cannot be used; whatever was
            written is then removed.
    """
    unfinished = out / _UNFINISHED
    with filling(out, {_UNFINISHED: "an import that did not end"}):
        unfinished.mkdir()
        total = sum(map(len, sites.values()))
        counts: dict[str, tuple[int, int]] = {}
        shapes: set[tuple[int, ...]] = set()
        classes, done = 0, 0

        def step() -> None:
            nonlocal done
            done += 1
            if progress:
                progress(done, total)

        for domain, site in sites.items():
            folder = unfinished / domain
            folder.mkdir()
            if isinstance(site, ImportedImages):
                placer = _Placer(request.options)
                for half, by_class in (("train", site.train), ("test", site.test)):
                    placer.place_all(folder / half, by_class, step)
                request.notes.extend(n for n in placer.notes if n not in request.notes)
                counts[domain] = (count(site.train), count(site.test))
                classes = max(classes, len(site.train))
            else:
                arrays: dict[str, Any] = site(step)
                np.savez_compressed(folder / "data.npz", **arrays)
                shapes.add(arrays["x_train"].shape[1:] if "x_train" in arrays else (0,))
                counts[domain] = (len(arrays["y_train"]), len(arrays["y_test"]))
                classes = max(classes, len(arrays["classes"]))
        split, notes = split_of(request), tuple(request.notes)
        links = ["--follow-links"] if request.options.files == "symlink" else []
        settings = *_settings(request.benchmark.name, shapes), *links
        result = Result(out, counts, classes, split, settings, notes)
        (unfinished / "benchmark.json").write_text(json.dumps(_record(request, result), indent=2))
        for finished in sorted(unfinished.iterdir()):
            finished.rename(out / finished.name)
        unfinished.rmdir()
    return result


def split_of(request: ImportRequest) -> str:
    """Which examples train and which test, in words."""
    if request.options.transductive:
        return "transductive: every example is in the training set, and tested on"
    if request.options.test_share is not None:
        share = f"{request.options.test_share:.0%} of every class"
        return f"{share} is for testing, drawn with seed {request.options.seed}"
    return request.benchmark.split.format(seed=request.options.seed)


def _settings(name: str, shapes: set[tuple[int, ...]]) -> list[str]:
    """A run's settings for a benchmark's arrays of these shapes; without shapes, for images."""
    if not shapes:
        return ["--preset", "photos"]
    if any(len(shape) == 1 for shape in shapes):
        model = FOR_ALL.get(name, {}).get("model.name")  # a network for images takes no vectors
        return ["--preset", name if model and model.value == "mlp" else "vectors"]
    if len(shapes) == 1 and all(shape[0] == shape[1] for shape in shapes):
        return []
    if name in FOR_ALL:
        return ["--preset", name]
    channels = 3 if any(len(shape) == 3 for shape in shapes) else 1
    side = max(side for shape in shapes for side in shape[:2])
    return ["-c", f"input.size={side}", "-c", f"input.channels={channels}"]


def _record(request: ImportRequest, result: Result) -> dict[str, Any]:
    options = {k: v for k, v in asdict(request.options).items() if v is not None}
    sizes = {d: {"train": a, "test": b} for d, (a, b) in result.counts.items()}
    return {
        "benchmark": request.benchmark.name,
        "options": options,
        "split": result.split,
        "classes": result.classes,
        "domains": sizes,
        "notes": list(result.notes),
    }


class _Placer:
    """Links or copies image files to OUT, unchanged."""

    def __init__(self, options: Options) -> None:
        self.how = options.files or "link"
        self.notes: list[str] = []

    def place_all(self, folder: Path, by_class: ByClass, step: Callable[[], None]) -> None:
        for name, files in by_class.items():
            (folder / name).mkdir(parents=True)
            for file, new in zip(files, unique_names(files), strict=True):
                self._place(file, folder / name / new)
                step()

    def _place(self, file: Path, new: Path) -> None:
        file = file.resolve()
        if self.how == "symlink":
            new.symlink_to(file)
            return
        if self.how == "copy":
            shutil.copyfile(file, new)
        elif not place(file, new):
            self.how = "copy"
            self.notes.append("images were copied, since they cannot be linked from OUT")
