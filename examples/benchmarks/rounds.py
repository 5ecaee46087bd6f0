"""Seconds of a round apart from training, over real processes on loopback with TLS and node keys.

    python examples/benchmarks/rounds.py

Starts a server and a client per site, each a separate process. The sites hold a few random
vectors, so that a round is nearly all overhead: FedAvg's training wave to every source, the
evaluation wave to the target, and the server's work between them. All figures are medians, less the
sites' own work.

    first_round_s          from `fedda run` to the end of round 1, with a tiny model
    resident_tiny_s        a round with a tiny model
    resident_tiny_wave_s   each wave of such a round: train, evaluate
    resident_45mb_s        a wave with a model of --mb megabytes, the slower of the two kinds
    resident_45mb_wave_s   each wave with that model: train, evaluate
    resident_45mb_round_s  a whole round with that model
    resident_frozen_s      a whole round of a ResNet-18 of which only a bottleneck learns
    frozen_mb              the size of what travels of it, in megabytes
    frozen_whole_mb        the size of all of it
    model_mb               the size of the large model, in megabytes

The sites' own work is the time that they report as `seconds`: loading the received model, training
or testing. The last line of the output is one JSON object with these keys.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import live
import torch
import torchvision

from fedda.errors import RunError
from fedda.ops.federation import PROGRAM, Deployment
from fedda.ops.spawn import Process

TINY = 0.01  # MB


def waves(measured: live.Measured) -> dict[str, float]:
    """Median overhead of each kind of wave."""
    return {
        kind: round(statistics.median(w.overhead for w in measured.per_wave(kind)), 3)
        for kind in ("train", "evaluate")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="with the tiny model")
    parser.add_argument("--starts", type=int, default=3, help="of `fedda run`, for its median")
    parser.add_argument(
        "--mb", type=float, default=45.0, help="size of the large model; 0: skip it"
    )
    parser.add_argument("--mb-rounds", type=int, default=8, help="with the large model")
    parser.add_argument(
        "--frozen-rounds", type=int, default=8, help="with the frozen ResNet-18; 0: skip it"
    )
    args = parser.parse_args()

    figures: dict[str, object] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        app = live.stage(folder / "app")
        sites = live.domains(folder / "data", args.sources)
        live.say(f"starting a server and {len(sites)} resident clients")
        with live.Served(folder / "resident", sites) as deployment:
            starts = [first_round(deployment, number) for number in range(args.starts)]
            figures["first_round_s"] = round(statistics.median(starts), 2)
            live.say(f"the first round ends after {figures['first_round_s']} s")
            measured = live.run(deployment, app, "tiny", tiny(args.rounds))
            figures["resident_tiny_s"] = round(measured.overhead(), 3)
            figures["resident_tiny_wave_s"] = waves(measured)
            live.say(f"tiny model: {figures['resident_tiny_s']} s a round")
            if args.mb:
                large = tiny(args.mb_rounds) | live.mlp(args.mb)
                measured = live.run(deployment, app, "large", large)
                figures["resident_45mb_s"] = max(waves(measured).values())
                figures["resident_45mb_wave_s"] = waves(measured)
                figures["resident_45mb_round_s"] = round(measured.overhead(), 3)
                figures["model_mb"] = round(measured.model / 1e6, 2)
                live.say(f"{args.mb:g} MB: {figures['resident_45mb_s']} s a wave")
        if args.frozen_rounds:
            live.say("starting a server and resident clients with images")
            figures |= frozen(folder, app, args)
    figures["load_before"] = round(load, 2)
    print(json.dumps(figures))


def first_round(deployment: Deployment, number: int) -> float:
    """Seconds from starting `fedda run`, as an operator does, to the end of the first round."""
    runs, name = deployment.directory / "runs", f"first-{number}"
    settings = {key: value for key, value in tiny(0).items() if key != "method"} | {"rounds": 1}
    words = ["run", "fedavg", "--server", deployment.home, "--dir", runs, "--name", name]
    words += ["--baseline", "none", *(f"-c{key}={value}" for key, value in settings.items())]
    began = time.time()
    command = [*PROGRAM, *map(str, words)]
    operator = Process(name, command, deployment.logs / f"{name}.log", deployment.env)
    if operator.popen.wait() != 0:
        raise RunError(f"fedda run failed: {operator.tail()}")
    events = map(json.loads, (runs / name / "journal.jsonl").read_text().splitlines())
    return next(event["time"] for event in events if event["event"] == "round") - began


def frozen(folder: Path, app: Path, args: argparse.Namespace) -> dict[str, object]:
    """Time rounds of a network whose weights, here random ones, lie at every site."""
    weights = folder / "resnet18.pth"
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), weights)
    sites = live.domains(folder / "images", args.sources, shape=(32, 32, 3))
    own = {name: ["--weights", str(weights)] for name in sites}
    chosen = {"name": "resnet18", "weights": str(weights), "train": "bottleneck", "bottleneck": 256}
    settings = {
        "method": "fedavg",
        "rounds": args.frozen_rounds + live.WARM_UP + 1,
        **{f"model.{key}": value for key, value in chosen.items()},
    }
    with live.Served(folder / "frozen", sites, client_options=own) as deployment:
        measured = live.run(deployment, app, "frozen", settings)
    return {
        "resident_frozen_s": round(measured.overhead(), 3),
        "frozen_mb": round(measured.model / 1e6, 2),
        "frozen_whole_mb": round(weights.stat().st_size / 1e6, 1),
    }


def tiny(rounds: int) -> dict[str, object]:
    """Settings of a FedAvg run with the tiny model."""
    # One more round for the warm-up, and one because a round is timed until the next one begins.
    return {"method": "fedavg", "rounds": rounds + live.WARM_UP + 1} | live.mlp(TINY)


if __name__ == "__main__":
    main()
