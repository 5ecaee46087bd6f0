"""Which means of models survive sources that lie.

    python examples/benchmarks/robust.py
    python examples/benchmarks/robust.py --sources 5 --percent 20
    python examples/benchmarks/robust.py --table sums --sources 5 --percent 20

The demo's digits: `fonts` is the target, and the other three domains are divided among 20 sources,
or --sources. Two of them lie, or eight, or as many as --percent says:

    none        nobody lies
    flipped_N   N % of the sources have changed all their labels
    claimed_N   they have, and claim to have a hundred times their examples
    fourfold_N  they send their update four times as long, in the opposite direction
    scaled_N    the same, ten times as long
    noise_N     in place of their update they send normal noise, ten times as long
    nan_N       they send NaN

Rows are the rules of `guard.mean` for FedAvg, told the true share of liars where they need one, and
KD3A, which weighs sources itself. The other settings of `guard` are off, so that all lies arrive;
in the last rows they have their defaults. `away` is what a run costs without these sites.

With `--table sums` the lies are about what sources add to sums of gradients, and their models are
honest: `tenfold` and `hundredfold` are gradients ten and a hundred times as long, `against` is -4
times the honest one, and `numberless` is NaN. Rows are FADA, which
sums in pairs of a source and the target, and f-DANN, whose sources add up with the target in one
sum, each with `guard.max-update` off and with its default.

Accuracies are those of the target in the last round, mean over the seeds. `ended` stands where one
run or more ended early, as models had grown until no site gave a usable reply. The last line is one
JSON object: row -> lie -> [mean, standard deviation over the seeds] in %, or null. Trainings are
kept in --out, so the same command continues where it was stopped.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import torch
from flwr.app import Message

from fedda import records
from fedda.config.sections import Flat
from fedda.data import digits
from fedda.errors import QuorumError
from fedda.exchange.in_process import LocalStream
from fedda.halves import load
from fedda.maths.average import STATISTICS
from fedda.results.escaping import markdown
from fedda.settings import RunConfig, overrides
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind

TARGET = "fonts"
LIES = ("flipped", "claimed", "fourfold", "scaled", "noise", "nan", "away")
DATA = ("flipped", "claimed", "away")  # lies that leave a site's reply as it is
# What a gradient is multiplied by.
SUMS = {"tenfold": 10.0, "hundredfold": 100.0, "against": -4.0, "numberless": math.nan}
ENDED = "ended.txt"
TIMES = {"fourfold": 4, "scaled": 10, "noise": 10}  # as long as the honest update
CLAIMED = 100  # times the true number of examples
GUARD: Flat = {"guard.max-change": 5.0, "guard.max-update": 1.5, "guard.max-examples": 2.0}
ROWS: dict[str, Flat] = {
    "FedAvg": {},
    "bounded": {"guard.mean": "bounded"},
    "median": {"guard.mean": "median"},
    "trimmed": {"guard.mean": "trimmed"},
    "krum": {"guard.mean": "krum"},
    "KD3A": {"method": "kd3a"},
    "FedAvg, guarded": GUARD,
    "KD3A, guarded": GUARD | {"method": "kd3a"},
}
# Both pull at the features as strongly as the labels do, so that a lie matters.
ADDED: Flat = {"train.batch-size": 64, "train.rounds-per-epoch": 0.5}
FADA: Flat = ADDED | {"method": "fada", "fada.parts": "adversarial", "fada.weights.alignment": 1.0}
FDANN: Flat = ADDED | {"method": "fdann", "fdann.reversal.strength": 1.0}
GUARDED: Flat = {"guard.max-update": 1.5}
SUM_ROWS: dict[str, Flat] = {
    "FADA": FADA,
    "FADA, guarded": FADA | GUARDED,
    "f-DANN": FDANN,
    "f-DANN, guarded": FDANN | GUARDED,
}
TABLES: dict[str, tuple[dict[str, Flat], tuple[str, ...]]] = {
    "models": (ROWS, LIES),
    "sums": (SUM_ROWS, (*SUMS, "away")),
}
EVERY = ROWS | SUM_ROWS
SETTINGS: Flat = {
    "method": "fedavg",
    "rounds": 15,
    "input.size": 16,
    "input.channels": 1,
    "model.name": "mlp",
    "model.hidden": "128",
    "train.rounds-per-epoch": 0.25,
    "train.batch-size": 16,
    "train.lr": 0.03,
    "guard.max-change": 0.0,
    "guard.max-update": 0.0,
    "guard.max-examples": 0.0,
    "run.baseline": "",
    "track.tensorboard": False,
}
HONEST: Any = load("server", "simulation").LocalGrid  # before a run puts liars on it
PUSH: Any = LocalStream._push  # the same

Found = dict[str, dict[str, list[float] | None]]


def sites(out: Path, images: int, sources: int, lying: int, lie: str) -> list[dict[str, Any]]:
    """The sources, of which the first so many of a drawn order lie, and the target."""
    folder = out / "digits"
    if not folder.is_dir():
        digits.build(folder, seed=0, train=images, test=500)
    others = [name for name in digits.DOMAINS if name != TARGET]
    liars = set(np.random.default_rng(0).permutation(sources)[:lying].tolist())
    made, number = [], 0
    for place, domain in enumerate(others):
        with np.load(folder / domain / "data.npz") as arrays:
            x, y = arrays["x_train"], arrays["y_train"]
        parts = np.array_split(np.arange(len(x)), sources // 3 + (place < sources % 3))
        for part in parts:
            path = out / f"sites-{sources}" / f"{number:02}.npz"
            path.parent.mkdir(exist_ok=True)
            if not path.is_file():
                np.savez(path, x_train=x[part], y_train=y[part])
            site = {"role": "source", "name": f"{number:02}", "data": str(path), "threads": 1}
            poison = 100.0 if number in liars and lie in ("flipped", "claimed") else 0.0
            if number not in liars or lie != "away":
                made.append(site | {"poison": poison, "lies": number in liars})
            number += 1
    target = {"role": "target", "name": TARGET, "data": str(folder / TARGET), "threads": 1}
    return [*made, target]


def lied(lie: str, sent: Arrays, trained: Arrays, draws: np.random.Generator) -> Arrays:
    """What a liar sends in place of its model; a negative variance would be refused at once."""
    told: Arrays = {}
    for name, start in sent.items():
        update = trained[name] - start
        if start.dtype.kind != "f" or name.endswith(STATISTICS):
            told[name] = trained[name]
        elif lie == "nan":
            told[name] = np.full_like(start, np.nan)
        elif lie != "noise":
            told[name] = (start - TIMES[lie] * update).astype(start.dtype)
        else:
            noise = draws.normal(size=update.shape)
            length = np.linalg.norm(update) / max(np.linalg.norm(noise), 1e-12)
            told[name] = (start + TIMES[lie] * length * noise).astype(start.dtype)
    return told


def lying_grid(nodes: Sequence[Mapping[str, Any]], lie: str, seed: int) -> type:
    """A grid on which some sites' replies are lies."""
    draws = np.random.default_rng(seed)

    class LyingGrid(HONEST):
        def _call(self, message: Message) -> Message:
            reply = super()._call(message)
            node = nodes[message.metadata.dst_node_id - 1]
            asked = message.metadata.message_type == "train"
            if node.get("lies") and lie == "claimed" and "offer" in reply.content:
                told: Any = reply.content["offer"]
                told["examples"] *= CLAIMED
            lies = node.get("lies") and lie not in (*DATA, *SUMS)
            if asked and lies and not reply.has_error():
                sent, _ = records.read(message.content)
                back, tables = records.read(reply.content)
                model = lied(lie, sent["model"].unpack(), back["model"].unpack(), draws)
                packed = {**back, "model": packing.pack(model, Kind.MODEL)}
                return Message(records.write(packed, metrics=tables["metrics"]), reply_to=message)
            return reply

    return LyingGrid


def lie_in_sums(nodes: Sequence[Mapping[str, Any]], lie: str) -> None:
    """Let some sites send false gradients, past their own checks."""
    liars = {node["name"] for node in nodes if node.get("lies")}
    by = SUMS.get(lie, 1.0)

    def push(self: Any, group: str, index: int, gradient: np.ndarray, examples: int) -> None:
        told = np.float32(by) * gradient if self.node in liars else gradient
        PUSH(self, group, index, told, examples)

    LocalStream._push = push


def name_of(row: str, lie: str, sources: int, lying: int, seed: int) -> str:
    return f"{list(EVERY).index(row)}-{lie}-{lying}-of-{sources}-{seed}"


def train(job: tuple[str, str, int, int, int], out: Path, images: int, changes: Flat) -> None:
    """Run once, unless it has been run."""
    row, lie, sources, lying, seed = job
    runs = out / "runs"
    if any((runs / name_of(*job) / file).is_file() for file in ("results.json", ENDED)):
        return
    torch.set_num_threads(1)
    nodes = sites(out, images, sources, lying, lie)
    flat = {**SETTINGS, **changes, **EVERY[row], "run.dir": str(runs), "run.name": name_of(*job)}
    flat |= {"run.seeds": str(seed), "run.resume": (runs / name_of(*job) / "config.json").is_file()}
    if EVERY[row].get("guard.mean") in ("trimmed", "krum"):
        flat["guard.liars"] = max(lying, 1) / sources
    simulation: Any = load("server", "simulation")
    simulation.LocalGrid = lying_grid(nodes, lie, seed)
    lie_in_sums(nodes, lie)
    plain = [{k: v for k, v in node.items() if k != "lies"} for node in nodes]
    journal = load("server", "journal").Journal()
    try:
        simulation.simulate(RunConfig.parse(flat), plain, journal, "process")
    except QuorumError as error:
        (runs / name_of(*job) / ENDED).write_text(str(error))
    print(f"{row}, {lying} liars, {lie}, seed {seed}: done", flush=True)


def measure(args: argparse.Namespace) -> Found:
    """Run what is missing -> row -> column -> [mean, standard deviation]."""
    args.out.mkdir(parents=True, exist_ok=True)
    sites(args.out, args.images, args.sources, 0, "")  # once, before several processes need them
    rows, lies = args.row or TABLES[args.table][0], args.lie or TABLES[args.table][1]
    liars = {percent: round(args.sources * percent / 100) for percent in args.percent or (10, 40)}
    cases = [("none", 0, ""), *((lie, n, f"_{p}") for p, n in liars.items() for lie in lies)]
    jobs = [
        (row, lie, args.sources, lying, seed)
        for seed in args.seeds
        for lie, lying, _ in cases
        for row in rows
    ]
    run = partial(train, out=args.out, images=args.images, changes=args.settings)
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=20) as pool:
        for _ in pool.imap_unordered(run, jobs):
            pass
    found: Found = {}
    for row in rows:
        for lie, lying, percent in cases:
            each = [result(args.out, (row, lie, args.sources, lying, s)) for s in args.seeds]
            found.setdefault(row, {})[lie + percent] = summary(each)
    return found


def summary(each: Sequence[float | None]) -> list[float] | None:
    """Mean and standard deviation over the seeds; None if a run ended early."""
    known = [value for value in each if value is not None]
    if len(known) < len(each):
        return None
    spread = statistics.stdev(known) if known[1:] else 0.0
    return [round(statistics.fmean(known), 2), round(spread, 2)]


def result(out: Path, job: tuple[str, str, int, int, int]) -> float | None:
    """Accuracy of the last round, in %; None if the run ended early."""
    folder = out / "runs" / name_of(*job)
    if (folder / ENDED).is_file():
        return None
    return 100 * json.loads((folder / "results.json").read_text())["final_accuracy"]


def cell(value: Sequence[float] | None) -> str:
    """A cell of the table."""
    return "ended" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}"


def report(found: Found, args: argparse.Namespace, settings: Flat, command: str) -> str:
    """The table as Markdown."""
    columns = list(next(iter(found.values())))
    rows = [[row, *(cell(of[column]) for column in columns)] for row, of in found.items()]
    own = {k: v for row in found if row in SUM_ROWS for k, v in EVERY[row].items()}
    kept = {k: v for k, v in (settings | own).items() if k not in ("method", *GUARDED) or not own}
    told = ", ".join(f"`{k}={v}`" for k, v in kept.items())
    lines = ["## robust", "", f"    {command}", "", f"- settings: {told}"]
    lines += [f"- {args.sources} sources; seeds {', '.join(map(str, args.seeds))}", ""]
    lines += ["Accuracy at the target in %, last round, by the share of lying sources and how."]
    krum = "`krum` and `trimmed` are told the true share of liars."
    lines += [krum, ""] if args.table == "models" else [""]
    heads = [re.sub(r"_(\d+)", r" \1 %", column) for column in columns]
    return "\n".join([*lines, *markdown(["", *heads], rows)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--sources", type=int, default=20, help="default: 20")
    percent = "of sources that lie; default: 10 and 40"
    parser.add_argument("--percent", type=int, action="append", help=percent)
    parser.add_argument("--images", type=int, default=1050, help="per domain")
    parser.add_argument("--table", choices=TABLES, default="models", help="default: models")
    parser.add_argument("--row", choices=EVERY, action="append", help="default: all of the table")
    lies = (*LIES, *SUMS)
    parser.add_argument("--lie", choices=lies, action="append", help="default: all of the table")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    out = Path("runs/robust")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the table here")
    parser.add_argument("--name", default="robust.md", help="of the table; default: robust.md")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="trainings at the same time")
    args = parser.parse_args(arguments)
    args.settings = overrides("fedavg", args.changes)
    found = measure(args)
    command = "python examples/benchmarks/robust.py"
    command += partial(accuracy.typed, parser, args)(
        *("table", "sources", "percent", "seeds", "images", "row", "lie", "changes")
    )
    text = report(found, args, {**SETTINGS, **args.settings}, command)
    for folder in filter(None, (args.out, args.results)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / args.name).write_text(text)
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
