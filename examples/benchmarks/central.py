"""What a federation costs in accuracy: the adversarial methods beside one plain loop.

    python examples/benchmarks/central.py --data DATA --target webcam --preset vectors

DATA holds one `.npz` per domain. Each method trains twice with the same seeds: over sites, as
`fedda run --simulate` does, and in one loop that has all sites' data. The loop has the same
network, the same rounds and batches of the same images. But all sites share one model, which
moves in every step, not once per round, and the discriminator learns from each step's own
gradient, not from sums that are exchange.p steps old.

The loop minimises what the federation's average minimises: site i's losses, weighted by its share
a_i in the average. Its classifier's gradient is divided by the sources' share, as classifiers are
averaged over the sources alone.

- MDAN's weights of the sources come from each step's own losses, over sites from the last round's.
- FADA is its model II, with sources weighted by their examples: attention compares the sources'
  models, and one loop has one model.
- DILS has one source, `dils.collaborator` or the largest. Its encoder stays as it is, so both
  trainings have two models, and differ by exchange.p alone.
- A source with fewer images than `exchange.min-examples` trains over sites on its labels alone;
  the loop aligns it, too.

The last line is one JSON object: method -> accuracies in % after the last round, one per seed:

    federated    over sites
    central      in one loop
    source_only  in one loop, without the adversarial loss
    difference   federated minus central, mean over the seeds
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accuracy
import torch
from couple import Couple
from joint import Joint
from loop import Loop

from fedda.config.sections import Flat
from fedda.data import describe
from fedda.halves import load
from fedda.settings import RunConfig, overrides, presets

METHODS = ("fdann", "fwdgrl", "fdan", "mdan", "fada", "dils")
# The loop has no model of each source, which FADA's attention compares, and no model III.
FIXED: dict[str, Flat] = {"fada": {"fada.parts": "adversarial", "fada.weighting": "examples"}}

Nodes = Sequence[dict[str, Any]]


def loop(config: RunConfig, nodes: Nodes, seed: int, aligned: bool = True) -> Loop:
    """The loop of a run's method; the arguments are those of `Loop`."""
    return (Couple if config.method == "dils" else Joint)(config, nodes, seed, aligned)


def federated(config: RunConfig, nodes: Nodes, seed: int, folder: Path) -> float:
    """The same training over sites, in one process -> accuracy in the last round, in %.

    The run is stored in the folder.
    """
    journal = load("server", "journal").Journal(None)
    simulate = load("server", "simulation").simulate
    update = {"dir": str(folder), "seeds": str(seed)}
    config = config.model_copy(update={"run": config.run.model_copy(update=update)})
    results = simulate(config, [dict(node) for node in nodes], journal, "process")
    return 100 * results["trainings"][config.method][0]["rounds"][-1]["accuracy"]


def configured(method: str, chosen: Sequence[str], changes: Sequence[str]) -> RunConfig:
    """The run of a method: the presets, with FedAvg's weights, then the changes."""
    flat = presets.settings("fedavg", chosen)
    given = flat.pop("fedavg.weighting", None)
    if given is not None and method not in ("fada", "dils"):
        flat[f"{method}.weighting"] = given
    flat |= FIXED.get(method, {}) | overrides(method, list(changes))
    others = tuple(f"{name}." for name in METHODS if name != method)
    own = {key: value for key, value in flat.items() if not key.startswith(others)}
    return RunConfig.parse(own | {"method": method, "track.tensorboard": False})


def taking_part(config: RunConfig, nodes: Nodes) -> Nodes:
    """The sites that train: with DILS the target and one source, else all."""
    if config.method != "dils":
        return nodes
    sources = {node["name"]: node for node in nodes if node["role"] == "source"}
    sizes = {name: describe(Path(node["data"]), "source").train for name, node in sources.items()}
    chosen = config.options["dils"].collaborator or max(sizes, key=sizes.__getitem__)
    return [node for node in nodes if node["role"] == "target" or node["name"] == chosen]


def compare(config: RunConfig, nodes: Nodes, seeds: Sequence[int]) -> dict[str, Any]:
    """Both trainings with each seed -> the figures of one method."""
    over_sites = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            over_sites.append(federated(config, nodes, seed, Path(folder)))
    figures = {
        "federated": over_sites,
        "central": [loop(config, nodes, seed).run() for seed in seeds],
        "source_only": [loop(config, nodes, seed, aligned=False).run() for seed in seeds],
    }
    table = {name: [round(value, 1) for value in each] for name, each in figures.items()}
    pairs = zip(figures["federated"], figures["central"], strict=True)
    return table | {"difference": round(statistics.fmean(a - b for a, b in pairs), 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with one .npz per domain")
    parser.add_argument("--target", required=True, help="name of the domain without labels")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--preset", action="append", default=[], help="as of fedda run")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    nodes = [
        {
            "role": "target" if path.stem == args.target else "source",
            "name": path.stem,
            "data": str(path),
            "threads": 1,
        }
        for path in sorted(args.data.glob("*.npz"))
    ]
    if not any(node["role"] == "target" for node in nodes):
        parser.error(f"{args.data} has no {args.target}.npz")
    if not describe(args.data / f"{args.target}.npz", "target").test:
        parser.error(f"{args.target}.npz has no labelled tests; give it x_test and y_test")
    answer = {}
    for method in args.method or METHODS:
        config = configured(method, args.preset, args.changes)
        answer[method] = compare(config, taking_part(config, nodes), args.seeds)
        print(f"{method}: {answer[method]}", flush=True)
    print(json.dumps(answer))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
