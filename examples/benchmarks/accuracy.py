"""Target accuracy on real data: KD3A, its ablations and its controls, seed by seed.

    python examples/benchmarks/accuracy.py --data DATA --set digits --table main

DATA holds the domains as `.npz` files in `digits/`, `amazon_review/` and
`office_caltech10_images64/`; they are not part of fedda. Every accuracy is that of the last round,
or of the round with the highest infomax, which needs no labels. Trainings are kept in --out, so the
same command continues where it was stopped; `--table` can be given more than once. The last line is
one JSON object: set -> table -> variant -> target -> [mean, standard deviation].

Tables:
    main        FedAvg (source-only), AdaBN, FedProx, KD3A `paper` and `official`
    control     FedAvg, AdaBN and KD3A `paper` only, for larger sizes (--images)
    ablation    KD3A without one of its parts: vote, focus, BatchNorm MMD, mixup
    rounds      r = 0.2 to 10 communication rounds per epoch, with the same number of epochs
    malicious   wrong labels at one source: four weightings, and training without that source
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedda.config.sections import Flat
from fedda.contrib.lab.comparison import Cell, Plan, Score, Variant
from fedda.contrib.lab.comparison.about import header
from fedda.contrib.lab.comparison.plan import BENCHMARK
from fedda.contrib.lab.comparison.statistics import by_target, difference, spread
from fedda.contrib.lab.comparison.tables import as_csv, as_markdown, columns, difference_text
from fedda.errors import DataError, FeddaError, RunError
from fedda.results.escaping import markdown

DRAW = 0  # seed of the images drawn from each domain; the same for every training
BASELINE = Variant("fedavg", label="FedAvg (source-only)")


@dataclass(frozen=True)
class Benchmark:
    """One data set: its trainings, reduced for a CPU and at full size."""

    folder: str
    domains: tuple[str, ...]
    epochs: int
    settings: Flat
    images: int  # per domain, drawn once; 0: all
    tests: int
    bad: str  # the source that gets wrong labels in `malicious`
    studied: tuple[str, ...]  # targets of all tables but `main`
    full: Flat  # settings that --full changes; it also takes all images
    kd3a: Flat = field(default_factory=dict)  # where the paper's table 5 differs from the preset

    def variant(self, label: str, preset: str = "paper", **more: Any) -> Variant:
        """KD3A with the settings of this data set in the paper's table 5, with changes."""
        settings = {**self.kd3a, **more.pop("settings", {})}
        return Variant("kd3a", preset, settings, label=label, **more)

    @property
    def paper(self) -> Variant:
        return self.variant("KD3A paper")


BENCHMARKS = {
    "digits": Benchmark(
        "digits",
        ("mnist", "mnistm", "svhn", "usps"),
        epochs=10,
        settings={
            "model.name": "digit-cnn",
            "input.channels": 3,
            "input.size": 16,
            "train.batch-size": 50,
            "train.lr": 0.01,
            "train.lr-end": 0.0005,
        },
        images=600,
        tests=1000,
        bad="mnist",
        studied=("usps", "mnistm"),
        full={"input.size": 32, "train.batch-size": 100},
    ),
    "amazon": Benchmark(
        "amazon_review",
        ("books", "dvd", "electronics", "kitchen"),
        epochs=12,
        settings={
            "model.name": "mlp",
            "model.hidden": "200,100",
            "train.batch-size": 50,
            "train.lr": 0.05,
            "train.lr-end": 0.001,
        },
        images=0,
        tests=0,
        bad="kitchen",
        studied=("books", "dvd", "electronics", "kitchen"),
        full={"model.hidden": "1000,500,100"},
        kd3a={"kd3a.mixup": 0.0},
    ),
    "office": Benchmark(
        "office_caltech10_images64",
        ("amazon", "caltech10", "dslr", "webcam"),
        epochs=12,
        settings={
            "model.name": "digit-cnn",
            "input.size": 24,
            "train.batch-size": 32,
            "train.lr": 0.01,
            "train.lr-end": 0.0005,
        },
        images=300,
        tests=0,
        bad="amazon",
        studied=("webcam",),
        full={"model.name": "resnet18", "input.size": 64},
        kd3a={"kd3a.gate.low": 0.8, "kd3a.gate.high": 0.95},
    ),
}


def main_table(b: Benchmark) -> list[Variant]:
    return [
        BASELINE,
        Variant("adabn", label="AdaBN"),
        Variant("fedprox", label="FedProx"),
        b.paper,
        b.variant("KD3A official", "official"),
    ]


def control_table(b: Benchmark) -> list[Variant]:
    return [BASELINE, Variant("adabn", label="AdaBN"), b.paper]


def ablation_table(b: Benchmark) -> list[Variant]:
    changes: dict[str, Flat] = {
        "no vote (mean of teachers)": {"kd3a.vote": "mean"},
        "no focus (weights by examples)": {"kd3a.weighting": "examples"},
        "neither": {"kd3a.vote": "mean", "kd3a.weighting": "examples"},
        "no BatchNorm MMD (linear)": {"kd3a.batchnorm": "linear"},
        "BatchNorm MMD as a loss (eq. 12)": {"kd3a.batchnorm": "loss"},
        "no mixup": {"kd3a.mixup": 0.0},
        "teachers vote with batch statistics": {"kd3a.teacher-batchnorm": "batch"},
    }
    changes = {k: v for k, v in changes.items() if not v.items() <= b.kd3a.items()}
    made = [b.variant(f"KD3A, {k}", settings=c) for k, c in changes.items()]
    return [BASELINE, b.paper, *made]


def rounds_table(b: Benchmark) -> list[Variant]:
    """The same number of epochs for all variants, in more or fewer rounds."""
    variants = []
    for r in (0.2, 0.5, 1, 2, 10):
        own: Flat = {"train.rounds-per-epoch": float(r), "rounds": max(round(b.epochs * r), 1)}
        own = {} if r == 1 else own  # the same training as in `main`
        variants.append(Variant("fedavg", settings=own, label=f"FedAvg, r = {r:g}"))
        variants.append(b.variant(f"KD3A, r = {r:g}", settings=own))
    return variants


def malicious_table(b: Benchmark) -> list[Variant]:
    weightings = {
        "focus": "focus",
        "examples": "by examples",
        "h-divergence": "H-divergence",
    }
    variants = [BASELINE]
    for percent in (15, 30, 50):
        poison = {b.bad: float(percent)}
        variants.append(Variant("fedavg", label=f"FedAvg, {percent} %", poison=poison))
        for weighting, name in weightings.items():
            own: Flat = {} if weighting == "focus" else {"kd3a.weighting": weighting}
            label = f"KD3A {name}, {percent} %"
            variants.append(b.variant(label, settings=own, poison=poison))
    without = (b.bad,)
    variants.append(Variant("fedavg", label=f"FedAvg without {b.bad}", without=without))
    variants.append(b.variant(f"KD3A without {b.bad}", without=without))
    return variants


TABLES = {
    "main": main_table,
    "control": control_table,
    "ablation": ablation_table,
    "rounds": rounds_table,
    "malicious": malicious_table,
}


def prepare(source: Path, out: Path, images: int, tests: int) -> None:
    """Draw each domain's images once and write them where the trainings read them.

    Domains without a split are used as in the literature: the target trains on all its images
    without labels, and is tested on the same images.

    Raises:
        DataError: the folder holds no domains.
        RunError: the images drawn before differ from those that would be drawn now.
    """
    files = domains(source)
    out.mkdir(parents=True, exist_ok=True)
    if not any(_has_split(path) for path in files):  # tables mark the methods that this concerns
        (out / BENCHMARK).write_text(json.dumps({"options": {"transductive": True}}))
    for path in files:
        made = out / path.name
        if made.is_file():
            _same_draw(path, made, images, tests)
            continue
        part = made.with_suffix(".part.npz")
        np.savez(part, **_draw(path, images, tests))
        part.replace(made)


def domains(folder: Path) -> list[Path]:
    """The .npz files of a folder, one per domain.

    Raises:
        DataError: the folder has none.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise DataError(
            f"{folder} holds no .npz files; give their folder, or the one above it, as --data."
        )
    return files


def _has_split(path: Path) -> bool:
    with np.load(path) as file:
        return any(name.startswith("x_") and name.split("_")[1] == "test" for name in file.files)


def _draw(path: Path, images: int, tests: int, only: str = "") -> dict[str, Any]:
    """Draw a domain's arrays, by name; only those whose names begin with `only`."""
    with np.load(path) as file:
        names = set(file.files)
        arrays = {k: file[k] for k in file if k.startswith(only) and not k.startswith("id_")}
    for letter in {"x", "y"} & set(arrays):
        both = arrays.pop(letter)
        arrays |= {f"{letter}_train": both, f"{letter}_test": both}
    for split, most in (("train", images), ("test", tests)):
        if most and names & {"x", f"x_{split}"}:
            draws = np.random.default_rng([DRAW, split == "test"])
            chosen = draws.permutation(len(arrays[f"y_{split}"]))[:most]
            for name in {f"x_{split}", f"y_{split}"} & set(arrays):
                arrays[name] = arrays[name][chosen]
    return arrays


def _same_draw(path: Path, made: Path, images: int, tests: int) -> None:
    labels = _draw(path, images, tests, only="y")
    with np.load(made) as before:
        if not all(k in before and np.array_equal(before[k], y) for k, y in labels.items()):
            raise RunError(
                f"{made} was drawn from other data than {path}, or other images of it; choose "
                "another --out, or remove it."
            )


def plan(args: argparse.Namespace, name: str, table: str) -> Plan:
    """The trainings of one table."""
    b = BENCHMARKS[name]
    out = args.out / size(args, name)
    images, tests = (0, 0) if args.full else (args.images or b.images, b.tests)
    prepare(args.data / b.folder, out / "data", images, tests)
    settings: Flat = {"rounds": b.epochs, **b.settings, **(b.full if args.full else {})}
    if args.epochs:
        settings["rounds"] = args.epochs
    variants = TABLES[table](b)
    targets = b.domains if table == "main" else b.studied
    if table == "malicious":
        targets = tuple(t for t in targets if t != b.bad)[:1]
    if args.target:
        targets = tuple(args.target)
    return Plan(out / "data", out, variants, targets, args.seeds, settings, threads=args.threads)


def size(args: argparse.Namespace, name: str) -> str:
    """The data set's name, and its size if that is not the reduced one."""
    return f"{name}{'-full' if args.full else f'-{args.images}' if args.images else ''}"


def against_fedavg(scores: Sequence[Score]) -> str:
    """KD3A minus FedAvg with the same rounds, wrong labels and sources, if a table has both.

    The two labels end in the same words: `KD3A focus, 30 %` and `FedAvg, 30 %`.
    """
    table = by_target(scores)
    own = {name.partition(" ")[2]: name for name in table if name.startswith("FedAvg without")}
    own |= {name.partition(", ")[2]: name for name in table if name.startswith("FedAvg, ")}
    heads, rows = columns(table), []
    for name, row in table.items():
        same = own.get(name.partition(" ")[2]) or own.get(name.partition(", ")[2])
        if same and same != name:
            pairs = [difference(row.get(h, {}), table[same].get(h, {})) for h in heads]
            rows.append([f"{name} − {same}", *(difference_text(d) if d else "–" for d in pairs)])
    if not rows:
        return ""
    lines = ["", "### Minus FedAvg under the same conditions, paired by seed", ""]
    return "\n".join([*lines, *markdown(["", *heads], rows)]) + "\n"


def note(what: str, cell: Cell, value: Any) -> None:
    if what == "done":
        where = f"{cell.variant.name}, {cell.target}, seed {cell.seed}"
        print(f"{where}: {value or 'done'}", flush=True)


def publish(
    stem: str, text: str, scores: Sequence[Score], failed: Mapping[Cell, str], *folders: Path | None
) -> None:
    """Print tables and what failed, and write tables and scores to the folders that are given."""
    for folder in filter(None, folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.md").write_text(text)
        (folder / f"{stem}.csv").write_text(as_csv(scores))
    print(text)
    for cell, error in failed.items():
        print(f"FAILED {cell.name}: {error}", flush=True)


def figures(table: Mapping[str, Mapping[str, Mapping[int, float]]]) -> dict[str, Any]:
    """Means and standard deviations, rounded, as the JSON object holds them."""
    return {
        variant: {
            target: [round(s.mean, 4), None if s.std is None else round(s.std, 4)]
            for target, s in ((t, spread(v)) for t, v in row.items())
        }
        for variant, row in table.items()
    }


def seeds(text: str) -> list[int]:
    return [int(s) for s in text.split(",")]


def typed(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> str:
    """The options that differ from their defaults, as they are typed in a shell."""
    words = []
    for name in names:
        value, flag = getattr(args, name), "-c" if name == "changes" else f"--{name}"
        if value == parser.get_default(name):
            continue
        if name == "seeds":
            value = ",".join(map(str, value))
        for each in value if isinstance(value, list) else [value]:
            text = f"{each:g}" if isinstance(each, float) else str(each)
            words += [flag] if each is True else [flag, shlex.quote(text)]
    return "".join(f" {word}" for word in words)


@contextmanager
def plainly() -> Iterator[None]:
    """Print an error that the user can correct as one sentence, without a traceback."""
    try:
        yield
    except FeddaError as error:
        sys.exit(f"error: {error}")


def main(arguments: Sequence[str] | None = None) -> None:
    lines = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        description="\n\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--set", choices=BENCHMARKS, action="append", help="default: all")
    parser.add_argument("--table", choices=TABLES, action="append", help="default: all")
    parser.add_argument("--target", action="append", help="default: the table's targets")
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--epochs", type=int, default=0, help="default: the data set's")
    parser.add_argument("--images", type=int, default=0, help="per domain; default: the set's")
    parser.add_argument("--full", action="store_true", help="all images, at the papers' size")
    out = Path("runs/accuracy")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the tables and CSV files here")
    jobs = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="trainings at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    args = parser.parse_args(arguments)

    answer: dict[str, dict[str, Any]] = {}
    for name in args.set or BENCHMARKS:
        for table in args.table or TABLES:
            made = plan(args, name, table)
            failed = made.run(args.jobs, note)
            scores = made.scores()
            stem = f"{size(args, name)}-{table}"
            command = f"python examples/benchmarks/accuracy.py --data DATA --set {name}"
            command += f" --table {table}"
            command += typed(parser, args, "full", "images", "epochs", "target", "seeds", "threads")
            text = header(made, stem, command) + as_markdown(scores, BASELINE.name, made.targets)
            text += against_fedavg(scores)
            publish(stem, text, scores, failed, made.out, args.results)
            answer.setdefault(name, {})[table] = figures(by_target(scores))
    print(json.dumps(answer))


if __name__ == "__main__":
    with plainly():
        main()
