"""What a target's last step gains: FedAvg, AdaBN and KD3A, before and after, on every target.

    python examples/benchmarks/refine.py --data DATA

DATA holds the data sets as for grand.py. FedAvg and KD3A are trained as there, and kept in --out.
Then each target takes its last step with the images that it adapts to, without labels: with all of
them, and with subsets whose classes or number differ. AdaBN is FedAvg's model with the target's
statistics. Settings of the step were chosen on SETS with the seeds 1 and 2; `--set` takes others.

The last line is one JSON object, in points of accuracy over FedAvg's:

    trainings         how many targets and seeds
    mean_gain         by what is compared, with all images
    worst_gain        likewise, of the worst target and seed
    below_minus_1     how many of them lose more than one point
    sets              [mean, worst] of each, by set
    subsets           likewise [mean, worst, below_minus_1], by subset
    unseen            mean gain on test images that no step has seen, where a set has them
    milliseconds      of one step, median
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import sets
import torch
from torch import Tensor

from fedda import data, models, refining
from fedda.contrib.lab.comparison import Plan, Variant
from fedda.data import Labelled
from fedda.errors import RefineError
from fedda.maths.refine import Shares, Strength
from fedda.models import Model
from fedda.results.escaping import markdown
from fedda.train import generator

SETS = ("googlenet", "surf", "rotated", "amazon", "digits", "office")
FEDAVG, KD3A = Variant("fedavg"), Variant("kd3a")
BEFORE = ("FedAvg", "AdaBN", "KD3A", "mean of FedAvg and AdaBN")
AFTER = ("FedAvg refined", "FedAvg refined, strong", "FedAvg refined, even shares", "KD3A refined")
STEM = "refine"
Gains = dict[str, float]


def subsets(y: Tensor, classes: int, name: str) -> Iterator[tuple[str, Tensor]]:
    """Which images a target has: all, few, or with other shares of the classes -> name, indices."""
    draws, every = generator(name, "subsets"), torch.arange(len(y))
    yield "all images", every
    order = torch.randperm(len(y), generator=draws)
    for n in (40, 100, 500):
        if n < len(y):
            yield f"{n} images", order[:n]
    u, of = torch.rand(len(y), generator=draws), torch.randperm(classes, generator=draws)
    half = torch.isin(y, of[: max(1, classes // 2)])
    if classes > 2:
        yield "half of the classes absent", every[~half]
    yield "half of the classes at a fifth", every[~half | (u < 0.2)]
    long = 50.0 ** (-torch.arange(classes) / (classes - 1))  # fifty times rarer in the end
    yield "long tail", every[u < long[of.argsort()][y]]


def answers(members: Mapping[str, Model], x: Tensor, shape: tuple[int, ...], config: Any) -> Any:
    """What each way predicts for a target's inputs, by name -> (N, C) and the refined models."""
    fedavg, kd3a = members["FedAvg"], members["KD3A"]
    own = refining.with_own_statistics(fedavg, x) if models.batchnorms(fedavg) else fedavg
    plain = {"FedAvg": fedavg, "AdaBN": own, "KD3A": kd3a}
    p = {name: models.predict(m, x) for name, m in plain.items()}
    p["mean of FedAvg and AdaBN"] = (p["FedAvg"] + p["AdaBN"]) / 2
    steps: dict[str, tuple[Model | None, Model, Strength, Shares]] = {
        "FedAvg refined": (None, fedavg, "careful", "auto"),
        "FedAvg refined, strong": (None, fedavg, "strong", "auto"),
        "FedAvg refined, even shares": (None, fedavg, "careful", "even"),
        "KD3A refined": (fedavg, kd3a, "careful", "auto"),
    }
    made = {}
    for name, (first, last, strength, shares) in steps.items():
        try:
            made[name] = refining.refined_model(first, last, x, config, shape, strength, shares)
            p[name] = made[name].after
        except RefineError:  # the model stays as it is
            p[name] = p["FedAvg" if first is None else "KD3A"]
    return p, made


def right(p: Tensor, y: Tensor) -> float:
    return 100 * float((p.argmax(dim=1) == y).double().mean())


def measure(plan: Plan, target: str, seed: int) -> tuple[dict[str, Gains], Gains, float]:
    """Gains of one target and seed: by subset, on unseen images, and the seconds of a step."""
    (fedavg, kd3a) = (next(c for c in replace(plan, variants=[v], targets=[target], seeds=[seed])
                           .cells()) for v in (FEDAVG, KD3A))  # fmt: skip
    loaded = {}
    for name, cell in (("FedAvg", fedavg), ("KD3A", kd3a)):
        loaded[name], meta = models.load(plan.folder(cell) / "model.safetensors")
    place, form = data.domains(plan.data)[target], data.Reading().form(meta.inputs)
    images = data.load_source(place, **form)
    tests = data.load_evaluation(place, classes=meta.classes, **form)
    assert isinstance(images, Labelled)
    name, found, unseen, seconds = f"{plan.out.name} {target} {seed}", {}, {}, 0.0
    inputs = refining.inputs(loaded["FedAvg"], images.x)
    for subset, i in subsets(images.y, len(meta.classes), name):
        start = time.perf_counter()
        p, made = answers(loaded, inputs[i], meta.shape, meta.config)
        base = right(p["FedAvg"], images.y[i])
        found[subset] = {n: right(q, images.y[i]) - base for n, q in p.items()}
        if subset == "all images":
            seconds = (time.perf_counter() - start) / len(AFTER)
            new = tests is not None and not torch.equal(tests.x[:32], images.x[:32])
            if tests is not None and new:
                x = refining.inputs(loaded["FedAvg"], tests.x)
                base = right(models.predict(loaded["FedAvg"], x), tests.y)
                for n, step in made.items():
                    unseen[n] = right(models.predict(step.model, x), tests.y) - base
            found[subset]["accuracy"] = right(p["FedAvg"], images.y[i])
    return found, unseen, seconds


def summary(values: Sequence[float]) -> list[float]:
    """Mean, worst, and how many lose more than a point."""
    return [
        round(statistics.fmean(values), 2),
        round(min(values), 1),
        sum(v < -1 for v in values),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sets.add_options(parser, SETS, Path("runs/refine"))
    args = parser.parse_args(arguments)
    rows: list[tuple[str, dict[str, Any], Gains, float]] = []
    for name in args.set or SETS:
        plan = replace(sets.plan(args, name), variants=[FEDAVG, KD3A])
        for cell, error in plan.run(args.jobs, accuracy.note).items():
            print(f"{name}, {cell.name} failed: {error}", flush=True)
        for seed in plan.seeds:
            for target in plan.targets:
                rows.append((name, *measure(plan, target, seed)))
    names = [*BEFORE[1:], *AFTER]
    every = {n: [found["all images"][n] for _, found, _, _ in rows] for n in names}
    by_name = {
        s: {n: summary([f["all images"][n] for t, f, _, _ in rows if t == s])[:2] for n in names}
        for s in dict.fromkeys(t for t, *_ in rows)
    }
    kinds = dict.fromkeys(subset for _, found, _, _ in rows for subset in found)
    by_subset = {
        kind: {n: summary([f[kind][n] for _, f, _, _ in rows if kind in f]) for n in names}
        for kind in kinds
    }
    new = {n: [u[n] for _, _, u, _ in rows if n in u] for n in AFTER}
    found = {
        "trainings": len(rows),
        "mean_gain": {n: summary(v)[0] for n, v in every.items()},
        "worst_gain": {n: summary(v)[1] for n, v in every.items()},
        "below_minus_1": {n: summary(v)[2] for n, v in every.items()},
        "sets": by_name,
        "subsets": by_subset,
        "unseen": {n: summary(v)[0] for n, v in new.items() if v},
        "milliseconds": round(1000 * statistics.median(s for *_, s in rows)),
    }
    command = "python examples/benchmarks/refine.py --data DATA"
    command += accuracy.typed(parser, args, "set", "target", "rounds", "images", "seeds")
    text = "\n".join(report(found, rows, command)) + "\n"
    for folder in filter(None, (args.out, args.results)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{STEM}.md").write_text(text)
    print(text)
    print(json.dumps(found))


def report(found: Mapping[str, Any], rows: Sequence[Any], command: str) -> list[str]:
    """The text: gains by set and by subset, as mean and worst."""

    def cell(values: Sequence[float]) -> str:
        return f"{values[0]:+.1f} / {values[1]:+.1f}"

    names = list(found["mean_gain"])
    lines = [f"## {STEM}", "", f"    {command}", ""]
    lines += ["Points over FedAvg's accuracy on the same images: mean / worst target and seed.", ""]
    by_set = []
    for name, values in found["sets"].items():
        own = [f["all images"]["accuracy"] for t, f, _, _ in rows if t == name]
        by_set.append([f"{name} ({len(own)})", f"{statistics.fmean(own):.1f}"])
        by_set[-1] += [cell(values[n]) for n in names]
    total = {n: [found["mean_gain"][n], found["worst_gain"][n]] for n in names}
    by_set.append(["*all*", "", *(cell(total[n]) for n in names)])
    lines += [*markdown(["", "FedAvg", *names], by_set), ""]
    by_kind = [
        [kind, *(f"{cell(values[n])} ({values[n][2]})" for n in names)]
        for kind, values in found["subsets"].items()
    ]
    lines += ["In brackets how many lose more than a point.", ""]
    lines += [*markdown(["images of the target", *names], by_kind), ""]
    if found["unseen"]:
        said = ", ".join(f"{n} {v:+.1f}" for n, v in found["unseen"].items())
        lines += [f"On test images that no step has seen: {said}.", ""]
    return [*lines, f"A step takes {found['milliseconds']} ms (median)."]


if __name__ == "__main__":
    with accuracy.plainly():
        main()
