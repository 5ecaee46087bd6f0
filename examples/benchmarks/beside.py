"""The table `methods` of `exchange.py`: a round over processes beside its steps in one loop."""

import math
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import central
import live
import processes
import torch

from fedda.config.sections import Flat
from fedda.ops.federation import Deployment
from fedda.settings import RunConfig, overrides

REPEATS = 2
METHODS = ("dils", "fdann", "mdan", "fada")
OWN: dict[str, Flat] = {
    "dils": {"dils.pretrain": 1, "dils.collaborator": "source-00"},
    "fada": {"fada.parts": "adversarial"},
}


def before(method: str) -> int:
    """Rounds that are not counted: the first with the exchange, and all before it."""
    return live.WARM_UP + (method == "dils")


class Rounds(NamedTuple):
    """Every counted round over processes, in seconds: its length, FADA's attention, processor."""

    round_s: list[float]
    attention_s: list[float]
    cpu_s: list[float]


def federated(deployment: Deployment, app: Path, name: str, method: str, flat: Flat) -> Rounds:
    """Train over processes."""
    # What forks a federation's programs is this process's child, or that of another before it.
    programs = [each.popen.pid for each in deployment.processes.values()]
    with processes.Spent([os.getpid(), *programs]) as spent:
        measured = live.run(deployment, app, name, {"method": method, **flat})
    waves = measured.rounds[before(method) : -1]
    attention = [round_[1].seconds for round_ in waves if round_[1].kind == "train"]
    tests = [next(wave for wave in round_ if wave.kind == "evaluate") for round_ in waves]
    cpu = [spent.between(r[0].began, test.began) for r, test in zip(waves, tests, strict=True)]
    return Rounds(measured.untested()[before(method) :], attention, cpu)


def in_one_loop(
    config: RunConfig, nodes: central.Nodes, threads: int, most: float = math.inf
) -> tuple[float, float]:
    """Median over the counted rounds of a loop of this process -> seconds, and of processor.

    A loop that is slower than `most` is left after two of them.
    """
    torch.set_num_threads(threads)
    given = [node | {"threads": threads} for node in nodes]
    made = central.loop(config, central.taking_part(config, given), 0)
    ends = [(time.perf_counter(), time.process_time())]
    for t in made.rounds():
        ends.append((time.perf_counter(), time.process_time()))
        each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)][before(config.method) :]
        # The last round of a run over processes is not counted.
        slow = len(each) == 2 and min(seconds for seconds, _ in each) > most
        if slow or t == config.rounds - 1:
            wall, cpu = zip(*each, strict=True)
            return statistics.median(wall), statistics.median(cpu)
    raise AssertionError("a run has a round more than are counted")


def sums(config: RunConfig, images: int) -> int:
    """Exchanges of one round; pairs that sum at the same time count as one."""
    steps, p = -(-images // config.train.batch_size), config.summing.p
    if config.method == "dils":
        return steps * config.options["dils"].epochs // p
    return -(-steps // p)


def message(deployment: Deployment, app: Path, rounds: int) -> float:
    """Seconds of a Flower request to every source and of the replies, with a tiny model."""
    tiny = {"method": "fedavg", "rounds": rounds + live.WARM_UP + 1} | live.mlp(0.01)
    waves = live.run(deployment, app, "message", tiny).per_wave("train")
    return statistics.median(wave.overhead for wave in waves)


class Row(NamedTuple):
    """One repeat of one method: medians over its rounds, in seconds."""

    round_s: float
    central_s: float
    threads: int  # of the loop; the faster one counts
    attention_s: float
    cpu_s: float
    central_cpu_s: float


def repeated(
    deployment: Deployment,
    app: Path,
    nodes: central.Nodes,
    name: str,
    config: RunConfig,
    flat: Flat,
) -> Row:
    """Train over processes, then in one loop -> one repeat."""
    over = federated(deployment, app, name, config.method, flat)
    cores = len(os.sched_getaffinity(0))
    # With several threads a loop takes far longer on a busy machine, where they wait in turns.
    alone, cpu = in_one_loop(config, nodes, 1)
    best, threads = alone, 1
    if cores > 1 and (wide := in_one_loop(config, nodes, cores, alone)[0]) < alone:
        best, threads = wide, cores
    attention = statistics.median(over.attention_s) if over.attention_s else 0.0
    spent = statistics.median(over.cpu_s)
    return Row(statistics.median(over.round_s), best, threads, attention, spent, cpu)


def table(args: Namespace) -> dict[str, Any]:
    """Measure every method, one after the other in each repeat -> the figures of the table."""
    shape = tuple(int(size) for size in args.shape.split(","))
    rows: dict[str, list[Row]] = {method: [] for method in METHODS}
    flats = {method: settings(method, args) for method in METHODS}
    configs = {
        m: RunConfig.parse({**flat, **central.FIXED.get(m, {}), "method": m})
        for m, flat in flats.items()
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        app = live.stage(folder / "app")
        sites = live.domains(folder / "data", args.sources, args.images, shape)
        nodes = [{"role": r, "name": n, "data": str(path)} for n, (r, path) in sites.items()]
        live.say(f"starting a server and {len(sites)} sites")
        with live.Served(folder / "server", sites) as deployment:
            one = message(deployment, app, args.rounds)
            for repeat in range(args.repeats or REPEATS):
                for m, config in configs.items():
                    row = repeated(deployment, app, nodes, f"{m}-{repeat}", config, flats[m])
                    rows[m].append(row)
                    live.say(
                        f"{m}: {row.round_s:.2f} s a round; {row.central_s:.2f} s in one loop, "
                        f"threads: {row.threads}; {row.cpu_s / row.central_cpu_s:.2f} times its "
                        "processor time"
                    )
    counted = {method: sums(config, args.images) for method, config in configs.items()}
    return figures(rows, counted, one)


def settings(method: str, args: Namespace) -> Flat:
    """The settings of a method's run."""
    # A round is timed until the next one begins, so one more is needed.
    rounds = before(method) + args.rounds + 1
    flat: Flat = {"rounds": rounds, "model.name": args.network, "train.batch-size": 64}
    flat |= {"run.refine": "none"}  # only the last round has a last step, and is not counted
    flat |= {"train.lr": 1e-4, "train.lr-end": 1e-4}  # the images are noise
    return flat | OWN.get(method, {}) | overrides(method, args.changes)


def figures(
    rows: Mapping[str, Sequence[Row]], counted: Mapping[str, int], one: float
) -> dict[str, Any]:
    """The table's keys, each a median over the repeats."""

    def medians(key: str) -> dict[str, float]:
        of = {m: statistics.median(getattr(row, key) for row in rows[m]) for m in rows}
        return {method: round(value, 4) for method, value in of.items()}

    ratios = {m: statistics.median(r.round_s / r.central_s for r in rows[m]) for m in rows}
    spent = {m: statistics.median(r.cpu_s / r.central_cpu_s for r in rows[m]) for m in rows}
    steps = [(r.round_s - r.attention_s) / r.central_s for r in rows["fada"]]
    return {f"{method}_over_central": round(ratio, 3) for method, ratio in ratios.items()} | {
        "fada_steps_over_central": round(statistics.median(steps), 3),
        "round_s": medians("round_s"),
        "central_s": medians("central_s"),
        "central_threads": medians("threads"),
        "cpu_over_central": {method: round(ratio, 3) for method, ratio in spent.items()},
        "cpu_s": medians("cpu_s"),
        "attention_s": medians("attention_s")["fada"],
        "sums": dict(counted),
        "message_s": round(one, 4),
        "messages_s": {method: round(count * one, 3) for method, count in counted.items()},
    }
