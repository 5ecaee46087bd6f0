"""What bringing the tables of several hospitals to one scale is worth: FedAvg and KD3A, six ways.

    python examples/benchmarks/harmonise.py --data DATA

DATA holds `heart_disease/`. Each hospital is the target once, with the preset `table` of the set
`heart` of grand.py, and columns

      none    as they are
      site    by each site's own mean and deviation: `input.window=own`, which the preset has
      combat  by each site's own, drawn towards each other by ComBat's empirical Bayes
      pooled  by the mean and deviation over all sites, the same at all: `input.window=c0=54/9,...`
      one     by those of the first site, at all sites
      coded   as pooled, with kind of pain, ECG, slope and thal by `input.categories`

Johnson, Li and Rabinovic, Biostatistics 2007, https://doi.org/10.1093/biostatistics/kxj037, without
covariates, as a target has no labels. Per site, of its n (d,) values of each column:

      z           (N, d)  values, less the mean of all sites and over the deviation within sites
      gamma       (d,)    the site's mean of z, its location; delta (d,) its variance, its scale
      gamma_bar, tau2     mean and variance of gamma over the columns: the prior of a location
      lam, theta          shape and scale of the inverse gamma that is the prior of a scale

Location and scale without that prior leave z / delta, which is `site` but for one factor and one
shift per column that all sites share. Printed are three tables: accuracy, the mean of the classes'
own accuracies, and the area under the ROC curve, which no shift of the answers changes. The last
line is one JSON object, what ComBat's prior changes at most:

    location    of a column at a site, in deviations
    scale       likewise, as a factor less 1
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import accuracy
import numpy as np
import sets
from sklearn import metrics

from fedda import data, models
from fedda.contrib.lab.comparison import Plan, Variant
from fedda.contrib.lab.comparison.plan import BENCHMARK
from fedda.contrib.lab.comparison.statistics import MEAN, Table, difference, of_numbers
from fedda.contrib.lab.comparison.tables import difference_text, spread_text
from fedda.data import Reading
from fedda.results.escaping import markdown
from fedda.results.read import MODEL

SET, OWN, NONE, COMBAT, CODED = "heart", "site", "none", "combat", "coded"
KINDS = {2: "1234", 6: "012", 10: "123", 12: "367"}  # columns whose numbers are kinds
METHODS = ("fedavg", "kd3a")
MEASURES: Mapping[str, Callable[..., float]] = {
    "accuracy": lambda y, ill: metrics.accuracy_score(y, ill > 0.5),
    "mean over classes": lambda y, ill: metrics.balanced_accuracy_score(y, ill > 0.5),
    "area under ROC": metrics.roc_auc_score,
}
STEPS, CLOSE = 200, 1e-8
LEAST = 0.01  # variance of a column that varies at a site


def within(sites: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean of all sites' values and deviation within sites, gaps left out -> (d,), (d,)."""
    mean = np.nanmean(np.concatenate(sites), axis=0)
    apart = np.concatenate([x - own(x)[0] for x in sites])
    return mean, np.sqrt(np.nanmean(np.square(apart), axis=0)) + 1e-9


def own(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, mean and variance of each column -> n (d,), (d,), (d,); 0 and 1 where there is none.

    The mean comes first.
    """
    n = (~np.isnan(x)).sum(axis=0)
    mean = np.nansum(x, axis=0) / np.maximum(n, 1)
    variance = np.nansum(np.square(x - mean), axis=0) / np.maximum(n - 1, 1)
    return mean, np.where(n > 1, variance, 1.0), n


def combat(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Johnson et al., section 3.2: posterior location and variance of a site -> (d,), (d,)."""
    gamma, delta, n = own(z)
    seen = n > 1
    gamma_bar, tau2 = gamma[seen].mean(), gamma[seen].var(ddof=1)
    m, s2 = delta[seen].mean(), delta[seen].var(ddof=1)
    lam, theta = (m**2 + 2 * s2) / s2, (m**3 + m * s2) / s2
    location, scale = gamma.copy(), delta.copy()
    for _ in range(STEPS):
        before = location, scale
        location = (n * tau2 * gamma + scale * gamma_bar) / (n * tau2 + scale)
        squares = np.nansum(np.square(z - location), axis=0)
        scale = (theta + squares / 2) / (n / 2 + lam - 1)
        if max(np.abs(location - before[0]).max(), np.abs(scale - before[1]).max()) < CLOSE:
            break
    return location, scale


def harmonised(sites: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The sites' values (N, d) by ComBat."""
    mean, deviation = within(sites)
    found = []
    for z in ((x - mean) / deviation for x in sites):
        location, scale = combat(z)
        found.append((z - location) / np.sqrt(scale))
    return found


def window(x: np.ndarray, without: Sequence[int] = ()) -> str:
    """The mean and deviation of columns to two digits, as `input.window` gives them to all."""
    pairs = enumerate(zip(np.nanmean(x, axis=0), np.nanstd(x, axis=0), strict=True))
    return ",".join(f"c{i}={mean:.2g}/{s:.2g}" for i, (mean, s) in pairs if i not in without)


def drawn(sites: Sequence[np.ndarray]) -> dict[str, float]:
    """The most that the prior changes: a location, and a scale as a factor less 1."""
    mean, deviation = within(sites)
    most = {"location": 0.0, "scale": 0.0}
    for z in ((x - mean) / deviation for x in sites):
        (gamma, delta, n), (location, scale) = own(z), combat(z)
        apart = {
            "location": location - gamma,
            "scale": np.sqrt(scale / np.maximum(delta, LEAST)) - 1,
        }
        varies = (n > 1) & (delta > LEAST)
        most = {k: max(v, float(np.abs(apart[k][varies]).max())) for k, v in most.items()}
    return most


def values(place: Path) -> list[np.ndarray]:
    """The training values of each site -> (N, d)."""
    return [np.load(file)["x_train"].astype(np.float64) for file in accuracy.domains(place)]


def prepared(place: Path, way: str) -> Path:
    """The folder of the sites in one way, whose columns have names, written if it is not there."""
    out = place.with_name(COMBAT if way == COMBAT else "named")
    if not (out / BENCHMARK).is_file():
        out.mkdir(parents=True, exist_ok=True)
        sites = values(place)
        for file, x in zip(
            accuracy.domains(place), harmonised(sites) if way == COMBAT else sites, strict=True
        ):
            names, y = [f"c{i}" for i in range(x.shape[1])], np.load(file)["y_train"]
            np.savez(out / file.name, x_train=x, y_train=y, x_test=x, y_test=y, columns=names)
        (out / BENCHMARK).write_text((place / BENCHMARK).read_text())
    return out


def plans(args: argparse.Namespace) -> dict[str, Plan]:
    """The trainings of each way."""
    whole, found = sets.plan(args, SET), {}
    sites = values(whole.data)
    windows = {NONE: "", OWN: "own", COMBAT: "", "pooled": window(np.concatenate(sites))}
    windows |= {"one": window(sites[0]), CODED: window(np.concatenate(sites), [*KINDS])}
    kinds = ",".join(f"c{i}={'|'.join(values)}" for i, values in KINDS.items())
    variants = [Variant(method) for method in METHODS]
    for way, text in windows.items():
        settings = whole.settings | {"input.window": text}
        settings |= {"input.categories": kinds} if way == CODED else {}
        place = {"data": prepared(whole.data, way), "out": args.out / way}
        found[way] = replace(whole, variants=variants, settings=settings, **place)
    return found


def measured(plan: Plan) -> dict[str, Table]:
    """What each training's model is worth at its target, by measure -> variant, target, seed."""
    scores, found = plan.scores(), {name: list[float]() for name in MEASURES}
    for cell in plan.cells():
        model, meta = models.load(plan.folder(cell) / MODEL)
        site = data.domains(plan.data)[cell.target]
        tests = data.load_evaluation(site, classes=meta.classes, **Reading().form(meta.inputs))
        assert tests is not None, "each hospital has labels to test on"
        ill, y = models.predict(model, tests.x)[:, 1].numpy(), tests.y.numpy()
        for name, measure in MEASURES.items():
            found[name].append(float(measure(y, ill)))
    return {name: of_numbers(scores, numbers, plan.targets) for name, numbers in found.items()}


def table(found: Mapping[str, Table], heads: Sequence[str]) -> list[str]:
    """One measure by method and way -> lines, with the difference from `site`."""
    rows = []
    for method in found[OWN]:
        for way, its in found.items():
            gain = difference(its[method][heads[-1]], found[OWN][method][heads[-1]])
            assert gain is not None, "all ways have the same seeds"
            cells = [spread_text(its[method][head]) for head in heads]
            rows.append([f"{method}, {way}", *cells, "" if way == OWN else difference_text(gain)])
    return markdown(["", *heads, f"minus {OWN}"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of heart_disease/")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/harmonise"), help="of trainings")
    parser.add_argument("--results", type=Path, help="also write what is found here")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--target", action="append", help="default: all hospitals")
    parser.set_defaults(rounds=0, images=0)  # of sets.py: the set's own
    args = parser.parse_args(arguments)

    found: dict[str, dict[str, Table]] = {name: {} for name in MEASURES}
    every = plans(args)
    targets = every[OWN].targets
    heads = [*targets, *([MEAN] if len(targets) > 1 else [])]
    for way, plan in every.items():
        if failed := plan.run(args.jobs, accuracy.note):
            raise SystemExit(f"{way}: {next(iter(failed.values()))}")
        for name, values_of in measured(plan).items():
            found[name][way] = values_of
    parts = ["## harmonise", "", f"{len(args.seeds)} seeds, intervals over these.", ""]
    for name, its in found.items():
        parts += [f"### {name}", "", *table(its, heads), ""]
    text = "\n".join(parts)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "harmonise.md").write_text(text.rstrip() + "\n")
    print(text)
    print(json.dumps(drawn(values(sets.plan(args, SET).data))))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
