"""How many sites one server carries: its processor time, memory, requests and open files.

    python examples/benchmarks/scale.py
    python examples/benchmarks/scale.py --sites 4 25 --mb 1 --rounds 5

Starts a real server, light sites (`light`: real connections with TLS and a node key each, but they
answer at once, without torch or data), and a FedAvg run by `fedda run` for each size of the model.
All but one of the sites are sources, one is the target. All is on this machine, so the sites take
processor time from the server: the seconds of a round are those of a busy server, and the
processor time is the figure to plan with. Prints a table, and on the last line one JSON object:

    seconds        of a round, median
    cpu_ms         milliseconds of processor of all server processes, per site and round
    superlink_ms   those of the SuperLink, with our gateway to it
    run_ms         those of the run's program (the ServerApp)
    rss_mb         resident memory of all server processes, at most
    pss_mb         the same with shared memory counted once
    mb_per_site    pss_mb less that with the fewest sites, per further site
    run_models     highest memory of the run's program above that before the first round, in models;
                   not given for models below 10 MB, as other memory changes by as much
    requests_s     requests of sites per second, heartbeats and all
    requests       requests per site and round
    files          open files of the SuperLink, at most
    errors         answers of status 400 and above, troubles of the run and at sites
    wire_mb        megabytes per site and round, both ways, as counted at the server's socket

Each holds a figure per number of sites and size of the model, `25 sites, 1 MB`. A round counts from
the end of the one before it; the first one and the last one, which has a calibration, do not.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import light
import live
import processes

from fedda.errors import RunError
from fedda.ops.federation import PROGRAM
from fedda.ops.spawn import Process
from fedda.results.escaping import markdown

LOOK = 0.05  # seconds between two looks at a run's journal
COUNTED_S = 2.2  # seconds until the server has written its counts again
FIGURES = (
    *("seconds", "cpu_ms", "superlink_ms", "run_ms", "rss_mb", "pss_mb", "mb_per_site"),
    *("run_models", "requests_s", "requests", "files", "errors", "wire_mb"),
)


@dataclass
class Look:
    """The server's processes at one moment: `used` by role."""

    at: float
    used: dict[str, processes.Usage]

    def cpu(self, role: str = "") -> float:
        """Seconds of processor so far, of one role or of all."""
        return sum(u.cpu for name, u in self.used.items() if role in ("", name))


@dataclass
class Watched:
    """A run as it was seen from outside, round by round."""

    begin: Look | None = None  # before the first round
    rounds: list[Look] = field(default_factory=list)  # at the end of each
    looks: list[Look] = field(default_factory=list)  # in between
    traffic: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def look(server: int) -> Look:
    """Measure the server's processes; several of one role are added up."""
    used: dict[str, processes.Usage] = {}
    for pid, role in processes.server(server).items():
        if (now := processes.usage(pid)) is not None:
            had = used.get(role, processes.Usage(0.0, 0, 0, 0))
            pairs = zip(vars(had).values(), vars(now).values(), strict=True)
            used[role] = processes.Usage(*(a + b for a, b in pairs))
    return Look(time.time(), used)


def watch(fleet: light.Light, name: str, settings: dict[str, Any], seconds: float) -> Watched:
    """Run `fedda run fedavg` on a server and measure at the end of each round.

    Raises:
        RunError: the run failed or took longer.
    """
    runs, server = fleet.directory / "runs", fleet.processes["superlink"].popen.pid
    command = [*PROGRAM, "run", "fedavg", "--server", fleet.home, "--dir", runs, "--name", name]
    changes = {"run.expect": len(fleet.sites), "wait.sites": seconds} | settings
    command += [word for key, value in changes.items() for word in ("-c", f"{key}={value}")]
    log = fleet.logs / f"run-{name}.log"
    operator = Process(f"run-{name}", list(map(str, command)), log, fleet.env)
    fleet.processes[operator.name] = operator
    seen, place, ends, next_look = Watched(), 0, time.monotonic() + seconds, 0.0
    journal = runs / name / "journal.jsonl"
    while operator.alive:
        if time.monotonic() > ends:
            raise RunError(f"the run {name} took longer than {seconds:.0f} s:\n{operator.tail()}")
        text = journal.read_text() if journal.exists() else ""
        whole = text.rfind("\n") + 1
        events = [json.loads(line)["event"] for line in text[place:whole].splitlines()]
        place = whole
        if "training" in events:
            seen.begin = look(server)
        if "round" in events:  # on a busy machine several may end between two looks
            seen.rounds += [look(server)] * events.count("round")
        if time.monotonic() > next_look:
            next_look = time.monotonic() + 1
            seen.looks.append(look(server))
            count_requests(fleet.traffic, seen.traffic)
        time.sleep(LOOK)
    time.sleep(COUNTED_S)
    count_requests(fleet.traffic, seen.traffic)
    results = runs / name / "results.json"
    if operator.popen.returncode or not results.exists():
        raise RunError(f"the run {name} failed:\n{operator.tail()}")
    seen.results = json.loads(results.read_text())
    return seen


def count_requests(file: Path, seen: list[dict[str, Any]]) -> None:
    """Add the server's count of requests if it is a new one."""
    if file.exists():
        now = json.loads(file.read_text())
        if not seen or seen[-1]["written"] != now["written"]:
            seen.append(now)


def figures(seen: Watched, sites: int, errors_at_sites: int) -> dict[str, float]:
    """The figures of a run: see the head of this file."""
    assert seen.begin is not None
    counted = seen.rounds[live.WARM_UP - 1 : -1]
    first, last = counted[0], counted[-1]
    shares = 1000 / sites / (len(counted) - 1)
    cpu = {role: (last.cpu(role) - first.cpu(role)) * shares for role in ("", "superlink", "run")}
    spans = [b.at - a.at for a, b in pairwise(counted)]
    all_looks = [*seen.looks, *seen.rounds]
    (training,) = seen.results["trainings"]["fedavg"]
    model = training["rounds"][0]["bytes"]["to source model"] / (sites - 1)
    idle = seen.begin.used["run"].rss
    highest = max(x.used["run"].rss for x in all_looks if "run" in x.used)
    inside = [t for t in seen.traffic if first.at <= t["written"] <= last.at]
    old, *_, new = inside if len(inside) > 2 else [seen.traffic[0], seen.traffic[-1]]
    seconds = statistics.median(spans)
    times = sites * (new["written"] - old["written"]) / seconds  # sites and rounds in between
    per_round = {k: (new["total"][k] - old["total"][k]) / times for k in new["total"]}
    old, new = seen.traffic[0], seen.traffic[-1]
    errors = sum(_of(new, path, "errors") - _of(old, path, "errors") for path in new["routes"])
    errors += new["refused"] - old["refused"] + len(seen.results["events"]) + errors_at_sites
    found = {
        "seconds": seconds,
        "cpu_ms": cpu[""],
        "superlink_ms": cpu["superlink"],
        "run_ms": cpu["run"],
        "rss_mb": max(sum(u.rss for u in x.used.values()) for x in all_looks) / 1e6,
        "pss_mb": max(sum(u.pss for u in x.used.values()) for x in all_looks) / 1e6,
        "requests_s": per_round["requests"] * sites / seconds,
        "requests": per_round["requests"],
        "files": max(x.used["superlink"].files for x in all_looks),
        "errors": errors,
        "wire_mb": (per_round["bytes-in"] + per_round["bytes-out"]) / 1e6,
    }
    if model >= 1e7:
        found["run_models"] = (highest - idle) / model
    return {key: round(value, 3) for key, value in found.items()}


def _of(traffic: dict[str, Any], path: str, what: str) -> int:
    """A count of one path; 0 if nobody called it yet."""
    return traffic["routes"].get(path, {}).get(what, 0)


def measure(sites: int, megabytes: list[float], rounds: int, seconds: float) -> dict[str, Any]:
    """Start a server with this many sites, and run once per size of the model."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        live.say(f"{sites} light sites")
        with light.Light(Path(scratch) / "fleet", sites) as fleet:
            for mb in megabytes:
                settings = live.mlp(mb) | {"rounds": rounds + live.WARM_UP + 1}
                before = len(fleet.troubles())
                seen = watch(fleet, f"run-{mb:g}", settings, seconds)
                at_sites = fleet.troubles()[before:]
                row = figures(seen, sites, len(at_sites))
                for trouble in (*at_sites, *seen.results["events"]):
                    live.say(str(trouble))
                found[f"{sites} sites, {mb:g} MB"] = row
                live.say(f"{sites} sites, {mb:g} MB: {row}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 10, 25, 50, 100])
    parser.add_argument("--mb", type=float, nargs="+", default=[0.01, 1.0], help="of the model")
    parser.add_argument("--rounds", type=int, default=10, help="that count")
    parser.add_argument("--seconds", type=float, default=600, help="that a run may take")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rows: dict[str, dict[str, float]] = {}
    for sites in sorted(args.sites):
        rows |= measure(sites, args.mb, args.rounds, args.seconds)
    fewest = min(args.sites)
    for name, row in rows.items():
        sites, size = name.split(" sites, ")
        more = int(sites) - fewest
        grown = row["pss_mb"] - rows[f"{fewest} sites, {size}"]["pss_mb"]
        row["mb_per_site"] = round(grown / more, 3) if more else 0.0
    table = [[name, *(str(row.get(f, "")) for f in FIGURES)] for name, row in rows.items()]
    print("\n".join(markdown(["", *FIGURES], table)))
    by_figure = {f: {n: row[f] for n, row in rows.items() if f in row} for f in FIGURES}
    print(json.dumps({**by_figure, "load_before": round(load, 2)}))


if __name__ == "__main__":
    main()
