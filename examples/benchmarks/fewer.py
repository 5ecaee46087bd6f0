"""MDAN with the best n of three sources, as OCS ranks them, for n = 1, 2, 3.

    python examples/benchmarks/fewer.py --data DATA/digits

FRUDA, appendix C.3: a method with several sources can be better with fewer of them. Each domain of
mnist, mnistm, svhn and usps is the target in turn. `fedda select` ranks the other three by FRUDA's
bound, without the target's labels, once for each seed; then MDAN adapts from the first n of them.
FedAvg from the same sources stands beside it, to tell the choice of sources from the adaptation.

Accuracies are those of the last round, mean over the seeds. Trainings are kept in --out, so the
same command continues where it was stopped. The last line is one JSON object:

    mdan       n -> target -> [mean, standard deviation over the seeds] in %
    fedavg     the same
    megabytes  sent and received by all sites in a training of MDAN, by n
"""

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accuracy
import torch
from adversarial import IMAGES, drawn
from adversaries import SETTINGS
from chain import CHAIN

from fedda.config.sections import Flat
from fedda.contrib.lab import select
from fedda.halves import load
from fedda.results.escaping import markdown
from fedda.settings import RunConfig, overrides

TARGETS = ("mnist", "mnistm", "svhn", "usps")
METHODS = ("fedavg", "mdan")
SIZES = (1, 2, 3)
# The measurement is that of the chain; rounds and the folder are `fedda select`'s own.
MEASURE = {k: v for k, v in CHAIN.items() if k != "rounds" and not k.startswith(("run.", "track."))}


def ranking(job: tuple[str, int], folder: Path, out: Path, own: Flat) -> list[str]:
    """The other domains, that with the smallest bound first."""
    target, seed = job
    path = out / f"select-{target}-{seed}.json"
    if not path.is_file():
        torch.set_num_threads(1)
        changes = [f"{k}={v}" for k, v in {**MEASURE, "input.channels": 3, **own}.items()]
        config = select.settings(changes, [], seed, str(out / f"scratch-{target}-{seed}"))
        path.write_text(json.dumps(select.measured(config, folder, target, 1, quiet=True)))
        print(f"ranking for {target}, seed {seed}: done", flush=True)
    rows = json.loads(path.read_text())["candidates"]
    return [row["name"] for row in sorted(rows, key=lambda row: row["bound"])]


def name_of(method: str, n: int, target: str, seed: int) -> str:
    return f"{method}-{n}-{target}-{seed}"


def train(job: tuple[str, int], folder: Path, out: Path, changes: Flat) -> None:
    """Rank the sources for a target, and train on the best ones, unless it has been done."""
    target, seed = job
    measuring = {k: v for k, v in changes.items() if k != "rounds" and not k.startswith("mdan.")}
    ranked = ranking(job, folder, out, measuring)
    changes = {key: value for key, value in changes.items() if not key.startswith("fruda.")}
    torch.set_num_threads(1)
    for method in METHODS:
        for n in SIZES:
            name = name_of(method, n, target, seed)
            if (out / name / "results.json").is_file():
                continue
            flat: Flat = {**SETTINGS, "input.channels": 3, **changes, "track.tensorboard": False}
            flat |= {
                "method": method,
                "run.dir": str(out),
                "run.name": name,
                "run.seeds": str(seed),
            }
            flat |= {"run.resume": (out / name / "config.json").is_file(), "run.baseline": ""}
            flat |= {"run.sources": ",".join(sorted(ranked[:n]))}
            simulation = load("server", "simulation")
            nodes = simulation.folders(folder, target, {}, 1)
            journal = load("server", "journal").Journal()
            simulation.simulate(RunConfig.parse(flat), nodes, journal, "process")
            print(f"{method}, best {n} for {target}, seed {seed}: done", flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing and write the table -> its figures."""
    folder = drawn(args.data, args.out, args.images)
    runs = args.out / "runs"
    runs.mkdir(exist_ok=True)
    targets = args.target or TARGETS
    jobs = [(target, seed) for seed in args.seeds for target in targets]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for _ in pool.imap_unordered(
            partial(train, folder=folder, out=runs, changes=args.settings), jobs
        ):
            pass
    found: dict[str, Any] = {method: {n: {} for n in SIZES} for method in METHODS}
    sent: dict[int, list[float]] = {n: [] for n in SIZES}
    for method in METHODS:
        for n in SIZES:
            for target in targets:
                each = [results(runs, method, n, target, seed) for seed in args.seeds]
                values = [100 * r["final_accuracy"] for r in each]
                spread = statistics.stdev(values) if values[1:] else 0.0
                found[method][n][target] = [statistics.fmean(values), spread]
                if method == "mdan":
                    sent[n] += [
                        sum(r["trainings"][method][0]["bytes"].values()) / 1e6 for r in each
                    ]
    found["megabytes"] = {n: statistics.fmean(of_n) for n, of_n in sent.items()}
    first = {t: [ranking((t, s), folder, runs, {}) for s in args.seeds] for t in targets}
    text = report(found, first, args)
    for place in filter(None, (args.out, args.results)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "fewer.md").write_text(text)
    print(text)
    return found


def results(runs: Path, method: str, n: int, target: str, seed: int) -> dict[str, Any]:
    """What a run has found."""
    return json.loads((runs / name_of(method, n, target, seed) / "results.json").read_text())


def report(
    found: dict[str, Any], first: dict[str, list[list[str]]], args: argparse.Namespace
) -> str:
    """The table as Markdown."""
    command = "python examples/benchmarks/fewer.py --data DATA/digits"
    made = {**SETTINGS, "input.channels": 3, **args.settings}
    settings = ", ".join(f"`{key}={value}`" for key, value in made.items())
    lines = [
        "## fewer",
        "",
        f"    {command}{args.typed('target', 'seeds', 'images', 'changes')}",
        "",
    ]
    lines += [f"- settings: {settings}", f"- seeds: {', '.join(map(str, args.seeds))}", ""]
    lines += ["Accuracy at the target in %, last round, and MB per training.", ""]
    rows = []
    for method in METHODS:
        for n in SIZES:
            cells = [f"{m:.1f} ± {s:.1f}" for m, s in found[method][n].values()]
            mean = statistics.fmean(m for m, _ in found[method][n].values())
            sent = f"{found['megabytes'][n]:.0f}" if method == "mdan" else ""
            rows.append([f"{method}, best {n}", *cells, f"{mean:.1f}", sent])
    lines += [*markdown(["", *first, "mean", "MB"], rows), ""]
    lines += ["Sources by the bound, best first, for each seed:", ""]
    for target, ranked in first.items():
        lines.append(f"- {target}: {'; '.join(', '.join(names) for names in ranked)}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the four domains")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--images", type=int, default=IMAGES, help="per domain")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    out = Path("runs/fewer")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the table here")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="targets at the same time")
    args = parser.parse_args(arguments)
    args.typed = partial(accuracy.typed, parser, args)
    args.settings = overrides("mdan", args.changes)
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
