"""Targets whose classes are less even than the sources': what methods lose there, and estimates.

    python examples/benchmarks/shares.py --data DATA

DATA holds the data sets as for grand.py. Each domain of a set is the target once, and for each seed
half of its classes, drawn by the seed, keep a fifth of their images; in `heart` classes are
uneven as they came. Every method has the set's preset and its own defaults, KD3A, SHOT and DECISION
once with even shares and once with estimated ones, and KD3A also where its teachers agree (`auto`).
Trainings are kept in --out, so the same command goes on where it was stopped. Beside them FedAvg's
model gives estimates of the target's shares without labels (label_shift.py), which are compared
with the true ones.

The last line is one JSON object, by set:

    trainings    how many targets and seeds
    gain         accuracy over FedAvg's in points, by method: mean, and of the worst target and seed
    balanced     the same of the mean accuracy over the classes
    losses       how often a method is more than two points below FedAvg, and how often of these no
                 doubt of its training was told; `refined` has no doubts of its own
    distance     of each estimate from the true shares, in points of total variation: mean, largest
    correction   points of accuracy that FedAvg's answers gain if they are corrected to an estimate:
                 mean, least; `true` with the true shares
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accuracy
import label_shift
import numpy as np
import sets
import torch
from torch import Tensor

from fedda import data, models, refining
from fedda.contrib.lab.comparison import Cell, Plan, Variant
from fedda.contrib.lab.comparison.plan import BENCHMARK
from fedda.data import Labelled
from fedda.models import Model, refined
from fedda.results.escaping import markdown
from fedda.results.remarks import refined_file
from fedda.train import generator

SETS = ("surf", "googlenet", "digits", "heart")
UNEVEN = ("heart",)  # sets whose classes are uneven as they came
KEPT = 0.2  # share of the images that a rare class keeps
LOSS = 2.0  # points below FedAvg that count as a loss
STEM = "shares"
FEDAVG = Variant("fedavg", label="FedAvg")
REFINED = "FedAvg, refined"
VARIANTS = [
    FEDAVG,
    Variant("adabn", label="AdaBN"),
    Variant("kd3a", label="KD3A"),
    Variant("shot", settings={"shot.shares": "even"}, label="SHOT, even"),
    Variant("shot", settings={"shot.shares": "estimated"}, label="SHOT, estimated"),
    Variant("decision", settings={"decision.shares": "even"}, label="DECISION, even"),
    Variant("decision", settings={"decision.shares": "estimated"}, label="DECISION, estimated"),
    Variant("feddadil", label="FedDaDiL-R"),
]
Points = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """What one target and seed say, in points.

    Attributes:
        right: accuracy, by method.
        balanced: mean accuracy over the classes, by method.
        doubted: whether a method's training has a doubt.
        distance: of each estimate of the shares from the true ones.
        correction: what FedAvg's answers gain by each estimate.
    """

    right: Points
    balanced: Points
    doubted: Mapping[str, bool]
    distance: Points
    correction: Points


def rare(y: np.ndarray, classes: int, name: str) -> np.ndarray:
    """Images that are left if half of the classes keep KEPT of theirs -> indices."""
    draws = generator(name, "thinned")
    few = torch.randperm(classes, generator=draws)[: classes // 2]
    u = torch.rand(len(y), generator=draws)
    return (~torch.isin(torch.as_tensor(y), few) | (u < KEPT)).nonzero()[:, 0].numpy()


def thin(source: Path, made: Path, name: str) -> None:
    """Write a domain's file with rare classes, unless it is there."""
    if made.is_file():
        return
    with np.load(source) as file:
        arrays = dict(file)
    classes = int(arrays["y_train"].max()) + 1
    for split in ("train", "test"):
        if f"y_{split}" in arrays:
            chosen = rare(arrays[f"y_{split}"], classes, name)
            arrays |= {f"{k}_{split}": arrays[f"{k}_{split}"][chosen] for k in "xy"}
    part = made.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.replace(made)


def plans(args: argparse.Namespace, name: str) -> Iterator[tuple[str, Plan]]:
    """The trainings of each target and seed of one set, with the target's name."""
    whole = sets.plan(args, name)
    chosen = {FEDAVG.method, *(args.method or (v.method for v in VARIANTS))}
    variants = [v for v in VARIANTS if v.method in chosen]
    for seed in args.seeds:
        for target in whole.targets:
            out = args.out / f"{name}-{target}-{seed}"
            place = out / "data"
            place.mkdir(parents=True, exist_ok=True)
            for domain, path in data.domains(whole.data).items():
                if domain == target and name not in UNEVEN:
                    thin(path, place / path.name, f"{name} {target} {seed}")
                elif not (place / path.name).exists():
                    (place / path.name).symlink_to(path.absolute())
            if (about := whole.data / BENCHMARK).is_file():
                shutil.copy(about, place / BENCHMARK)
            made = replace(whole, data=place, out=out, targets=[target], seeds=[seed])
            yield target, replace(made, variants=variants)


def images(place: Path, meta: models.Meta) -> tuple[Labelled, Labelled]:
    """A site's training images, and its tests or the same images."""
    form = data.Reading().form(meta.inputs)
    tests = data.load_evaluation(place, classes=meta.classes, **form)
    known = data.load_source(place, **form)
    assert isinstance(known, Labelled)
    return known, known if tests is None else tests


def predictors(plan: Plan, cell: Cell) -> tuple[Model, Model | None]:
    """The model that a training's target predicts with, and the refined one if there is one."""
    results = plan.results(cell)
    assert results is not None, "it has finished"
    (training,) = results["trainings"][cell.variant.method]
    path = plan.folder(cell) / "sites" / refined_file(results, training)
    if not path.is_file():
        return models.load(plan.folder(cell) / "model.safetensors")[0], None
    made = models.load(path)[0]
    return refined.members_of(made)[-1], made


def right(p: Tensor, y: Tensor) -> float:
    return 100 * float((p.argmax(dim=1) == y).double().mean())


def balanced(p: Tensor, y: Tensor) -> float:
    """Mean accuracy over the classes that there are."""
    return statistics.fmean(right(p[y == c], y[y == c]) for c in y.unique())


def measure(plan: Plan, target: str) -> Measured:
    """Measure one target and seed, whose trainings have finished."""
    cells = {cell.variant.name: cell for cell in plan.cells()}
    first = cells[FEDAVG.name]
    fedavg, meta = models.load(plan.folder(first) / "model.safetensors")
    sites = {name: images(path, meta) for name, path in data.domains(plan.data).items()}
    known, tests = sites.pop(target)
    inputs = refining.inputs(fedavg, tests.x)
    p: dict[str, Tensor] = {}
    doubted = {}
    for name, cell in cells.items():
        model, last = predictors(plan, cell)
        p[name] = models.predict(model, inputs)
        (training,) = (plan.results(cell) or {})["trainings"][cell.variant.method]
        doubted[name] = bool(training["doubts"])
        if cell is first:
            p[REFINED] = p[name] if last is None else models.predict(last, inputs)
    here = models.predict(fedavg, refining.inputs(fedavg, known.x)).double()
    found, prior = guesses(fedavg, here, known.y, sites)
    true = found["true"]
    after = {n: label_shift.corrected(here, q.clamp_min(1e-3), prior) for n, q in found.items()}
    return Measured(
        {name: right(q, tests.y) for name, q in p.items()},
        {name: balanced(q, tests.y) for name, q in p.items()},
        doubted,
        {n: 100 * label_shift.distance(q, true) for n, q in found.items() if n != "true"},
        {n: right(q, known.y) - right(here, known.y) for n, q in after.items()},
    )


def guesses(
    model: Model, p: Tensor, y: Tensor, sources: Mapping[str, tuple[Labelled, Labelled]]
) -> tuple[dict[str, Tensor], Tensor]:
    """Estimates of the target's shares, by name, with the true ones, and the sources' shares.

    Args:
        model: FedAvg's.
        p: (N, C) what it predicts for the target's images.
        y: (N,) their labels, for the true shares alone.
        sources: of each, images to train on and to test on.
    """
    C = p.shape[1]
    prior = shares(torch.cat([train.y for train, _ in sources.values()]), C)
    y_s = torch.cat([tests.y for _, tests in sources.values()])
    p_s = torch.cat(
        [models.predict(model, refining.inputs(model, t.x)) for _, t in sources.values()]
    ).double()
    log_s, log_p = (a.clamp_min(label_shift.LEAST).log() for a in (p_s, p))
    t, b = label_shift.bcts(log_s, y_s)
    J, mu = label_shift.confusion(p_s, y_s), shares(p.argmax(dim=1), C)
    found = {
        "even": torch.full((C,), 1 / C, dtype=torch.float64),
        "sources'": prior,
        "predictions": mu,
        "mean prediction": p.mean(dim=0),
        "EM": label_shift.em(p, prior),
        "EM, BCTS": label_shift.em((log_p * t + b).softmax(dim=1), shares(y_s, C)),
        "BBSE": label_shift.bbse(J, mu),
        "RLLS": label_shift.bbse(J, mu, label_shift.RIDGE),
        "true": shares(y, C),
    }
    return found, prior


def shares(y: Tensor, classes: int) -> Tensor:
    return torch.bincount(y, minlength=classes).double() / len(y)


def spread(values: Sequence[float], worst: Any = min) -> list[float]:
    return [round(statistics.fmean(values), 1), round(worst(values), 1)]


def figures(every: Sequence[Measured]) -> dict[str, Any]:
    """All that the last line says of one set."""
    base = FEDAVG.name
    names = [name for name in every[0].right if name != base]
    gain = {n: [m.right[n] - m.right[base] for m in every] for n in names}
    level = {n: [m.balanced[n] - m.balanced[base] for m in every] for n in names}
    silent = {
        n: sum(g < -LOSS and not m.doubted.get(n) for g, m in zip(gain[n], every, strict=True))
        for n in names
    }
    return {
        "trainings": len(every),
        "gain": {n: spread(v) for n, v in gain.items()},
        "balanced": {n: spread(v) for n, v in level.items()},
        "losses": {n: [sum(g < -LOSS for g in v), silent[n]] for n, v in gain.items()},
        "distance": {n: spread([m.distance[n] for m in every], max) for n in every[0].distance},
        "correction": {n: spread([m.correction[n] for m in every]) for n in every[0].correction},
    }


def report(found: Mapping[str, Any], base: Mapping[str, float], command: str) -> list[str]:
    """The text: methods by set, and estimates by set."""

    def cell(values: Sequence[float]) -> str:
        return f"{values[0]:+.1f} / {values[1]:+.1f}"

    lines = [f"## {STEM}", "", f"    {command}", ""]
    lines += [
        "Points over FedAvg's accuracy: mean / worst target and seed; then of the mean accuracy "
        "over the classes; and how often it is more than two points below FedAvg (of these without "
        "a doubt).",
        "",
    ]
    heads = ["", *(f"{name} ({f['trainings']}), {base[name]:.1f}" for name, f in found.items())]
    names = next(iter(found.values()))
    rows = [
        [n]
        + [
            f"{cell(f['gain'][n])}; {cell(f['balanced'][n])}; "
            f"{f['losses'][n][0]} ({f['losses'][n][1]})"
            for f in found.values()
        ]
        for n in names["gain"]
    ]
    lines += [*markdown(heads, rows), ""]
    lines += [
        "Estimates of the target's shares by FedAvg's model: points of total variation from the "
        "true ones, mean / largest; and points of accuracy that correcting FedAvg's answers by "
        "them gains, mean / least.",
        "",
    ]
    rows = []
    for n in names["correction"]:
        row = [n]
        for f in found.values():
            off = f["distance"].get(n)
            said = "0" if off is None else f"{off[0]:.1f} / {off[1]:.1f}"
            row.append(f"{said}; {cell(f['correction'][n])}")
        rows.append(row)
    return [*lines, *markdown(["", *found], rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sets.add_options(parser, SETS, Path("runs/shares"))
    parser.add_argument("--method", action="append", help="default: all; FedAvg is always there")
    args = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    base: dict[str, float] = {}
    for name in args.set or SETS:
        every = []
        for target, plan in plans(args, name):
            failed = plan.run(args.jobs, accuracy.note)
            for cell, error in failed.items():
                print(f"{name}, {cell.name} failed: {error}", flush=True)
            if not failed:
                every.append(measure(plan, target))
        if every:
            found[name] = figures(every)
            base[name] = statistics.fmean(m.right[FEDAVG.name] for m in every)
    command = "python examples/benchmarks/shares.py --data DATA"
    command += accuracy.typed(parser, args, "set", "target", "rounds", "images", "seeds", "method")
    text = "\n".join(report(found, base, command)) + "\n"
    for folder in filter(None, (args.out, args.results)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{STEM}.md").write_text(text)
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
