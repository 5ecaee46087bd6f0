"""Digit-Five, each of its five sets as the target once: published figures, and fedda's own.

    python examples/benchmarks/digit_five.py --data DATA                  # full size: on a GPU
    python examples/benchmarks/digit_five.py --data DATA --small          # two cores, some hours

DATA holds `digits/mnist.npz`, `mnistm.npz`, `svhn.npz` and `usps.npz`, which are no part of fedda.
The fifth set, SYN, is published no more: `digits/syn.npz` is used if it is there, else fedda draws
it (`fedda data digits --colour`), and figures that rest on it are not the papers' to the point.

Methods have the preset `digit5`: the network and the schedule of KD3A's code, forty rounds.
`--small` takes 800 images a set of 16 pixels, 256 hidden units and 36 steps a round. Every accuracy
is that of the last round, as it is and refined by the target's last step. Trainings are kept one by
one in --out, so the same command goes on where it stopped, and `--report` trains nothing. The last
line is one JSON object:

    last     accuracy after the last round, method -> target -> [mean, deviation]
    refined  likewise of what the target's last step makes of each model
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accuracy
import numpy as np

from fedda.config.sections import Flat
from fedda.contrib.lab.comparison import Plan, Score, Variant
from fedda.contrib.lab.comparison.about import header
from fedda.contrib.lab.comparison.options import shared_of
from fedda.contrib.lab.comparison.statistics import MEAN, by_target
from fedda.contrib.lab.comparison.tables import spread_text
from fedda.data import synthetic
from fedda.results.escaping import markdown

SETS = ("mnist", "mnistm", "svhn", "syn", "usps")
BASELINE = Variant("fedavg", label="FedAvg")
VARIANTS = [
    BASELINE,
    Variant("adabn", label="AdaBN"),
    Variant("kd3a", label="KD3A"),
    Variant("kd3a", "official", label="KD3A, its code"),
    Variant("fada", label="FADA"),
    Variant("fdann", label="f-DANN"),
    Variant("shot", label="SHOT"),
    Variant("decision", label="DECISION"),
    Variant("fact", label="FACT"),
    Variant("feddadil", label="FedDaDiL"),
    Variant("dils", label="DILS"),
]
SMALL: Flat = {
    "input.size": 16,
    "model.hidden": "256",
    "train.batch-size": 64,
    "train.steps": 36,
    "train.lr": 0.02,
    "train.lr-end": 0.0005,
}
IMAGES, TESTS = 800, 1000  # of --small
FULL_TRAIN, FULL_TEST = 9000, 2000
# KD3A's table 6, in the order of SETS; FADA's own row is that of its table 1.
PAPER = {
    "KD3A": (99.2, 87.3, 85.6, 89.4, 98.5),
    "SHOT": (98.2, 80.2, 84.5, 91.1, 97.1),
    "FADA": (91.4, 62.5, 50.5, 71.8, 91.7),
    "FADA, by KD3A": (92.5, 64.5, 72.1, 82.8, 91.7),
}
# KD3A's authors' algorithm on these sets, the fifth drawn, 512 and 256 hidden units, one seed.
AUTHORS = {"KD3A": {"mnistm": 89.3, "svhn": 83.5}, "FedAvg": {"mnistm": 74.3, "svhn": 68.5}}


def prepare(args: argparse.Namespace) -> None:
    """Write the images that are trained on, drawn once, and SYN if it is not there."""
    images, tests = (args.images, min(TESTS, 2 * args.images)) if args.small else (0, 0)
    accuracy.prepare(args.data / "digits", args.out / "data", images, tests)
    drawn = args.out / "data" / "syn.npz"
    if not drawn.exists():
        made = synthetic.build(
            args.out / "drawn", train=images or FULL_TRAIN, test=tests or FULL_TEST
        )
        made.replace(drawn)


def plan(args: argparse.Namespace) -> Plan:
    """All trainings."""
    chosen = [v for v in VARIANTS if not args.method or v.method in args.method]
    settings = shared_of([], ["digit5"], args.rounds) | (SMALL if args.small else {})
    targets = args.target or SETS
    data = args.out / "data"
    return Plan(data, args.out, chosen, targets, args.seeds, settings, threads=args.threads)


def table(scores: Sequence[Score], targets: Sequence[str]) -> list[str]:
    """A row for each published figure and each method, last round and refined."""
    rows = []
    for name, values in PAPER.items():
        shown = [f"{v:.1f}" for s, v in zip(SETS, values, strict=True) if s in targets]
        rows.append([f"{name}, published", *shown, f"{np.mean(values):.1f}"])
    for name, few in AUTHORS.items():
        rows.append([f"{name}, authors' algorithm", *(str(few.get(t, "")) for t in targets), ""])
    last, refined = by_target(scores), by_target(scores, "refined")
    for name, row in last.items():
        for what, of in ((name, row), (f"{name}, refined", refined.get(name, {}))):
            whole = [*targets, MEAN] if len(targets) > 1 else targets
            shown = [spread_text(of[t]) if of.get(t) else "" for t in whole]
            rows.append([what, *shown, *[""] * (len(targets) + 1 - len(shown))])
    return markdown(["", *targets, "mean"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--small", action="store_true", help="few small images, for two cores")
    parser.add_argument("--method", action="append", help="default: all")
    parser.add_argument("--target", action="append", choices=SETS, help="default: all five")
    parser.add_argument("--images", type=int, default=IMAGES, help="of a set with --small")
    parser.add_argument("--rounds", type=int, default=0, help="default: the preset's, 40")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/digit-five"))
    parser.add_argument("--results", type=Path, help="also write the table and a CSV file here")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    parser.add_argument("--report", action="store_true", help="train nothing")
    args = parser.parse_args(arguments)
    prepare(args)
    made = plan(args)
    failed = {} if args.report else made.run(args.jobs, accuracy.note)
    scores = made.scores()
    stem = "digit-five-small" if args.small else "digit-five"
    command = "python examples/benchmarks/digit_five.py --data DATA"
    command += accuracy.typed(
        parser, args, "small", "images", "rounds", "method", "target", "seeds", "threads"
    )
    text = header(made, stem, command) + "\n".join(table(scores, made.targets)) + "\n"
    accuracy.publish(stem, text, scores, failed, made.out, args.results)
    tables: dict[str, Any] = {
        which: accuracy.figures(by_target(scores, which)) for which in ("last", "refined")
    }
    print(json.dumps(tables))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
