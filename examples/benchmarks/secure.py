"""What it costs to hide single models: FedAvg's secure sums, and KD3A's sealed models.

    python examples/benchmarks/secure.py
    python examples/benchmarks/secure.py --methods kd3a --sources 3

Seconds and bytes of a round with `secure=sum` against `secure=none`, and with `kd3a.relay=sealed`
against `kd3a.relay=open`.

Starts a server and a client per site, each a separate process, over TLS with node keys on loopback.
They train a tiny model and one of --mb megabytes. The sites hold a few random vectors, so that a
round is nearly all overhead. The last line of the output is one JSON object:

    seconds   of a round, with the sites' work: the median over the rounds after the warm-up
    mb_from   megabytes of one round from all sites
    mb_to     megabytes of one round to all sites
    apart     largest difference between the two means after a first round, relative to the model's
              largest value

Each holds a figure per row of the table, and `apart` those of the rows that hide models.
"""

import argparse
import json
import os
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import live
import numpy as np
from safetensors.numpy import load_file

from fedda.ops.federation import Deployment
from fedda.results.escaping import markdown

TINY = 0.01  # MB
FIGURES = ("seconds", "mb_from", "mb_to")
# The setting that hides models, without and with it.
HIDES = {"fedavg": ("secure", "none", "sum"), "kd3a": ("kd3a.relay", "open", "sealed")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=HIDES, default=list(HIDES))
    parser.add_argument("--sources", type=int, nargs="+", default=[3, 10])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mb", type=float, default=45.0, help="size of the large model")
    parser.add_argument("--wire", default="float32", help="wire.dtype")
    args = parser.parse_args()
    rows: list[list[str]] = []
    figures: dict[str, dict[str, float]] = {k: {} for k in (*FIGURES, "apart")}
    load = os.getloadavg()[0]
    for count in args.sources:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            sites = live.domains(folder / "data", count)
            with live.Served(folder / "federation", sites) as deployment:
                for method, mb in product(args.methods, (TINY, args.mb)):
                    _, plain, hidden = HIDES[method]
                    found = {
                        value: measure(deployment, folder, mb, args, method, value)
                        for value in (plain, hidden)
                    }
                    apart = difference(*(each["first"] for each in found.values()))
                    for value, each in found.items():
                        name = f"{method}, {count} sources, {mb:g} MB, {value}"
                        for figure in FIGURES:
                            figures[figure][name] = each[figure]
                        row = [name, *(f"{each[figure]:.2f}" for figure in FIGURES)]
                        rows.append([*row, f"{apart:.0e}" if value == hidden else ""])
                    figures["apart"][f"{method}, {count} sources, {mb:g} MB, {hidden}"] = apart
                    live.say(f"{method}, {count} sources, {mb:g} MB: done")
    heads = ["training", "s a round", "MB from sites", "MB to sites", "apart"]
    print("\n".join(markdown(heads, rows)))
    print(json.dumps({**figures, "load_before": round(load, 2)}))


def measure(
    deployment: Deployment,
    folder: Path,
    mb: float,
    args: argparse.Namespace,
    method: str,
    value: str,
) -> dict[str, Any]:
    """Seconds and megabytes of a round, and the file of the model after one round."""
    app, trainings, last = live.stage(folder / f"app-{mb}-{value}"), {}, args.rounds + live.WARM_UP
    for count in (1, last):
        name = f"{value}-{mb}-{count}"
        settings = {"method": method, HIDES[method][0]: value, "rounds": count}
        settings |= {"wire.dtype": args.wire}
        live.run(deployment, app, name, settings | live.mlp(mb))
        file = deployment.directory / "runs" / name / "results.json"
        (trainings[count],) = json.loads(file.read_text())["trainings"][method]
    timed = trainings[last]["rounds"][live.WARM_UP :]
    sizes = timed[0]["bytes"]
    way = {w: sum(n for key, n in sizes.items() if key.startswith(f"{w} ")) for w in ("from", "to")}
    return {
        "seconds": round(statistics.median(entry["seconds"] for entry in timed), 3),
        **{f"mb_{w}": round(n / 1e6, 3) for w, n in way.items()},
        "first": trainings[1]["model"],
    }


def difference(one: str, other: str) -> float:
    """The largest difference of two models, relative to the largest value."""
    a, b = load_file(one), load_file(other)
    largest = max(float(np.abs(v).max()) for v in a.values())
    return max(float(np.abs(a[n].astype(float) - b[n]).max()) for n in a) / largest


if __name__ == "__main__":
    main()
