"""The table `methods` of `exchange.py`: a round over processes beside its steps in one loop."""

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
import torch

from fedda.config import Flat
from fedda.ops.federation import Deployment
from fedda.settings import RunConfig, overrides

METHODS = ("dils", "fdann", "mdan", "fada")
OWN: dict[str, Flat] = {
    "dils": {"dils.pretrain": 1, "dils.collaborator": "source-00"},
    "fada": {"fada.parts": "adversarial"},
}


def before(method: str) -> int:
    """Rounds that are not counted: the first with the exchange, and all before it."""
    return live.WARM_UP + (method == "dils")


def federated(
    deployment: Deployment, app: Path, name: str, method: str, flat: Flat
) -> tuple[list[float], list[float]]:
    """Seconds of every counted round over processes, and of FADA's attention in it."""
    measured = live.run(deployment, app, name, {"method": method, **flat})
    waves = measured.rounds[before(method) : -1]
    attention = [round_[1].seconds for round_ in waves if round_[1].kind == "train"]
    return measured.untested()[before(method) :], attention


def in_one_loop(config: RunConfig, nodes: central.Nodes, threads: int) -> list[float]:
    """Seconds of every counted round in a loop of this process."""
    torch.set_num_threads(threads)
    given = [node | {"threads": threads} for node in nodes]
    made = central.loop(config, central.taking_part(config, given), 0)
    ends = [time.perf_counter()]
    for _ in made.rounds():
        ends.append(time.perf_counter())
    return [after - begin for begin, after in pairwise(ends)][before(config.method) :]


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


def repeated(
    deployment: Deployment,
    app: Path,
    nodes: central.Nodes,
    name: str,
    config: RunConfig,
    flat: Flat,
) -> Row:
    """Train over processes, then in one loop -> one repeat."""
    rounds, attention = federated(deployment, app, name, config.method, flat)
    cores = {1, len(os.sched_getaffinity(0))}
    loops = {n: statistics.median(in_one_loop(config, nodes, n)) for n in sorted(cores)}
    threads = min(loops, key=loops.__getitem__)
    attention_s = statistics.median(attention) if attention else 0.0
    return Row(statistics.median(rounds), loops[threads], threads, attention_s)


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
        with Deployment(folder / "server", sites) as deployment:
            one = message(deployment, app, args.rounds)
            for repeat in range(args.repeats):
                for m, config in configs.items():
                    row = repeated(deployment, app, nodes, f"{m}-{repeat}", config, flats[m])
                    rows[m].append(row)
                    live.say(
                        f"{m}: {row.round_s:.2f} s a round; {row.central_s:.2f} s in one loop, "
                        f"threads: {row.threads}"
                    )
    counted = {method: sums(config, args.images) for method, config in configs.items()}
    return figures(rows, counted, one)


def settings(method: str, args: Namespace) -> Flat:
    """The settings of a method's run."""
    # A round is timed until the next one begins, so one more is needed.
    rounds = before(method) + args.rounds + 1
    flat: Flat = {"rounds": rounds, "model.name": args.network, "train.batch-size": 64}
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
    steps = [(r.round_s - r.attention_s) / r.central_s for r in rows["fada"]]
    return {f"{method}_over_central": round(ratio, 3) for method, ratio in ratios.items()} | {
        "fada_steps_over_central": round(statistics.median(steps), 3),
        "round_s": medians("round_s"),
        "central_s": medians("central_s"),
        "central_threads": medians("threads"),
        "attention_s": medians("attention_s")["fada"],
        "sums": dict(counted),
        "message_s": round(one, 4),
        "messages_s": {method: round(count * one, 3) for method, count in counted.items()},
    }
