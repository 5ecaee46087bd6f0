"""A chain of targets: whom each learns from, by each way to choose, and what that gains.

    python examples/benchmarks/chain.py --table pens
    python examples/benchmarks/chain.py --table mnist --data DATA/digits

FRUDA's setting: one domain has labels, digits as they are; the targets are digits turned by 30 to
150 degrees, or in the paper's own table to 330. They arrive in an order that is drawn anew for each
seed, with --order near by their angle (the paper's ordering 1), or with --order opposite from 180
degrees on and then the rest (its ordering 2). Each chooses a collaborator, the labelled domain or a
target before it, and adapts from it by DILS.

Tables:
    pens         pen digits that scikit-learn ships; each image is in one domain only
    mnist        digits of mnist, likewise; needs --data
    mnist-same   the same digits in every domain, turned, as in the paper; needs --data
    mnist-paper  likewise with the paper's 12 angles and 28 x 28 pixels; not without a GPU; needs
                 --data

Rows, all or those of --row:
    no adaptation  the labelled domain's model at each target
    source         every target adapts from the labelled domain
    all            from all candidates at once, the paper's Multi-Collaborator
    random         from a candidate drawn by chance
    pad            from the one at the smallest proxy A-distance
    ocs            from the one with the smallest bound (eq. 5)
    oracle         from the one whose model is best at the target before, by the target's test
                   labels: no run can choose so, and it says what a perfect choice would gain

Accuracies are those of the last round, on images that no training sees, mean over the targets. The
last line is one JSON object: table -> row -> [mean, standard deviation over the seeds] in %, and
with the row ocs

    best           share of choices with ocs that fell on the candidate whose model, before the
                   adaptation, has the highest accuracy at the target
    best_of_chance the same, had each candidate been as likely
    correlation    rank correlation of the bounds with these accuracies, negated; mean over targets
                   with three candidates or more
    kept           share of adaptations with ocs after which the target kept the former model

Runs are kept in --out, so the same command continues where it was stopped.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accuracy
import numpy as np
import torch
from adversarial import DRAW, IMAGES, TESTS
from adversaries import LONG, OWN, SETTINGS
from scipy.stats import spearmanr

from fedda import data, models
from fedda.config.sections import Flat
from fedda.data import digits, rotate
from fedda.halves import load
from fedda.maths import ocs
from fedda.results.escaping import markdown
from fedda.results.read import MODEL
from fedda.settings import RunConfig, overrides

TABLES = ("pens", "mnist", "mnist-same")
PAPER = "mnist-paper"
SELECTORS = ("source", "all", "random", "pad", "ocs", "oracle")
HOME, OPPOSITE = 0, 180  # degrees
ADAPTING = 8  # rounds
CHAIN: Flat = {
    **SETTINGS,
    **LONG,
    **{key.replace("dils.", "fruda."): value for key, value in OWN["adda"].items()},
    "fruda.pretrain": LONG["rounds"],
    "rounds": int(LONG["rounds"]) + 1 + ADAPTING,
    "run.baseline": "",
    "track.tensorboard": False,
}


def turned(table: str) -> range:
    """The angles of the targets, in degrees."""
    return range(30, 360 if table == PAPER else OPPOSITE, 30)


def domains(table: str, source: Path | None, out: Path, images: int) -> Path:
    """Draw the digits and turn them -> the folder with a domain per angle."""
    made, rotated = out / "drawn", out / "rotated"
    angles, everywhere = (HOME, *turned(table)), table in ("mnist-same", PAPER)
    count = 1 if everywhere else len(angles)
    if rotated.is_dir():
        return rotated
    if table == "pens":
        sizes = {name: 10 for name in digits.DOMAINS} | {"handwritten": images * count}
        # scikit-learn has few pen digits: an image may show one that another domain shows, too.
        digits.build(made, seed=DRAW, train=sizes, test=TESTS * count)
        rotate.build(made / "handwritten", rotated, angles, seed=DRAW)
    else:
        assert source is not None
        accuracy.prepare(source, made, images * count, TESTS * (1 if everywhere else 3))
        rotate.build(made / "mnist.npz", rotated, angles, seed=DRAW, everywhere=everywhere)
    return rotated


def order(seed: int, arrival: str, angles: Sequence[int]) -> list[str]:
    """The targets as they arrive: in an order that is drawn, by their angle, or from 180 on."""
    if arrival == "drawn":
        return [str(angle) for angle in np.random.default_rng([DRAW, seed]).permutation(angles)]
    first = OPPOSITE if arrival == "opposite" else HOME
    return [str(angle) for angle in sorted(angles, key=lambda angle: (angle < first, angle))]


def nodes(folder: Path, targets: Sequence[str]) -> list[dict[str, Any]]:
    """The labelled domain and these targets."""
    return [
        {
            "role": "source" if name == str(HOME) else "target",
            "name": name,
            "data": str(folder / name),
            "threads": 1,
            "notes": False,
        }
        for name in (str(HOME), *targets)
    ]


def train(job: tuple[str, int, Sequence[str]], folder: Path, out: Path, changes: Flat) -> None:
    """Run a chain, or FedAvg on the labelled domain alone, unless it has been run."""
    row, seed, targets = job
    place = out / f"{row}-{seed}"
    if (place / "results.json").is_file():
        return
    torch.set_num_threads(1)
    own: Flat = {"run.dir": str(out), "run.name": place.name, "run.seeds": str(seed)}
    own["run.resume"] = (place / "config.json").is_file()
    if row == "fedavg":
        targets = targets[:1]
        flat = {**CHAIN, **changes, **own, "method": "fedavg"}
        flat["rounds"] = flat["fruda.pretrain"]
        flat = {key: value for key, value in flat.items() if not key.startswith("fruda.")}
    else:
        flat = {**CHAIN, **changes, **own, "method": "fruda", "fruda.sequence": ",".join(targets)}
        flat["fruda.select"] = "ocs" if row == "oracle" else row
    journal = load("server", "journal").Journal(None)
    config = RunConfig.parse(flat)
    with contextlib.ExitStack() as stack:
        if row == "oracle":
            known = partial(oracle, folder=folder, out=out, seed=seed, targets=targets)
            stack.enter_context(mock.patch.object(ocs, "choose", known))
        load("server", "simulation").simulate(config, nodes(folder, targets), journal, "process")
    print(f"{row}, seed {seed}: done", flush=True)


def oracle(
    selector: str,
    candidates: Sequence[ocs.Prospect],
    draws: torch.Generator,
    folder: Path,
    out: Path,
    seed: int,
    targets: Sequence[str],
) -> ocs.Prospect:
    """Choose in place of `ocs.choose` the candidate whose model is best at the target."""
    (home,) = results(out, "fedavg", seed)["trainings"]["fedavg"]
    files = {name: out / f"oracle-{seed}" / f"fruda-{seed}-{name}" / MODEL for name in targets}
    files[str(HOME)] = Path(home["model"])
    target = targets[len(candidates) - 1]  # all that arrived before it are candidates
    return max(candidates, key=lambda c: right(files[c.name], folder, target))


def results(out: Path, row: str, seed: int) -> dict[str, Any]:
    """What a run has found."""
    return json.loads((out / f"{row}-{seed}" / "results.json").read_text())


def chain(out: Path, row: str, seed: int) -> dict[str, dict[str, Any]]:
    """The trainings of a chain, by target."""
    return {t["target"]: t for t in results(out, row, seed)["trainings"]["fruda"]}


def right(model: Path, folder: Path, target: str) -> float:
    """Accuracy of a model at a target, in %."""
    network, about = models.load(model)
    test = data.load_evaluation(folder / target, classes=about.classes, size=about.shape[1])
    assert test is not None
    p = models.predict(network, models.as_inputs(test.x, torch.device("cpu")))
    return 100 * float((p.argmax(dim=1) == test.y).float().mean())


def before(out: Path, folder: Path, row: str, seed: int) -> dict[str, dict[str, float]]:
    """Accuracy of each candidate's model at each target before it adapts: target -> candidate."""
    trained = chain(out, row, seed)
    files = {target: Path(training["model"]) for target, training in trained.items()}
    (home,) = results(out, "fedavg", seed)["trainings"]["fedavg"]
    files[str(HOME)] = Path(home["model"])
    return {
        target: {c["name"]: right(files[c["name"]], folder, target) for c in rows}
        for target, training in trained.items()
        if (rows := training["selection"]["candidates"])
    }


def choices(out: Path, folder: Path, seeds: Sequence[int]) -> dict[str, float]:
    """How good the choices by the bound are."""
    best, chance, correlations, kept = [], [], [], []
    for seed in seeds:
        known = before(out, folder, "ocs", seed)
        for target, training in chain(out, "ocs", seed).items():
            rows, accuracies = training["selection"]["candidates"], known[target]
            kept.append(training["selection"]["after"]["kept"] == "before")
            if len(rows) < 2:
                continue  # there was no choice
            top = max(accuracies.values())
            best.append(accuracies[training["selection"]["collaborator"]] == top)
            chance.append(1 / len(rows))
            if len(rows) > 2:
                bounds = [c["bound"] for c in rows]
                errors = [-accuracies[c["name"]] for c in rows]
                rank: Any = spearmanr(bounds, errors)
                correlations.append(float(rank.statistic))
    return {
        "best": statistics.fmean(best),
        "best_of_chance": statistics.fmean(chance),
        "correlation": statistics.fmean(correlations),
        "kept": statistics.fmean(kept),
    }


def accuracies(
    out: Path, folder: Path, arriving: Mapping[int, Sequence[str]], rows: Sequence[str]
) -> dict[str, dict[int, list[float]]]:
    """Accuracy at each target in its order of arrival: row -> seed -> values in %."""
    table: dict[str, dict[int, list[float]]] = {"no adaptation": {}}
    for seed, targets in arriving.items():
        (home,) = results(out, "fedavg", seed)["trainings"]["fedavg"]
        table["no adaptation"][seed] = [right(Path(home["model"]), folder, t) for t in targets]
        for row in rows:
            trained = chain(out, row, seed)
            each = [100 * trained[t]["final_accuracy"] for t in targets]
            table.setdefault(row, {})[seed] = each
    return table


def choices_told(chosen: Mapping[str, float], learnt: Mapping[int, Mapping[str, str]]) -> list[str]:
    """How the choices by the bound went, as lines of Markdown."""
    told = {
        "best": "fell on the candidate whose model was best at the target before",
        "best_of_chance": "would have by chance",
        "kept": "of the adaptations were undone, as infomax fell",
    }
    return [
        "",
        "### The choices by the bound",
        "",
        *(f"- {100 * chosen[key]:.0f} % {text}" for key, text in told.items()),
        f"- rank correlation of bound and error: {chosen['correlation']:.2f}",
        "",
        "| seed | target <- collaborator, with ocs |",
        "| --- | --- |",
        *(
            f"| {seed} | {', '.join(f'{t} <- {c}' for t, c in pairs.items())} |"
            for seed, pairs in learnt.items()
        ),
    ]


def report(
    name: str,
    found: Mapping[str, Mapping[int, Sequence[float]]],
    arriving: Mapping[int, Sequence[str]],
    settings: Flat,
    command: str,
) -> list[str]:
    """The table as lines of Markdown."""
    heads = ["", "mean", *(f"seed {s}: {', '.join(of)}" for s, of in arriving.items())]
    rows = []
    for row, by_seed in found.items():
        means = [statistics.fmean(by_seed[s]) for s in arriving]
        spread = statistics.stdev(means) if len(means) > 1 else 0.0
        each = [" ".join(f"{v:.0f}" for v in by_seed[s]) for s in arriving]
        rows.append([row, f"{statistics.fmean(means):.1f} ± {spread:.1f}", *each])
    changed = ", ".join(f"`{k}={v}`" for k, v in settings.items() if not k.startswith("run."))
    return [
        f"## {name}",
        "",
        f"    {command}",
        "",
        f"- settings: {changed}",
        "",
        "Accuracy in % after the last round: mean over the targets, mean ± standard deviation over "
        "the seeds; then at each target, in the order of arrival.",
        "",
        *markdown(heads, rows),
    ]


def measure(args: argparse.Namespace, table: str) -> dict[str, Any]:
    """Run the missing chains of a table and write the table -> its figures."""
    suffix = "" if args.order == "drawn" else f"-{args.order}"
    out, name = args.out / table, f"chain-{table}{suffix}"
    folder, runs = domains(table, args.data, out, args.images), out / f"runs{suffix}"
    arriving = {seed: order(seed, args.order, turned(table)) for seed in args.seeds}
    selectors = [row for row in SELECTORS if row in (args.row or SELECTORS)]
    settings: Flat = ({"input.size": 28} if table == PAPER else {}) | args.settings
    run = partial(train, folder=folder, out=runs, changes=settings)
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for rows in (["fedavg"], selectors):  # the oracle asks for FedAvg's model
            jobs = [(row, seed, targets) for seed, targets in arriving.items() for row in rows]
            for _ in pool.imap_unordered(run, jobs):
                pass
    found = accuracies(runs, folder, arriving, selectors)
    command = f"python examples/benchmarks/chain.py --table {table}"
    command += " --data DATA/digits" * (table != "pens")
    command += args.typed("seeds", "images", "order", "row", "changes")
    lines, chosen = report(name, found, arriving, {**CHAIN, **settings}, command), {}
    if "ocs" in selectors:
        chosen = choices(runs, folder, args.seeds)
        learnt = {
            seed: {t: e["selection"]["collaborator"] for t, e in chain(runs, "ocs", seed).items()}
            for seed in args.seeds
        }
        lines += choices_told(chosen, learnt)
    for place in filter(None, (args.out, args.results)):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
    means = {row: [statistics.fmean(v) for v in of.values()] for row, of in found.items()}
    return {
        row: [round(statistics.fmean(m), 2), round(statistics.stdev(m), 2) if m[1:] else 0.0]
        for row, m in means.items()
    } | {key: round(value, 3) for key, value in chosen.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = f"default: all but {PAPER}, without --data those that need none"
    parser.add_argument("--table", choices=(*TABLES, PAPER), action="append", help=usual)
    parser.add_argument("--data", type=Path, help="folder of mnist.npz")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--images", type=int, default=IMAGES, help="per domain")
    orders = ("drawn", "near", "opposite")
    parser.add_argument("--order", choices=orders, default="drawn", help="of arrival")
    parser.add_argument("--row", choices=SELECTORS, action="append", help="default: all")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    out = Path("runs/chain")
    parser.add_argument("--out", type=Path, default=out, help=f"for all runs; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the tables here")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="runs at the same time")
    args = parser.parse_args(arguments)
    args.typed = partial(accuracy.typed, parser, args)
    args.settings = overrides("fruda", args.changes)
    tables: Sequence[str] = args.table or [t for t in TABLES if args.data or t == "pens"]
    if not args.data and set(tables) != {"pens"}:
        parser.error("the tables of mnist need a folder of data: give --data")
    print(json.dumps({table: measure(args, table) for table in tables}))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
