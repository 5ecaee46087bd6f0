"""How well validators and estimates tell, without labels, which model is the good one.

    python examples/benchmarks/validators.py --data DATA --out OUT
    python examples/benchmarks/validators.py --runs OUT

DATA holds one folder or `.npz` per domain, with labelled tests. Each domain is the target once;
each method trains with each seed, as with `fedda compare`, in OUT, where a later start goes on.
--runs reads the finished trainings of such a folder, or of a comparison's, and trains nothing.

The trainings of one target are ranked by each validator, by the estimated accuracy, and by the
true one, which only this comparison sees. The last line is one JSON object:

    trainings            how many, over all targets
    correlation          Spearman's rank correlation with the true accuracy, mean over the targets
    regret_points        accuracy of the target's best training minus that of the chosen one, mean
    random_points        the same for a choice at random
    fedavg_points        the same for always FedAvg, the mean over its seeds
    kept_points          accuracy gained by run.keep=better, mean over trainings that adapt
    estimate_error_points  mean absolute difference of estimated and true accuracy
    estimate_bias_points   mean of estimated minus true accuracy
    covered              share of the trainings whose accuracy is within the interval
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accuracy
from scipy.stats import spearmanr

from fedda.comparison import Plan
from fedda.comparison.options import shared_of
from fedda.comparison.variants import parse
from fedda.data import domains
from fedda.errors import RunError
from fedda.plugins import method as method_of
from fedda.results import transfer
from fedda.results.read import RESULTS
from fedda.results.worth import VALIDATORS

METHODS = ("fedavg", "adabn", "kd3a", "fdann", "mdan")
ESTIMATE = "estimate"
Training = Mapping[str, Any]
ByTarget = Mapping[str, Sequence[Training]]


def worth(training: Training) -> dict[str, float]:
    """What a training says without labels, by name."""
    values = {n: training["validators"][n] for n in VALIDATORS}
    return values | {ESTIMATE: training["estimate"]["accuracy"]}


def correlation(values: Sequence[float], truth: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where all of one side are equal."""
    if len(set(values)) < 2 or len(set(truth)) < 2:
        return None
    ranked: Any = spearmanr(values, truth)
    return float(ranked.statistic)


def regret(values: Sequence[float], truth: Sequence[float]) -> float:
    """How much better the best is than the one with the highest value; equal ones count alike."""
    highest = max(values)
    chosen = [t for v, t in zip(values, truth, strict=True) if v == highest]
    return max(truth) - statistics.fmean(chosen)


def gained(trainings: Sequence[Training]) -> list[float]:
    """What `run.keep=better` adds to each adapting training's accuracy."""
    base = {t["seed"]: t for t in trainings if t["method"] == "fedavg"}
    gains = []
    for t in trainings:
        if method_of(t["method"]).adapts and t["seed"] in base:
            other = base[t["seed"]]
            worse = transfer.negative(t, other)
            gains.append((other["final_accuracy"] - t["final_accuracy"]) * worse)
    return gains


def figures(found: ByTarget) -> dict[str, Any]:
    """All that the last line says."""
    names = [*VALIDATORS, ESTIMATE]
    ranks: dict[str, list[float]] = {name: [] for name in names}
    regrets: dict[str, list[float]] = {name: [] for name in names}
    random_, fedavg, gains, errors, inside = [], [], [], [], []
    for trainings in found.values():
        truth = [t["final_accuracy"] for t in trainings]
        for name in names:
            values = [worth(t)[name] for t in trainings]
            rank = correlation(values, truth)
            ranks[name] += [] if rank is None else [rank]
            regrets[name].append(regret(values, truth))
        random_.append(max(truth) - statistics.fmean(truth))
        of_fedavg = [t["final_accuracy"] for t in trainings if t["method"] == "fedavg"]
        fedavg += [max(truth) - statistics.fmean(of_fedavg)] if of_fedavg else []
        gains += gained(trainings)
        for t in trainings:
            errors.append(t["estimate"]["accuracy"] - t["final_accuracy"])
            low, high = t["estimate"]["low"], t["estimate"]["high"]
            inside.append(low <= t["final_accuracy"] <= high)
    return {
        "trainings": len(errors),
        "correlation": {name: mean(values) for name, values in ranks.items()},
        "regret_points": {name: mean(values, 100) for name, values in regrets.items()},
        "random_points": mean(random_, 100),
        "fedavg_points": mean(fedavg, 100),
        "kept_points": mean(gains, 100),
        "estimate_error_points": mean([abs(e) for e in errors], 100),
        "estimate_bias_points": mean(errors, 100),
        "covered": mean([float(i) for i in inside]),
    }


def mean(values: Sequence[float], times: float = 1.0) -> float | None:
    """The mean to three digits; None of nothing."""
    return round(times * statistics.fmean(values), 3) if values else None


def saved(folder: Path) -> dict[str, list[Training]]:
    """The finished trainings below a folder that have an accuracy and an estimate, by target."""
    found: dict[str, list[Training]] = {}
    for path in sorted(folder.rglob(RESULTS)):
        for method, trainings in json.loads(path.read_text())["trainings"].items():
            for t in trainings:
                if t.get("estimate") and t["final_accuracy"] is not None:
                    found.setdefault(t["target"], []).append({**t, "method": method})
    if not found:
        raise RunError(
            f"{folder} has no finished training with an estimate and labelled tests; give the "
            "folder of a comparison of this version."
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--data", type=Path, help="folder with one folder or .npz per domain")
    where.add_argument("--runs", type=Path, help="folder of finished trainings")
    parser.add_argument("--out", type=Path, help="where trainings are kept; needed with --data")
    parser.add_argument("--method", action="append", help=f"default: {', '.join(METHODS)}")
    parser.add_argument("--target", action="append", help="default: each domain once")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--preset", action="append", default=[], help="as of fedda compare")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    args = parser.parse_args(arguments)
    if args.data:
        if args.out is None:
            parser.error("--data needs --out")
        settings = shared_of(args.changes, args.preset, 0)
        targets = args.target or [*domains(args.data)]
        variants = parse(args.method or METHODS)
        plan = Plan(args.data, args.out, variants, targets, args.seeds, settings)
        failed = plan.run(args.jobs, lambda what, cell, value: print(what, cell.name, flush=True))
        for cell, error in failed.items():
            print(f"{cell.name} failed: {error}", flush=True)
    print(json.dumps(figures(saved(args.runs or args.out))))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
