"""Seconds a round costs beside training, over real processes on loopback with TLS and node keys.

    python examples/benchmarks/rounds.py

Starts a server and a client per site, each its own process. The sites hold a handful of random
vectors, so that a round is nearly all overhead: FedAvg's training wave to every source, the
evaluation wave to the target, and what the server does between them.

    resident_tiny_s        a round with a tiny model, less the sites' own work, median
    resident_tiny_wave_s   of it each wave: train, evaluate
    resident_45mb_s        a wave with a model of --mb megabytes, less the sites' own work: the
                           slower of the two kinds, each a median
    resident_45mb_wave_s   train, evaluate
    resident_45mb_round_s  a whole round, less the sites' own work
    stock_tiny_s           a round with Flower's own SuperNode (`fedda-client --stock`) for a client
    stock_tiny_wave_s      train, evaluate
    model_mb               the large model, in megabytes

The sites' own work is what they report as `seconds`: loading the model that came, training or
testing. The last line of the output is one JSON object with these keys.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import live

from fedda.ops.federation import Deployment

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
    parser.add_argument(
        "--mb", type=float, default=45.0, help="of the large model; 0: leave it out"
    )
    parser.add_argument("--mb-rounds", type=int, default=8, help="with the large model")
    parser.add_argument(
        "--stock-rounds", type=int, default=3, help="with Flower's SuperNode; 0: leave it out"
    )
    args = parser.parse_args()

    figures: dict[str, object] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        app = live.stage(folder / "app")
        sites = live.domains(folder / "data", args.sources)
        live.say(f"starting a server and {len(sites)} resident clients")
        with Deployment(folder / "resident", sites) as deployment:
            found = live.run(deployment, app, "tiny", tiny(args.rounds))
            figures["resident_tiny_s"] = round(found.overhead(), 3)
            figures["resident_tiny_wave_s"] = waves(found)
            live.say(f"tiny model: {figures['resident_tiny_s']} s a round")
            if args.mb:
                large = tiny(args.mb_rounds) | live.mlp(args.mb)
                found = live.run(deployment, app, "large", large)
                figures["resident_45mb_s"] = max(waves(found).values())
                figures["resident_45mb_wave_s"] = waves(found)
                figures["resident_45mb_round_s"] = round(found.overhead(), 3)
                figures["model_mb"] = round(found.model / 1e6, 2)
                live.say(f"{args.mb:g} MB: {figures['resident_45mb_s']} s a wave")
        if args.stock_rounds:
            live.say("starting a server and Flower's own SuperNodes")
            stock = {name: ["--stock"] for name in sites}
            with Deployment(folder / "stock", sites, client_options=stock) as deployment:
                found = live.run(deployment, app, "stock", tiny(args.stock_rounds))
                figures["stock_tiny_s"] = round(found.overhead(), 3)
                figures["stock_tiny_wave_s"] = waves(found)
    figures["load_before"] = round(load, 2)
    print(json.dumps(figures))


def tiny(rounds: int) -> dict[str, object]:
    """Settings of a FedAvg run with the tiny model."""
    # One more for the warm-up, one more because a round is timed to the beginning of the next.
    return {"method": "fedavg", "rounds": rounds + live.WARM_UP + 1} | live.mlp(TINY)


if __name__ == "__main__":
    main()
