"""Accuracy against epsilon: what it costs to hide single examples of the sources.

    python examples/benchmarks/privacy.py
    python examples/benchmarks/privacy.py --data DATA --set usps

FedAvg and KD3A without noise, and by DP-SGD with as much noise as keeps epsilon at each source
below a limit when the run ends. The set `demo` needs no DATA: the digits of `fedda demo`, `fonts`
the target. `usps`, the target of mnist, mnistm and svhn, needs the folder `digits/` in DATA; it is
not part of fedda.

All rows have the same network, of which no layer mixes examples (`model.norm=group`), and the same
batches and number of steps. So there is no AdaBN: it has no BatchNorm to adapt. Learning rates with
noise were chosen on other targets (`handwritten` of the demo, and mnist) and another seed.
Accuracies are those of the last round. Trainings are kept in --out, so the same command continues
where it was stopped. The last line is one JSON object: set -> row -> target -> [mean, standard
deviation], and in each set also

    noise    `privacy.noise` by epsilon
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accuracy
import numpy as np

from fedda.config.sections import Flat
from fedda.contrib.lab.comparison import Plan, Variant
from fedda.contrib.lab.comparison.about import header
from fedda.contrib.lab.comparison.statistics import by_target
from fedda.contrib.lab.comparison.tables import as_markdown
from fedda.data import digits
from fedda.secure.accountant import epsilon

DELTA = 1e-5  # as in a site's policy, unless it says otherwise
LIMITS = (8.0, 4.0, 2.0, 1.0)
METHODS = {"fedavg": "FedAvg", "kd3a": "KD3A"}
BASELINE = Variant("fedavg", label="FedAvg (source-only)")
IMAGES: Flat = {"input.size": 16, "input.channels": 1, "model.name": "mlp", "model.hidden": "128"}

NOISY: Flat = {"train.lr": 0.5, "train.momentum": 0.0, "train.weight-decay": 0.0}


@dataclass(frozen=True)
class Benchmark:
    """One data set, and how it is trained on.

    Attributes:
        folder: in DATA; empty: the demo's digits are made.
        target: the domain that is the target.
        settings: of all rows.
        noisy: what changes with noise.
    """

    folder: str
    target: str
    settings: Flat
    noisy: Flat


SETS = {
    "demo": Benchmark("", "fonts", IMAGES, NOISY),
    "usps": Benchmark("digits", "usps", IMAGES, NOISY),
}
SHARED: Flat = {
    "rounds": 20,
    "model.norm": "group",
    "train.batch-size": 128,
    "train.lr": 0.05,
}


def noise(limit: float, examples: int, settings: Flat) -> float:
    """The noise with which a source of so many examples spends at most `limit` in a whole run.

    Args:
        limit: epsilon, at DELTA.
        examples: of the smallest source, which spends most.
        settings: of the run.
    """
    batch, rounds = int(settings["train.batch-size"]), int(settings["rounds"])
    steps = rounds * max(1, round(examples / batch))
    low, high = 0.3, 100.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        within = epsilon([(middle, min(1.0, batch / examples), steps)], DELTA) <= limit
        low, high = (low, middle) if within else (middle, high)
    return round(high + 5e-4, 3)


def smallest(folder: Path, target: str) -> int:
    """The number of examples of the smallest source."""
    found = []
    for name in sorted(folder.glob("*.npz")) + sorted(folder.glob("*/data.npz")):
        if target not in (name.stem, name.parent.name):
            with np.load(name) as file:
                found.append(len(file["y_train"]))
    return min(found)


def plan(args: argparse.Namespace, name: str) -> tuple[Plan, dict[str, float]]:
    """The trainings of a set, and the noise by epsilon."""
    b = SETS[name]
    out = args.out / name
    place = out / "data"
    if b.folder:
        accuracy.prepare(args.data / b.folder, place, args.images, 0)
    elif not place.is_dir():
        digits.build(place, seed=0, train=args.images or 1050, test=500)
    settings = {**SHARED, **b.settings} | ({"rounds": args.rounds} if args.rounds else {})
    target = args.target or b.target
    sigmas = {f"{e:g}": noise(e, smallest(place, target), settings) for e in args.epsilon}
    variants = [BASELINE, Variant("kd3a", label="KD3A")]
    for limit, sigma in sigmas.items():
        own: Flat = {**b.noisy, "privacy.noise": sigma}
        own |= {"train.lr": args.lr} if args.lr else {}
        for method, title in METHODS.items():
            variants.append(Variant(method, settings=own, label=f"{title}, epsilon {limit}"))
    return Plan(place, out, variants, (target,), args.seeds, settings, threads=1), sigmas


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets; not for `demo`")
    parser.add_argument("--set", choices=SETS, action="append", help="default: demo")
    parser.add_argument("--target", help="default: the set's")
    parser.add_argument("--epsilon", type=float, nargs="+", default=LIMITS, help="limits")
    parser.add_argument("--lr", type=float, default=0.0, help="with noise; default: the set's")
    parser.add_argument("--rounds", type=int, default=0, help="default: 20")
    parser.add_argument("--images", type=int, default=0, help="per domain; default: the set's")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    out = Path("runs/privacy")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the tables and CSV files here")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="trainings at the same time")
    args = parser.parse_args(arguments)
    names = args.set or ["demo"]
    if args.data is None and any(SETS[name].folder for name in names):
        parser.error("the set usps needs --data")
    answer: dict[str, Any] = {}
    for name in names:
        made, sigmas = plan(args, name)
        failed = made.run(args.jobs, accuracy.note)
        scores = made.scores()
        command = "python examples/benchmarks/privacy.py"
        command += f" --data DATA --set {name}" if SETS[name].folder else ""
        command += accuracy.typed(parser, args, "target", "rounds", "images", "seeds")
        text = header(made, f"privacy-{name}", command)
        told = ", ".join(f"{sigma:g} for epsilon {limit}" for limit, sigma in sigmas.items())
        text += f"`privacy.noise` is {told}, at delta {DELTA:g}.\n\n"
        text += as_markdown(scores, BASELINE.name, made.targets)
        accuracy.publish(f"privacy-{name}", text, scores, failed, made.out, args.results)
        answer[name] = accuracy.figures(by_target(scores)) | {"noise": sigmas}
    print(json.dumps(answer))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
