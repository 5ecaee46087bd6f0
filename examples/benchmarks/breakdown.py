"""Where the time of a round of KD3A goes: training, voting, loading, packing, testing, Flower.

    python examples/benchmarks/breakdown.py

Trains KD3A on the embedded domains of digits, three sources and a target, twice: as real processes
over TLS, to measure what Flower costs, and in this process with a clock on every other part.
Prints a table; the last line of the output is one JSON object with seconds per round:

    training_s    the sources' steps and the target's distillation steps
    teaching_s    the target's predictions with every source's model
    voting_s      knowledge vote and consensus focus
    loading_s     copying the received arrays into the network
    packing_s     converting models to and from the form in which they are sent, and checking them
    averaging_s   the server's weighted mean
    testing_s     the target's test of the new model
    checkpoint_s  writing the run's state to disk
    other_s       the rest of the round in this process
    flower_s      with real processes: the time of all waves of messages, less the slowest site's
                  own work in each wave

In this process the sites work one after the other, so the first nine figures are sums over the
sites; flower_s is wall-clock time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live
import torch

from fedda import models
from fedda.algorithms import kd3a
from fedda.data import digits
from fedda.halves import load
from fedda.settings import RunConfig
from fedda.wire import packing

TARGET = "fonts"


class Clock:
    """Seconds spent in each part, without the time of other parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def on(self, part: str, owner: Any, *names: str) -> None:
        """Time a module's functions or a class's methods."""
        for name in names:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return work(*args, **more)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return timed


def clocked() -> Clock:
    """Put a clock on fedda's parts; it stays until this process ends."""
    clock = Clock()
    fedavg, target = load("clients", "fedavg"), load("clients", "kd3a").Target
    strategy, base = load("strategies", "kd3a"), load("strategies", "base")
    clock.on("training", fedavg.Source, "train")
    clock.on("training", target, "distil")
    clock.on("teaching", target, "teach")
    clock.on("voting", kd3a, "knowledge_vote", "consensus_focus")
    clock.on("loading", models, "load_arrays")
    for module in (packing, base, strategy):
        clock.on("packing", module, "pack")
    clock.on("packing", packing.Packed, "check_finite", "unpack")
    clock.on("packing", load("strategies", "sites.replies").Checks, "read")
    clock.on("averaging", kd3a, "mix")
    clock.on("testing", load("clients", "base").Client, "test")
    clock.on("checkpoint", load("server", "checkpoint"), "write")
    return clock


def configure(folder: Path, rounds: int, batch: int) -> RunConfig:
    flat = {"method": "kd3a", "rounds": rounds, "run.dir": str(folder), "run.name": "breakdown"}
    flat |= {"input.channels": 1, "input.size": 16, "train.batch-size": batch, "train.lr": 0.01}
    return RunConfig.parse(flat | {"run.expect": len(digits.DOMAINS)})


def in_process(folder: Path, config: RunConfig) -> dict[str, float]:
    """Seconds per round of each part."""
    local, journal = load("server", "simulation"), load("server", "journal")
    sites = local.folders(folder / "digits", TARGET, {}, 1)
    clock = clocked()
    start = time.perf_counter()
    local.simulate(config, sites, journal.Journal(), "process")
    whole = time.perf_counter() - start
    parts = dict(clock.seconds) | {"other": whole - sum(clock.seconds.values())}
    return {part: seconds / config.rounds for part, seconds in parts.items()}


def flower(folder: Path, config: RunConfig) -> float:
    """Median seconds per round that the waves of messages take beyond the slowest site's work."""
    roles = {name: "target" if name == TARGET else "source" for name in digits.DOMAINS}
    sites = {name: (role, folder / "digits" / name) for name, role in roles.items()}
    app = live.stage(folder / "app")
    more = {"rounds": config.rounds + live.WARM_UP}
    with live.Served(folder / "server", sites) as deployment:
        measured = live.run(deployment, app, "breakdown", config.flat() | more)
    rounds = measured.rounds[live.WARM_UP :]
    return statistics.median(sum(wave.overhead for wave in waves) for waves in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=500, help="training images of each site")
    parser.add_argument("--batch", type=int, default=25, help="images in a mini-batch")
    parser.add_argument("--no-live", action="store_true", help="skip the real processes")
    args = parser.parse_args()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        digits.build(folder / "digits", train=args.images, test=200)
        config = configure(folder / "runs", args.rounds, args.batch)
        seconds: dict[str, float] = {}
        if not args.no_live:
            live.say("as real processes")
            seconds["flower"] = flower(folder, config)
        live.say("in this process")
        seconds = in_process(folder, config) | seconds
    whole = sum(seconds.values())
    for part, took in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{part:12}{took:9.3f} s{100 * took / whole:7.1f} %", file=sys.stderr)
    print(json.dumps({f"{part}_s": round(took, 4) for part, took in seconds.items()}))


if __name__ == "__main__":
    main()
