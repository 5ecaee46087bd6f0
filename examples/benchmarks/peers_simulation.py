"""The same FedAvg simulated by fedda, fluke and Flower's engine: seconds, processor, accuracy.

    python examples/benchmarks/peers_simulation.py
    python examples/benchmarks/peers_simulation.py --peer fedda --peer fluke --sources 16

Each peer is one program, started anew, over the same files: sources with equal numbers of the
demo's digits, in gray, and a target whose 500 tests the model is tested on after each round. All
train the layers of fedda's `lenet` (`peers_network.py`) by plain SGD, an epoch a round, in float32,
with one thread. Orders of images and first weights are each peer's own. Repeats take turns.

- fedda: `fedda run fedavg --simulate`, its engine within one process, as it is by default: every
  model is packed, checked against the method's contract and bounded, sites keep their state, and
  each round is in the journal, with what is estimated without labels.
- fluke: its FedAVG and its default test of seven figures, without a log or files. It is installed
  into an environment of its own.
- flower: Flower's FedAvg on its simulation engine, Ray, with one processor per client: several
  clients work at the same time, where the others take turns.

The last line is one JSON object: figure -> `peer, sources` -> median over the repeats.

    round_s        from the end of a round to the end of the next, median over the rounds but the
                   first; of fedda also without the last, in which the target takes its last step
    first_round_s  from the start of the program to the end of round 1
    whole_s        from the start of the program to its end
    cpu_s          seconds of processor of all its processes in such a round
    accuracy       of the target's tests after the last round, in %: to see that all do the same
    over_fluke     round_s of each peer over that of fluke
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import live
import numpy as np
import peers
import processes
from peers_network import SOURCE, TARGET, Wanted

from fedda.data import digits
from fedda.errors import RunError
from fedda.results.escaping import markdown

HERE = Path(__file__).parent
FIGURES = ("round_s", "first_round_s", "whole_s", "cpu_s", "accuracy", "over_fluke")
PEERS = ("fedda", "fluke", "flower")
DRAWN = ("handwritten", "blended", "street")  # the sources' digits; the target has fonts


def write_sites(folder: Path, count: int, images: int) -> None:
    """Write so many sources, each with so many images of one kind of digits, and the target."""
    folder.mkdir()
    for kind, name in enumerate(DRAWN):
        mine = range(kind, count, len(DRAWN))
        x, y = drawn(name, "train", images * len(mine), kind)
        for place, number in enumerate(mine):
            part = slice(place * images, (place + 1) * images)
            np.savez(folder / f"{SOURCE}{number:03}.npz", x_train=x[part], y_train=y[part])
    x, y = drawn("fonts", "test", 500, len(DRAWN))
    np.savez(folder / f"{TARGET}.npz", x_train=x[:images], x_test=x, y_test=y)


def drawn(name: str, split: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits of one kind in gray (N, 16, 16), and their labels (N,), in an order by chance."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(count) % digits.CLASSES)
    if not count:
        return np.zeros((0, digits.SIDE, digits.SIDE), np.uint8), y
    x = digits.draw(name, split, y, rng, 0)
    return (x if x.ndim == 3 else x.mean(axis=3).round().astype(np.uint8)), y


def command(peer: str, data: Path, folder: Path, wanted: Wanted, fluke: Path) -> list[str]:
    """The program of a peer, with its arguments."""
    if peer == "fedda":
        rates = {"train.lr": wanted.lr, "train.lr-end": wanted.lr, "train.momentum": 0}
        own = {"model.name": "lenet", "train.batch-size": wanted.batch, "run.baseline": "none"}
        changes = [w for k, v in {**rates, **own}.items() for w in ("-c", f"{k}={v}")]
        words = ["run", "fedavg", "--simulate", data, "--target", TARGET, "--dir", folder]
        words += ["--name", "run", "--rounds", wanted.rounds + 1, *changes]
        return [sys.executable, "-m", "fedda", *map(str, words)]
    python = str(fluke / "bin" / "python") if peer == "fluke" else sys.executable
    program = HERE / ("peers_fluke.py" if peer == "fluke" else "peers_engine.py")
    return [python, *map(str, (program, data, *wanted, folder / "found.json"))]


def found(peer: str, folder: Path) -> tuple[list[float], float]:
    """When training began and its rounds ended, and the accuracy in %, after a program's end."""
    if peer != "fedda":
        said = json.loads((folder / "found.json").read_text())
        return said["stamps"], 100 * said["accuracy"]
    lines = [json.loads(line) for line in (folder / "run" / "journal.jsonl").open()]
    ends = [line for line in lines if line["event"] == "round"][:-1]
    began = next(line["time"] for line in lines if line["event"] == "training")
    return [began, *(line["time"] for line in ends)], 100 * ends[-1]["accuracy"]


def measure(peer: str, data: Path, wanted: Wanted, fluke: Path) -> dict[str, float]:
    """Run one peer's program -> the figures of the head of this file, but `over_fluke`.

    Raises:
        RunError: it failed; the message has the end of its output.
    """
    # With PYTHONPATH, fedda's modules and packages would be found before fluke's own.
    env = {k: v for k, v in os.environ.items() if peer != "fluke" or k != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "log").open("w+") as log:
        folder = Path(scratch)
        words, ordered = command(peer, data, folder, wanted, fluke), time.time()
        with subprocess.Popen(words, env=env, stdout=log, stderr=log) as program:
            below = partial(processes.server, program.pid)
            trial = peers.Trial("", lambda *_: True, ordered, members=below)
            with trial.watched():
                program.wait()
        whole = time.time() - ordered
        if program.returncode:
            tail = "\n".join((folder / "log").read_text().splitlines()[-15:])
            raise RunError(f"{peer} failed:\n{tail}")
        trial.stamps, accuracy = found(peer, folder)
    figures = trial.figures()
    return {
        "round_s": figures["round_s"],
        "first_round_s": figures["first_round_s"],
        "whole_s": whole,
        "cpu_s": figures["server_cpu_s"],
        "accuracy": accuracy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", choices=PEERS, help="again for more; all")
    parser.add_argument("--sources", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--images", type=int, default=192, help="of each source")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fluke", type=Path, default=Path("peers-fluke"), help="environment")
    parser.add_argument("--version", default="0.8.1", help="of fluke-fl")
    args = parser.parse_args()
    chosen, load = args.peer or PEERS, os.getloadavg()[0]
    fluke = args.fluke.absolute()
    if "fluke" in chosen:
        peers.install(fluke, f"fluke-fl=={args.version}")
    wanted = Wanted(args.rounds, args.batch, args.lr)
    tried: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for count in args.sources:
            write_sites(Path(scratch) / str(count), count, args.images)
        for _ in range(args.repeats):
            for count in args.sources:
                for peer in chosen:
                    one = measure(peer, Path(scratch) / str(count), wanted, fluke)
                    live.say(f"{peer}, {count}: { {k: round(v, 3) for k, v in one.items()} }")
                    tried.setdefault(f"{peer}, {count}", []).append(one)
    rows = {
        key: {name: statistics.median(each[name] for each in all_) for name in all_[0]}
        for key, all_ in tried.items()
    }
    for key, row in rows.items():
        if other := rows.get(f"fluke, {key.partition(', ')[2]}"):
            row["over_fluke"] = row["round_s"] / other["round_s"]
    table = [
        [n, *(f"{row[f]:.3g}" if f in row else "" for f in FIGURES)] for n, row in rows.items()
    ]
    print("\n".join(markdown(["", *FIGURES], table)))
    figures = {f: {n: round(row[f], 4) for n, row in rows.items() if f in row} for f in FIGURES}
    print(json.dumps({**figures, "load_before": round(load, 2)}))


if __name__ == "__main__":
    main()
