"""Accuracy and seconds against the number of sources: the nearest 4, 9 and 17 angles of digits.

    python examples/benchmarks/sources.py

The demo's pen digits, turned in steps of 20 degrees, each angle with images of its own. The target
is upright; the sources are the angles nearest to it, so every further source is less like it. All
methods have their defaults and the same network; nothing was chosen with labels of the target.
Trainings are kept in --out, and the same command goes on where it was stopped.

The last line is one JSON object:

    accuracy       of the last round in %, by number of sources and method, mean over the seeds
    refined        the same of the model that the target's last step makes of it
    gain_points    accuracy minus FedAvg's with as many sources
    nearest        the share that the weights of the last round give to the 4 nearest sources, where
                   a method weighs its sources; by images it is 4 / number of sources
    seconds        of a training
    load_before    the machine's load average when the benchmark began
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accuracy
import sets
from adversarial import DRAW, TESTS, Part

from fedda.contrib.lab.comparison import Score, Variant
from fedda.data import digits, rotate
from fedda.results.escaping import markdown

STEP, TARGET = 20, 0
NEAR = 4
VARIANTS = [
    Variant("fedavg", label="FedAvg"),
    Variant("adabn", label="AdaBN"),
    Variant("kd3a", label="KD3A"),
    Variant("kd3a", settings={"kd3a.focus": "shapley"}, label="KD3A, Shapley"),
    Variant("feddadil", label="FedDaDiL-R"),
    Variant("fact", label="FACT"),
    Variant("shot", label="SHOT"),
    Variant("decision", label="DECISION"),
    Variant("mdan", label="MDAN"),
    Variant("fada", label="FADA"),
]


def angles() -> list[int]:
    """All angles, the target's first, then the nearest first."""
    return sorted(range(0, 360, STEP), key=lambda a: (min(a, 360 - a), a))


def name(angle: int) -> str:
    return str(angle)


def turned(out: Path, images: int) -> Path:
    """The digits by angle, made if they are not there; no image is in two domains."""
    place = out / f"turned-{images}"
    if not place.is_dir():
        made, every = out / f"made-{images}", angles()
        sizes = {domain: 10 for domain in digits.DOMAINS} | {"handwritten": images * len(every)}
        digits.build(made, seed=DRAW, train=sizes, test=TESTS * len(every))
        rotate.build(made / "handwritten", place, sorted(every), seed=DRAW)
    return place


def row(scores: list[Score], sources: list[str]) -> dict[str, float]:
    """The figures of one method with these sources, the nearest first; means over the seeds."""
    found = {"seconds": statistics.fmean(s.seconds for s in scores)}
    for key, values in (
        ("accuracy", [s.last for s in scores]),
        ("refined", [s.refined for s in scores]),
    ):
        if known := [100 * v for v in values if v is not None]:
            found[key] = statistics.fmean(known)
    weighed = [s.weights for s in scores if s.weights]
    if weighed:
        found["nearest"] = statistics.fmean(share(w, sources[:NEAR]) for w in weighed)
    return found


def share(weights: Mapping[str, float], of: list[str]) -> float:
    """The part of the sources' weights that some of them have."""
    own = {source: w for source, w in weights.items() if source != name(TARGET)}
    return sum(own.get(source, 0.0) for source in of) / max(sum(own.values()), 1e-12)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, nargs="+", default=[4, 9, 17], help="at most 17")
    known = [v.label or v.method for v in VARIANTS]
    parser.add_argument("--method", choices=known, action="append", help="default: all")
    parser.add_argument("--images", type=int, default=256, help="of each site")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1], help="default: 0,1")
    parser.add_argument("--out", type=Path, default=Path("runs/sources"))
    parser.add_argument("--results", type=Path, help="also write the table here")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    args = parser.parse_args()

    load, place, every = os.getloadavg()[0], turned(args.out, args.images), angles()
    chosen = [v for v in VARIANTS if not args.method or (v.label or v.method) in args.method]
    settings = {**sets.PENS, "rounds": args.rounds}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for count in args.sources:
        sources = [name(a) for a in every[1 : count + 1]]
        plan = Part(
            *(place, args.out / f"{count}-of-{args.images}", chosen, [name(TARGET)], args.seeds),
            settings=settings,
            sources=sources,
        )
        for cell, error in plan.run(args.jobs, accuracy.note).items():
            print(f"{count} sources, {cell.name} failed: {error}", flush=True)
        by_name: dict[str, list[Score]] = {}
        for score in plan.scores():
            by_name.setdefault(score.variant, []).append(score)
        for label, scores in by_name.items():
            for key, value in row(scores, sources).items():
                figures.setdefault(key, {}).setdefault(f"{count}", {})[label] = round(value, 3)
    text = report(figures)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "sources.md").write_text(text)
    print(text)
    print(json.dumps({**figures, "gain_points": gains(figures), "load_before": round(load, 2)}))


def gains(figures: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Accuracy minus FedAvg's, by number of sources and method."""
    return {
        count: {label: round(value - found["FedAvg"], 2) for label, value in found.items()}
        for count, found in figures["accuracy"].items()
        if "FedAvg" in found
    }


def report(figures: Mapping[str, Any]) -> str:
    """A table of all methods: per number of sources accuracy, refined, nearest and seconds."""
    counts = [*figures["accuracy"]]
    heads = [""]
    for what in ("accuracy", "refined", "weight of the nearest 4", "seconds"):
        heads += [f"{what}, {count} sources" for count in counts]
    rows = []
    for label in dict.fromkeys(n for c in counts for n in figures["accuracy"][c]):
        cells = [label]
        for key, form in (
            ("accuracy", ".1f"),
            ("refined", ".1f"),
            ("nearest", ".2f"),
            ("seconds", ".1f"),
        ):
            of = figures.get(key, {})
            found = [of.get(count, {}).get(label) for count in counts]
            cells += ["–" if value is None else f"{value:{form}}" for value in found]
        rows.append(cells)
    lines = ["## sources", "", "    python examples/benchmarks/sources.py", ""]
    return "\n".join([*lines, *markdown(heads, rows), ""])


if __name__ == "__main__":
    with accuracy.plainly():
        main()
