"""What a choice among candidates costs, and what a lying candidate does to it.

    python examples/benchmarks/candidates.py --data DATA/digits

Both tables have digits of mnist, the same ones in every domain, turned by 0 to 150 degrees.

    time   `fruda`'s measurement with 1, 5 and 20 candidates, all digits at 0 degrees, for a target
           at 30. All sites are threads of one process. CPU seconds are those of a site's own
           thread, what it would take on a machine of its own. Shortest of --repeats.
    lies   labelled domains at 0, 60 and 150 degrees, and a target at 90: the one at 60 is nearest.
           DILS follows; accuracies are those of the last round, mean over the seeds.

Rows of `lies`:
    honest    nobody lies
    flipped   all labels at 60 degrees are changed; eps is measured on them, and looks good
    eps       150 degrees claims that it has no error
    distance  150 degrees claims that the mean of its critic, which only it can compute, is so low
              that the distance is 0, and that it has no error
    leaves    60 degrees answers nothing from the first round of the adaptation on

The last line is one JSON object:

    wall_s         seconds of the measurement, by the number of candidates
    target_cpu_s   CPU seconds of the target in it
    most_cpu_s     of the candidate with the most
    accuracy       row -> [mean, standard deviation over the seeds] in %, null if the run stopped
    chosen         row -> the candidate that each seed's target has chosen
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accuracy
import chain
import torch
from flwr.app import Error, Message

from fedda import records
from fedda.config.sections import Flat
from fedda.errors import QuorumError
from fedda.flower import ErrorCode
from fedda.halves import load
from fedda.results.escaping import markdown
from fedda.settings import RunConfig, overrides

COUNTS = (1, 5, 20)  # candidates
SOURCES, TARGET = ("0", "60", "150"), "90"  # degrees
NEAR, FAR = "60", "150"
LOW = -1e6  # a mean that no critic has
CLAIMS: dict[str, dict[str, float]] = {
    "eps": {"error": 0.0},
    "distance": {"error": 0.0, "first": LOW, "second": LOW},
}
ROWS = ("honest", "flipped", *CLAIMS, "leaves")
STOPPED = "stopped.txt"


def sites(folder: Path, row: str) -> list[dict[str, Any]]:
    """The sources, of which one may have wrong labels, and the target."""
    shared = {"threads": 1, "notes": False}
    made: list[dict[str, Any]] = [
        {"role": "source", "name": name, "data": str(folder / name), **shared} for name in SOURCES
    ]
    for site in made:
        site["poison"] = 100.0 if (row, site["name"]) == ("flipped", NEAR) else 0.0
    return [*made, {"role": "target", "name": TARGET, "data": str(folder / TARGET), **shared}]


def scripted(grid: Any, nodes: Sequence[Mapping[str, Any]], row: str) -> type:
    """A grid on which one candidate lies, or leaves."""

    class Scripted(grid):
        def _call(self, message: Message) -> Message:
            site = nodes[message.metadata.dst_node_id - 1]["name"]
            train = message.metadata.message_type == "train"
            hop = message.content["step"]["hop"] if train else ""
            if (row, site, hop) == ("leaves", NEAR, "adapt"):
                return Message(Error(ErrorCode.NODE_UNAVAILABLE), reply_to=message)
            reply = super()._call(message)
            if row in CLAIMS and (site, hop) == (FAR, "select") and not reply.has_error():
                arrays, tables = records.read(reply.content)
                told = {**tables["metrics"], **CLAIMS[row]}
                return Message(records.write(arrays, metrics=told), reply_to=message)
            return reply

    return Scripted


def lie(job: tuple[str, int], folder: Path, out: Path, changes: Flat) -> None:
    """Run once, unless it has been run."""
    row, seed = job
    place = out / f"{row}-{seed}"
    if any((place / name).is_file() for name in ("results.json", STOPPED)):
        return
    torch.set_num_threads(1)
    flat = {**chain.CHAIN, **changes, "method": "fruda", "run.dir": str(out), "wait.tries": 2}
    flat |= {"run.name": place.name, "run.seeds": str(seed), "run.target": TARGET}
    flat["run.resume"] = (place / "config.json").is_file()
    nodes, simulation = sites(folder, row), load("server", "simulation")
    grid = scripted(simulation.LocalGrid, nodes, row)
    with mock.patch.object(simulation, "LocalGrid", grid):
        journal = load("server", "journal").Journal()
        try:
            simulation.simulate(RunConfig.parse(flat), nodes, journal, "process")
        except QuorumError as error:
            (place / STOPPED).write_text(str(error))
    print(f"{row}, seed {seed}: done", flush=True)


def cost(folder: Path, out: Path, n: int, changes: Flat) -> dict[str, float]:
    """Measure n candidates once -> wall and CPU seconds of the measurement."""
    torch.set_num_threads(1)
    simulation = load("server", "simulation")
    seconds: dict[str, float] = {}

    class Timed(simulation.LocalGrid):
        def _call(self, message: Message) -> Message:
            began = time.thread_time()
            reply = super()._call(message)
            train = message.metadata.message_type == "train"
            if train and message.content["step"]["hop"] == "select":
                name = nodes[message.metadata.dst_node_id - 1]["name"]
                seconds[name] = time.thread_time() - began
            return reply

    shared = {"threads": 1, "notes": False}
    nodes = [
        {"role": "source", "name": f"c{i:02}", "data": str(folder / "0"), **shared}
        for i in range(n)
    ] + [{"role": "target", "name": "t", "data": str(folder / "30"), **shared}]
    flat = {**chain.CHAIN, **changes, "method": "fruda", "fruda.pretrain": 1, "rounds": 2}
    flat |= {"run.dir": str(out), "run.name": f"time-{n}-{time.time_ns()}"}
    with mock.patch.object(simulation, "LocalGrid", Timed):
        journal = load("server", "journal").Journal()
        results = simulation.simulate(RunConfig.parse(flat), nodes, journal, "process")
    (training,) = results["trainings"]["fruda"]
    target = seconds.pop("t")
    wall = training["rounds"][-1]["phases"]["train"]
    return {"wall_s": wall, "target_cpu_s": target, "most_cpu_s": max(seconds.values())}


def timed(args: argparse.Namespace, folder: Path, out: Path) -> dict[str, dict[str, float]]:
    """The shortest times by number of candidates, for each kind of time."""
    found: dict[str, dict[str, float]] = {}
    for n in COUNTS:
        each = [cost(folder, out, n, args.settings) for _ in range(args.repeats)]
        for key in each[0]:
            found.setdefault(key, {})[str(n)] = round(min(once[key] for once in each), 3)
    return found


def lies(args: argparse.Namespace, folder: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Accuracy and choice by row."""
    jobs = [(row, seed) for seed in args.seeds for row in ROWS]
    run = partial(lie, folder=folder, out=out, changes=args.settings)
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for _ in pool.imap_unordered(run, jobs):
            pass
    found: dict[str, dict[str, Any]] = {"accuracy": {}, "chosen": {}}
    for row in ROWS:
        places = [out / f"{row}-{seed}" for seed in args.seeds]
        if any((place / STOPPED).is_file() for place in places):
            found["accuracy"][row], found["chosen"][row] = None, []
            continue
        trainings = [
            json.loads((place / "results.json").read_text())["trainings"]["fruda"][0]
            for place in places
        ]
        percent = [100 * training["final_accuracy"] for training in trainings]
        spread = statistics.stdev(percent) if percent[1:] else 0.0
        found["accuracy"][row] = [round(statistics.fmean(percent), 2), round(spread, 2)]
        found["chosen"][row] = [training["selection"]["collaborator"] for training in trainings]
    return found


def report(found: Mapping[str, Any], settings: Flat, command: str) -> str:
    """The tables as Markdown."""
    told = ", ".join(f"`{k}={v}`" for k, v in settings.items() if not k.startswith("run."))
    lines = ["## candidates", "", f"    {command}", "", f"- settings: {told}", ""]
    if "wall_s" in found:
        heads = ["candidates", "seconds of all sites in turn", "CPU s, target", "CPU s, candidate"]
        keys = ("wall_s", "target_cpu_s", "most_cpu_s")
        rows = [[str(n), *(f"{found[key][str(n)]:.2f}" for key in keys)] for n in COUNTS]
        lines += [*markdown(heads, rows), ""]
    if "accuracy" in found:
        lines += [f"Labelled domains at {', '.join(SOURCES)} degrees, target at {TARGET}.", ""]
        rows = []
        for row, value in found["accuracy"].items():
            cell = "stopped" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}"
            rows.append([row, cell, ", ".join(found["chosen"][row])])
        lines += markdown(["", "accuracy in %", "chosen, by seed"], rows)
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of mnist.npz")
    both = ("time", "lies")
    parser.add_argument("--table", choices=both, action="append", help="default: both")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--images", type=int, default=2000, help="per domain; default: 2000")
    parser.add_argument("--repeats", type=int, default=3, help="of each time")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    out = Path("runs/candidates")
    parser.add_argument("--out", type=Path, default=out, help=f"for all runs; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the tables here")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="runs at the same time")
    args = parser.parse_args(arguments)
    args.settings = overrides("fruda", args.changes)
    folder = chain.domains("mnist-same", args.data, args.out, args.images)
    found: dict[str, Any] = {}
    for name, make in (("time", timed), ("lies", lies)):
        if name in (args.table or both):
            found |= make(args, folder, args.out / name)
    command = "python examples/benchmarks/candidates.py --data DATA/digits"
    command += partial(accuracy.typed, parser, args)("table", "seeds", "images", "changes")
    text = report(found, {**chain.CHAIN, **args.settings}, command)
    for place in filter(None, (args.out, args.results)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "candidates.md").write_text(text)
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
