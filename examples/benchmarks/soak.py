"""Whether a server or a site grows: rounds and runs on one server, again and again.

    python examples/benchmarks/soak.py --minutes 25

Starts a real server, light sites (see `light`) and one real `fedda-client`, whose data are a few
random vectors, and then one FedAvg run by `fedda run` after the other, each of --rounds rounds,
until the time is up. Every few seconds it notes resident memory and open files of the SuperLink and
of the client. A run's program (the ServerApp) lives as long as its run; its memory is that at the
end of the last round of each run, compared between runs. The last line of the output is one JSON
object:

    minutes         measured, after the first --warm-up runs
    rounds          done in that time
    runs            done in that time
    superlink       figures of the SuperLink with our gateway to it: see below
    client          figures of the real client
    run             figures of the runs' programs
    errors          troubles of the runs and at sites

Each process has these figures, between the first and the last quarter of the time:

    first_mb        median resident memory in the first quarter
    last_mb         the same in the last quarter
    growth          of the median, in percent
    per_1000        growth in percent per 1,000 rounds
    first_files     median number of open files in the first quarter
    last_files      the same in the last quarter
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import light
import live
import processes
import scale

Sample = tuple[float, processes.Usage]
REAL = "source-real"
PROCESSES = ("superlink", "client", "run")


class Sampler:
    """Notes what processes use, every few seconds, from a thread."""

    def __init__(self, pids: dict[str, int], every: float) -> None:
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self._pids = pids
        self._every = every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(self._every):
            for name, pid in self._pids.items():
                if (found := processes.usage(pid)) is not None:
                    self.samples[name].append((time.time(), found))


def grown(samples: list[Sample], rounds: int) -> dict[str, float]:
    """What changed between the first and the last quarter of the samples' time."""
    begin, end = samples[0][0], samples[-1][0]
    quarter = (end - begin) / 4
    first = [used for at, used in samples if at <= begin + quarter]
    last = [used for at, used in samples if at >= end - quarter]
    rss = [statistics.median(u.rss for u in part) / 1e6 for part in (first, last)]
    files = [statistics.median(u.files for u in part) for part in (first, last)]
    growth = 100 * (rss[1] / rss[0] - 1)
    # From the middle of the first quarter to that of the last lie three quarters of the rounds.
    return {
        "first_mb": round(rss[0], 1),
        "last_mb": round(rss[1], 1),
        "growth": round(growth, 2),
        "per_1000": round(growth * 1000 / (0.75 * rounds), 2),
        "first_files": files[0],
        "last_files": files[1],
    }


def beyond(figures: dict[str, Any], most: float) -> list[str]:
    """The processes whose memory grew by more than so many percent."""
    return [name for name in PROCESSES if figures[name]["growth"] > most]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="after the warm-up")
    parser.add_argument("--sites", type=int, default=10, help="light ones")
    parser.add_argument("--rounds", type=int, default=50, help="of each run")
    parser.add_argument("--warm-up", type=int, default=2, help="runs that do not count")
    parser.add_argument("--mb", type=float, default=0.1, help="size of the model")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument(
        "--most", type=float, help="growth in percent beyond which this exits with 1; none: any"
    )
    args = parser.parse_args()
    load, done, troubles = os.getloadavg()[0], 0, 0
    ends: list[Sample] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        vectors = live.domains(folder / "data", 1)["source-00"][1]
        live.say(f"{args.sites} light sites and a real one")
        with light.Light(folder / "fleet", args.sites, real={REAL: vectors}) as fleet:
            settings: dict[str, Any] = live.mlp(args.mb) | {"rounds": args.rounds}
            settings["guard.max-update"] = 0  # the light sites hardly move, and the real one does
            pids = {
                "superlink": fleet.processes["superlink"].popen.pid,
                "client": fleet.processes[REAL].popen.pid,
            }
            for number in range(args.warm_up):
                scale.watch(fleet, f"warm-{number}", settings, 1200)
            began = time.time()
            with Sampler(pids, args.every) as sampler:
                while not done or time.time() < began + 60 * args.minutes:
                    seen = scale.watch(fleet, f"run-{done}", settings, 1200)
                    done += 1
                    troubles += len(seen.results["events"])
                    for trouble in seen.results["events"]:
                        live.say(str(trouble))
                    # At the last look the program may have ended already.
                    last = next(look for look in reversed(seen.rounds) if "run" in look.used)
                    ends.append((time.time(), last.used["run"]))
                    used = {name: s[-1][1] for name, s in sampler.samples.items()}
                    live.say(f"{done} runs: {used}, {ends[-1][1]}")
            minutes = (time.time() - began) / 60
            for trouble in fleet.troubles():
                live.say(trouble)
            troubles += len(fleet.troubles())
    rounds = done * args.rounds
    figures: dict[str, Any] = {"minutes": round(minutes, 1), "rounds": rounds, "runs": done}
    figures |= {name: grown(samples, rounds) for name, samples in sampler.samples.items()}
    figures |= {"run": grown(ends, rounds), "errors": troubles, "load_before": round(load, 2)}
    print(json.dumps(figures))
    if args.most is not None and (larger := beyond(figures, args.most)):
        raise SystemExit(f"grown by more than {args.most:g} %: {', '.join(larger)}")


if __name__ == "__main__":
    main()
