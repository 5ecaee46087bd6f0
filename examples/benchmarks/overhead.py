"""Processor seconds per training image, federated against a plain PyTorch loop.

    python examples/benchmarks/overhead.py

Both train the same digit-cnn on the same synthetic 28 x 28 images, with the same batches,
optimizer and learning rates, one thread, in this process. The plain loop trains one source's model,
round after round. The federated run is a run of fedda: FedAvg with one source and no evaluation.
Its time includes the server's run loop, the strategy, packing, the wire contract, checks,
averaging, checkpoint and journal, but not Flower's transport (--live measures that at the clients).

    cpu_ratio              federated / plain, median of --repeats pairs measured alternately
    cpu_ratios             the ratio of each pair
    federated_cpu_ms       processor milliseconds per training image in the federated run
    plain_cpu_ms           the same in the plain loop
    live_client_cpu_ratio  with --live: processor time of a real fedda-client process, as the kernel
                           counts it, / the plain loop; it includes Flower, TLS and polling
    load_before            the machine's load average when the benchmark began

The last line of the output is one JSON object with these keys.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import live
import numpy as np
import torch
from torch.nn import functional as F

from fedda import models
from fedda.config import IMAGES_HIDE
from fedda.halves import load
from fedda.settings import RunConfig
from fedda.train import batches, learning_rate, make_optimizer, round_images, seed_for

SIDE, CLASSES = 28, 10
SOURCE, TARGET = "source", "target"


def make_data(folder: Path, images: int) -> tuple[Path, Path]:
    """Write the source's file, noise with labels, and the target's, a little noise without."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (images, SIDE, SIDE), dtype=np.uint8)
    y = np.arange(images) % CLASSES
    np.savez(folder / f"{SOURCE}.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    np.savez(folder / f"{TARGET}.npz", x_train=x[:8])
    return folder / f"{SOURCE}.npz", folder / f"{TARGET}.npz"


def configure(rounds: int, folder: Path, name: str) -> RunConfig:
    """A run of FedAvg without evaluation."""
    flat = {"method": "fedavg", "rounds": rounds, "run.dir": str(folder), "run.name": name}
    flat |= {"run.expect": 2, "run.evaluate": False, "wait.sites": 5.0}
    return RunConfig.parse(flat)


def federated(config: RunConfig, source: Path, target: Path) -> None:
    """The whole run in this process, one site after the other."""
    sites = [
        {"role": SOURCE, "name": SOURCE, "data": str(source), "device": "cpu", "threads": 1},
        {"role": TARGET, "name": TARGET, "data": str(target), "device": "cpu", "threads": 1},
    ]
    load("server", "simulation").simulate(
        config, sites, load("server", "journal").Journal(), "process"
    )


def plain(config: RunConfig, source: Path) -> None:
    """A training loop on the source's data as it is usually written, without a federation."""
    with np.load(source) as file:
        x, y = torch.from_numpy(file["x_train"])[:, None], torch.from_numpy(file["y_train"])
    model = models.build(config.model, (1, SIDE, SIDE), CLASSES, 0)
    model.compute(model.arithmetic)  # its weights in the layout that sites have, too
    seed = seed_for(0, SOURCE)
    blocks = torch.arange(len(x)).tensor_split(len(x) // IMAGES_HIDE)  # a site's are as large
    for server_round in range(1, config.rounds + 1):
        rate = learning_rate(config.train, server_round, config.rounds)
        optimizer = make_optimizer(model.groups(rate), config.train, rate)
        model.train()
        shares = round_images(blocks, server_round, config.train.rounds_per_epoch, seed)
        for indices in batches(shares, config.train.batch_size):
            loss = F.cross_entropy(model(x[indices].float() / 255), y[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def cpu(work: Callable[[], None]) -> float:
    """Processor seconds of this process, all its threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def of_process(pid: int) -> float:
    """Processor seconds a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def live_client(config: RunConfig, folder: Path, source: Path, target: Path) -> float:
    """Processor seconds of a real source process over a real run."""
    sites = {SOURCE: (SOURCE, source), TARGET: (TARGET, target)}
    app = live.stage(folder / "app")
    with live.Served(folder / "server", sites) as deployment:
        live.run(deployment, app, "warm-up", config.flat() | {"rounds": 1})
        pid = deployment.processes[SOURCE].popen.pid
        before = of_process(pid)
        live.run(deployment, app, "live", config.flat())
        return of_process(pid) - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="each is one pass over the images")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--live", action="store_true", help="measure real processes as well")
    args = parser.parse_args()

    torch.set_num_threads(1)
    load_before = round(os.getloadavg()[0], 2)
    trained = args.images * args.rounds
    ours, theirs = [], []
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, target = make_data(folder, args.images)
        first = configure(1, folder, "warm-up")  # imports and loads the site's data, not timed
        federated(first, source, target)
        plain(first, source)
        for number in range(args.repeats):
            config = configure(args.rounds, folder, f"run-{number}")
            ours.append(cpu(lambda c=config: federated(c, source, target)))
            theirs.append(cpu(lambda c=config: plain(c, source)))
            live.say(f"federated {ours[-1]:.2f} s, plain {theirs[-1]:.2f} s")
        if args.live:
            config = configure(args.rounds, folder, "live")
            seconds = live_client(config, folder, source, target)
            figures["live_client_cpu_ratio"] = round(seconds / statistics.median(theirs), 3)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    figures |= {
        "cpu_ratio": round(statistics.median(ratios), 4),
        "cpu_ratios": [round(r, 4) for r in ratios],
        "federated_cpu_ms": round(1000 * statistics.median(ours) / trained, 4),
        "plain_cpu_ms": round(1000 * statistics.median(theirs) / trained, 4),
        "load_before": load_before,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
