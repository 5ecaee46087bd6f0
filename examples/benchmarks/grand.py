"""The grand table: every method, on every target of some sets of data, with the same seeds.

    python examples/benchmarks/grand.py --data DATA --set surf --set googlenet

DATA holds the data sets as for accuracy.py and photos.py; the set `photos` needs fedda[pretrained],
and `rotated` no DATA. This one, `heart` (`heart_disease/`: 13 values of patients of four hospitals,
with gaps) and `amazon400` (`amazon_review_400/`, on which FADA's table 4 stands) are used only if
they are named. Each domain of a set is the target once. Every method has the set's preset and its
own defaults, and nothing was chosen with the labels of a target; `--long` has hidden layers and
forty rounds in place of the preset's. Trainings are kept in --out, so
the same command goes on where it was stopped; seeds come one after another, so a stopped one has
complete tables of fewer seeds. `--report` trains nothing and writes what there is.

DILS and FRUDA are left out: they adapt from one source, or a chain of targets (chain.py). Where a
method does not fit a target, FedAvg stands for it: sums of gradients need 256 examples at each
site, and dslr has 157.

The last line is one JSON object:

    tasks, seeds         how many targets, and how many seeds each of them has
    mean_rank            over the tasks, by method; 1 is best
    critical_difference  of mean ranks, by Nemenyi's test at 5 %
    friedman             probability of such ranks if all methods were alike
    gain_points          accuracy minus FedAvg's, mean over the tasks, by method
    refined_gain_points  the same for what the target's last step makes of the method's model
    refined_worst_points  its least gain over the tasks
    refined_regret_always_points  accuracy of the best refined model in hindsight minus that of
                         always one method's
    regret_always_points the same among the unrefined ones
    seconds              of all trainings
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import ranks
import sets

from fedda import plugins
from fedda.config.sections import Flat
from fedda.contrib.lab.comparison import Cell, Plan, Score, Variant
from fedda.contrib.lab.comparison.statistics import MEAN, by_target, difference
from fedda.contrib.lab.comparison.tables import difference_text, spread_text
from fedda.contrib.lab.comparison.variants import parse
from fedda.errors import FeddaError
from fedda.halves import load
from fedda.results.escaping import markdown
from fedda.results.read import counted

BASELINE = Variant("fedavg", label="FedAvg")
VARIANTS = [
    BASELINE,
    Variant("fedprox", label="FedProx"),
    Variant("adabn", label="AdaBN"),
    Variant("autodial", label="AutoDIAL"),
    Variant("centring", label="Centring"),
    Variant("kd3a", label="KD3A"),
    Variant("feddadil", label="FedDaDiL-R"),
    Variant("feddadil", settings={"feddadil.predict": "ensemble"}, label="FedDaDiL-E"),
    Variant("fdann", label="f-DANN"),
    Variant("fwdgrl", label="f-WDGRL"),
    Variant("fdan", label="f-DAN"),
    Variant("mdan", label="MDAN"),
    Variant("fada", label="FADA"),
    Variant("shot", label="SHOT"),
    Variant("decision", label="DECISION"),
    Variant("comda", label="Co-MDA"),
    Variant("fact", label="FACT"),
]
SHORT: Flat = {"rounds": 2, "train.rounds-per-epoch": 0.1}  # ten epochs of a source in each
QUICK = [
    Variant("fedavg", settings=SHORT, label="FedAvg, 2 rounds"),
    Variant("centring", settings=SHORT, label="Centring, 2 rounds"),
]
SETS = ("surf", "googlenet", "amazon", "photos", "rotated-mnist", "digits")
STEM = "grand"
# What papers report as their gain over source-only in the mean over all targets, in points; FADA's
# tables 1, 2 and 4, KD3A's tables 6 and 9, and SHOT's own results for its digits and Office table.
FADA, KD3A = "FADA", "KD3A"
REVIEWS = [
    ("f-DANN", 2.2, FADA),
    ("AdaBN", 2.3, FADA),
    ("AutoDIAL", 2.5, FADA),
    ("f-DAN", 3.0, FADA),
    ("FADA", 4.3, FADA),
    ("FADA paper-amazon", 4.3, FADA),
]
PAPERS: dict[str, list[tuple[str, float, str]]] = {
    "digits": [
        ("AdaBN", 7.8, FADA),
        ("AutoDIAL", 12.3, FADA),
        ("f-DANN", 13.1, FADA),
        ("f-DAN", 14.2, FADA),
        ("FADA", 20.1, FADA),
        ("MDAN", 6.4, KD3A),
        ("SHOT", 9.9, KD3A),
        ("FADA", 0.5, KD3A),
        ("KD3A", 11.7, KD3A),
    ],
    "amazon": REVIEWS,  # of 5,000 words; the paper's have 400
    "amazon400": REVIEWS,
    "photos": [
        ("AutoDIAL", 0.3, FADA),
        ("f-DANN", 0.7, FADA),
        ("FADA", 1.5, FADA),
        ("MDAN", 3.3, KD3A),
        ("SHOT", 4.9, KD3A),
        ("KD3A", 5.1, KD3A),
        ("SHOT", 1.1, "SHOT"),
    ],
}


@dataclass(frozen=True)
class Task:
    """One target of one set, and all trainings for it.

    Attributes:
        plan: the trainings of the methods that fit.
        unfit: why the others do not, by name.
        names: of all methods.
    """

    plan: Plan
    unfit: Mapping[str, str]
    names: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.plan.out.name}, {self.plan.targets[0]}"

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds that every method has finished."""
        cells = self.plan.cells()
        lacking = {cell.seed for cell in cells if self.plan.results(cell) is None}
        return [seed for seed in self.plan.seeds if seed not in lacking]

    @cached_property
    def scores(self) -> dict[str, list[Score]]:
        """By method, in the order of the seeds; without the methods that do not fit."""
        found: dict[str, list[Score]] = {}
        for score in replace(self.plan, seeds=self.seeds).scores():
            found.setdefault(score.variant, []).append(score)
        return found

    @cached_property
    def truth(self) -> dict[str, float]:
        """Mean accuracy by method; a method that does not fit has FedAvg's."""
        return self._means(lambda score: score.last)

    @cached_property
    def refined(self) -> dict[str, float]:
        """The same for what the target's last step makes of each model, or leaves as it is."""
        return self._means(lambda score: score.last if score.refined is None else score.refined)

    def _means(self, accuracy: Callable[[Score], float | None]) -> dict[str, float]:
        own = {
            name: statistics.fmean(a for s in scores if (a := accuracy(s)) is not None)
            for name, scores in self.scores.items()
        }
        return {name: own.get(name, own[BASELINE.name]) for name in self.names}

    def gain(self, name: str) -> float:
        """Accuracy of a method minus FedAvg's."""
        return self.truth[name] - self.truth[BASELINE.name]

    def gain_refined(self, name: str) -> float:
        """Accuracy of a method's refined model minus that of FedAvg's unrefined one."""
        return self.refined[name] - self.truth[BASELINE.name]

    def regret(self, name: str) -> float:
        """Points that the best method in hindsight is above one."""
        return 100 * (max(self.truth.values()) - self.truth[name])

    def regret_refined(self, name: str) -> float:
        """The same among the refined models."""
        return 100 * (max(self.refined.values()) - self.refined[name])


def tasks(args: argparse.Namespace) -> list[Task]:
    """All targets of the wanted sets."""
    chosen = {BASELINE.method, *(args.method or (v.method for v in VARIANTS))}
    variants = [v for v in VARIANTS if v.method in chosen]
    variants += parse(args.also) if args.also else []
    variants += QUICK * args.quick
    found = []
    for name in args.set or SETS:
        whole = sets.plan(args, name)
        for target in whole.targets:
            one = replace(whole, targets=[target])
            why = {v.name: obstacle(v.method, one) for v in variants}
            unfit = {method: text for method, text in why.items() if text}
            fit = [v for v in variants if v.name not in unfit]
            found.append(Task(replace(one, variants=fit), unfit, [v.name for v in variants]))
    return found


def obstacle(name: str, plan: Plan) -> str:
    """Why a method does not fit data and network; empty if it does."""
    cell = Cell(Variant(name), plan.targets[0], plan.seeds[0])
    if plugins.method(name).batchnorm and plan.config(cell).model.norm != "batch":
        return "the network has no BatchNorm layer"
    try:
        load("server", "simulation").rehearse(plan.config(cell), plan.sites(cell))
    except FeddaError as error:
        return str(error)
    return ""


def gains(every: Sequence[Task], name: str) -> list[float]:
    return [t.gain(name) for t in every]


def interval(values: Sequence[float]) -> str:
    """Mean of the tasks' gains in points, and its interval over the tasks."""
    found = difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    assert found is not None, "there is a task"
    return difference_text(found)


def figures(every: Sequence[Task]) -> dict[str, Any]:
    """All that the last line says."""
    names = every[0].names
    scores = np.array([[t.truth[n] for n in names] for t in every])
    mean_ranks = ranks.ranks(scores).mean(axis=0)
    scored = [s for t in every for scores in t.scores.values() for s in scores]
    points = {n: 100 * statistics.fmean(gains(every, n)) for n in names}
    after = {n: [100 * t.gain_refined(n) for t in every] for n in names}
    return {
        "tasks": len(every),
        "seeds": min(len(t.seeds) for t in every),
        "mean_rank": {n: round(float(r), 2) for n, r in zip(names, mean_ranks, strict=True)},
        "critical_difference": round(ranks.critical_difference(len(names), len(every)), 2),
        "friedman": ranks.friedman(scores) if len(every) > 1 and len(names) > 2 else None,
        "gain_points": {n: round(p, 2) for n, p in points.items()},
        "refined_gain_points": {n: round(statistics.fmean(g), 2) for n, g in after.items()},
        "refined_worst_points": {n: round(min(g), 2) for n, g in after.items()},
        "refined_regret_always_points": {
            n: round(statistics.fmean(t.regret_refined(n) for t in every), 2) for n in names
        },
        "regret_always_points": {
            n: round(statistics.fmean(t.regret(n) for t in every), 2) for n in names
        },
        "seconds": round(sum(s.seconds for s in scored)),
    }


def summary(every: Sequence[Task], found: Mapping[str, Any]) -> list[str]:
    """One row per method, the best mean rank first."""
    heads = ["", "mean rank", "best at", "gain over FedAvg", "worst gain"]
    heads += ["refined: gain", "worst gain", "mean regret"]
    heads += ["MB", "seconds"]
    rows = []
    for name in sorted(found["mean_rank"], key=lambda n: found["mean_rank"][n]):
        scores = [s for t in every for s in t.scores.get(name, ())]
        best = sum(t.truth[name] == max(t.truth.values()) for t in every)
        row = [name, f"{found['mean_rank'][name]:.1f}", str(best), interval(gains(every, name))]
        row += [f"{100 * min(gains(every, name)):+.1f}"]
        row += [interval([t.gain_refined(name) for t in every])]
        row += [f"{found['refined_worst_points'][name]:+.1f}"]
        row += [f"{found['refined_regret_always_points'][name]:.1f}"]
        row += [f"{statistics.fmean(s.bytes for s in scores) / 1e6:.1f}" if scores else "–"]
        row += [f"{statistics.fmean(s.seconds for s in scores):.1f}" if scores else "–"]
        rows.append(row)
    return markdown(heads, rows)


def of_set(every: Sequence[Task]) -> list[str]:
    """Accuracy by method and target of one set."""
    scores = [s for t in every for each in t.scores.values() for s in each]
    table = by_target(scores, targets=[t.plan.targets[0] for t in every])
    heads = ["", *(t.plan.targets[0] for t in every)]
    rows = [
        [name, *(spread_text(row[h]) if h in row else "–" for h in heads[1:])]
        for name, row in table.items()
    ]
    return markdown(heads, rows)


def beside_papers(every: Sequence[Task]) -> list[str]:
    """Gains over FedAvg of one set beside those in papers; empty if there are none.

    The interval is over the seeds, of the mean over the targets that the method fits.
    """
    rows = []
    for name, gain, source in PAPERS.get(every[0].plan.out.name.removesuffix(sets.FULL), []):
        own = [t for t in every if name in t.scores]
        if not own:
            continue
        tables = [by_target([s for t in own for s in t.scores[n]]) for n in (name, BASELINE.name)]
        column = MEAN if len(own) > 1 else own[0].plan.targets[0]
        ours, base = (next(iter(table.values())).get(column, {}) for table in tables)
        if (found := difference(ours, base)) is None:
            continue
        inside = found.low is None or found.high is None or found.low <= gain / 100 <= found.high
        rows.append([name, difference_text(found), f"{gain:+.1f}", source, "" if inside else "no"])
    return markdown(["", "gain here", "in the paper", "of", "inside"], rows) if rows else []


def report(every: Sequence[Task], found: Mapping[str, Any], command: str, picture: str) -> str:
    """The whole text."""
    lines = [f"## {STEM}", "", f"    {command}", ""]
    lines += [f"{counted(len(every), 'target')}, {counted(found['seeds'], 'seed')} or more.", ""]
    lines += [
        "All gains are over FedAvg's unrefined model; the regret is among refined models.",
        "",
    ]
    lines += [*summary(every, found), "", f"![Mean ranks and critical difference]({picture})", ""]
    sets = dict.fromkeys(t.plan.out.name for t in every)
    for name in sets:
        own = [t for t in every if t.plan.out.name == name]
        rounds = own[0].plan.settings["rounds"]
        seeds = ", ".join(map(str, own[0].seeds))
        lines += [f"### {name}", "", f"{rounds} rounds, seeds {seeds}.", "", *of_set(own), ""]
        if papers := beside_papers(own):
            lines += [*papers, ""]
        unfit: dict[str, list[str]] = {}
        for method, why in dict.fromkeys(pair for t in own for pair in t.unfit.items()):
            unfit.setdefault(why, []).append(method)
        lines += [f"- {', '.join(names)}: {why}" for why, names in unfit.items()]
        lines += [""] * bool(unfit)
    return "\n".join(lines).rstrip() + "\n"


def train(every: Iterable[Task], seeds: Sequence[int], jobs: int) -> None:
    """Train what is missing, seed by seed; a failed training is said and left out."""
    made = [*every]
    for seed in seeds:
        for task in made:
            part = replace(task.plan, seeds=[seed])
            for cell, error in part.run(jobs, accuracy.note).items():
                print(f"{task.name}, {cell.name} failed: {error}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sets.add_options(parser, SETS, Path("runs/grand"))
    names = [*dict.fromkeys(v.method for v in VARIANTS)]
    parser.add_argument("--method", choices=names, action="append", help="default: all")
    text = "FedAvg and centring also in two rounds of ten epochs each"
    parser.add_argument("--quick", action="store_true", help=text)
    also = "a further variant, such as fada:paper-amazon"
    parser.add_argument("--also", action="append", metavar="METHOD:PRESET", help=also)
    parser.add_argument("--report", action="store_true", help="train nothing")
    args = parser.parse_args(arguments)

    every = tasks(args)
    if not args.report:
        train(every, args.seeds, args.jobs)
    done = [t for t in every if t.seeds]
    if not done:
        raise SystemExit("No target has a seed that all methods have finished.")
    found = figures(done)
    command = "python examples/benchmarks/grand.py --data DATA"
    what = "set", "long", "method", "quick", "also", "target", "rounds", "images", "seeds"
    command += accuracy.typed(parser, args, *what)
    text = report(done, found, command, f"{STEM}.png")
    for folder in filter(None, (args.out, args.results)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{STEM}.md").write_text(text)
        ranks.draw(found["mean_rank"], len(done), folder / f"{STEM}.png")
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
