"""How good `fedda choose` is: it chooses without labels, and the labels then say what it missed.

    python examples/benchmarks/choose.py --data DATA --set surf --set googlenet

DATA holds the data sets as for accuracy.py and photos.py, and `office_caltech10_surf800/`; the set
`rotated` needs none. Each domain of a set is the target once. For each target the command's search
runs as it would for a user; beside it every usual method is trained in full with its default
settings, so that the choice can be compared with always taking the same method. Where a method does
not fit a target, FedAvg stands for it. Trainings are kept in --out, so the same command continues
where it was stopped. Office-Caltech10 has no split: a target is tested on the images that it adapts
to.

The last line is one JSON object, means over all targets of all sets:

    targets              how many
    regret_points        accuracy of the target's best candidate in hindsight minus the chosen one's
    regret_rule_points   the same if the rule chooses among the methods' defaults, without a search
    regret_always_fedavg   the same for always taking a method with its defaults
    regret_always_adabn    likewise
    regret_always_kd3a     likewise
    regret_always_fdann    likewise
    regret_always_mdan     likewise
    regret_alone         the same for what each validator takes among the defaults
    correlation          rank correlation of each validator with the accuracy, over the defaults
    estimate_error_points  mean absolute difference of estimated and true accuracy
    seconds              of all trainings
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accuracy
import photos
import torch
import validators
from adversarial import mnist, pens

from fedda import data, plugins
from fedda.choose.candidates import USUAL, candidates, methods_of, obstacle
from fedda.choose.decision import KINDS, Candidate, Decision, decide
from fedda.choose.search import Search, truths
from fedda.choose.verdict import sureness
from fedda.comparison import Plan, Variant
from fedda.comparison.tables import markdown
from fedda.config import Flat
from fedda.errors import ConfigError, RunError
from fedda.halves import REFERENCE
from fedda.results.read import counted
from fedda.settings import presets

SETS = ("surf", "googlenet", "amazon", "office", "digits", "rotated")
# Sets that are used where they are named; the last one has all images at the papers' size.
MORE = ("photos", "rotated-mnist", "amazon400", "heart", "digits-full")
FULL = "-full"
VECTORS = {
    "surf": "office_caltech10_surf800",
    "googlenet": "office_caltech10_googlenet1024",
    "amazon400": "amazon_review_400",
    "heart": "heart_disease",
}
TABLES = ("heart",)  # of VECTORS, those with gaps: the preset `table` as it is
ROUNDS = 20  # with vectors; a third of the preset's, so that a set takes minutes per seed
IMAGES, DRAWN = 300, 2  # images of a domain of rotated; settings drawn per method
PENS: Flat = {"model.name": "mlp", "model.hidden": "100", "train.batch-size": 32, "rounds": 12}


@dataclass(frozen=True)
class Judged:
    """One target: what was chosen without labels, and what labels say of all.

    Attributes:
        target: the set and the domain.
        found: the search's decision.
        ruled: the rule's decision among the methods' defaults.
        truth: accuracy of every variant that was trained in full.
        full: the defaults' evidence.
        seconds: of all trainings.
    """

    target: str
    found: Decision
    ruled: Decision
    truth: Mapping[Variant, float]
    full: Sequence[Candidate]
    seconds: float

    @property
    def best(self) -> Variant:
        return max(self.truth, key=lambda v: self.truth[v])

    def regret(self, variant: Variant) -> float:
        """How many points the best is above a variant; FedAvg stands for one that does not fit."""
        own = self.truth.get(variant, self.truth[Variant(REFERENCE)])
        return 100 * (self.truth[self.best] - own)

    @property
    def alone(self) -> dict[str, Variant]:
        return dict(self.ruled.alone)


def plan(args: argparse.Namespace, name: str) -> Plan:
    """The data and settings of one set; all its domains are targets."""
    out, variants = args.out / name, [Variant(REFERENCE)]
    if name in VECTORS:
        photos.prepare(args.data / VECTORS[name], out / "data")
        chosen = presets.for_all("table" if name in TABLES else "vectors", plugins.methods())
        settings: Flat = {key: given.value for key, given in chosen.items()}
        if name not in TABLES:
            settings |= {"rounds": ROUNDS, "train.batch-size": photos.BATCH}
        place = out / "data"
    elif name == "photos":
        photos.prepare(args.data / "office_caltech10_photos", out / "data")
        chosen = presets.for_all("photos", plugins.methods())
        settings = {key: given.value for key, given in chosen.items()}
        settings["train.batch-size"] = photos.BATCH
        place = out / "data"
    elif name == "rotated":
        place, settings = pens(out, args.images or IMAGES), {**PENS}
    elif name == "rotated-mnist":
        place = mnist(args.data / "digits", out, args.images or 2 * IMAGES)
        settings = {"rounds": accuracy.BENCHMARKS["digits"].epochs}
        settings |= accuracy.BENCHMARKS["digits"].settings
    else:
        b = accuracy.BENCHMARKS[name.removesuffix(FULL)]
        images, tests = (0, 0) if name.endswith(FULL) else (args.images or b.images, b.tests)
        accuracy.prepare(args.data / b.folder, out / "data", images, tests)
        place, settings = out / "data", {"rounds": b.epochs, **b.settings, **b.kd3a}
        settings |= b.full if name.endswith(FULL) else {}
    settings |= {"rounds": args.rounds} if args.rounds else {}
    domains = [*data.domains(place)]
    if odd := set(args.target or ()) - set(domains):
        raise ConfigError(f"{name} has no domain {min(odd)}; it has {', '.join(domains)}.")
    return Plan(place, out, variants, args.target or domains, args.seeds, settings)


def judge(whole: Plan, target: str, jobs: int) -> Judged:
    """Search for one target, train every default in full, and compare both with the labels."""
    one = replace(whole, targets=[target])
    methods, _ = methods_of([], lambda name: obstacle(name, one))
    made = candidates(methods, DRAWN, one.settings, 0)
    search = Search(replace(one, variants=made), jobs)
    outcome = search.run(lambda part, cells: nullcontext(accuracy.note))
    defaults = [v for v in made if not v.settings]
    full = search.at(search.rungs[-1], defaults)
    for cell, error in full.run(jobs, accuracy.note).items():
        raise RunError(f"{cell.name} failed: {error}")
    found, evidence = decide(outcome.candidates), search.evidence(full)
    variants = [*dict.fromkeys([*defaults, *(c.variant for c in outcome.candidates)])]
    truth = truths(full, variants, one.seeds)
    seconds, _ = search.spent()
    where = f"{whole.out.name}, {target}"
    return Judged(where, found, decide(evidence), truth, evidence, seconds)


def figures(every: Sequence[Judged]) -> dict[str, Any]:
    """All that the last line says."""
    mean = validators.mean
    errors = []
    for judged in every:
        for c in judged.full:
            told = c.mean("estimate")
            errors += [] if told is None else [abs(told - judged.truth[c.variant])]
    alone = {kind: [j.regret(j.alone[kind]) for j in every if kind in j.alone] for kind in KINDS}
    always = {m: mean([j.regret(Variant(m)) for j in every]) for m in USUAL}
    return {
        "targets": len(every),
        "regret_points": mean([j.regret(j.found.chosen) for j in every]),
        "regret_rule_points": mean([j.regret(j.ruled.chosen) for j in every]),
        **{f"regret_always_{m}": value for m, value in always.items()},
        "regret_alone": {kind: mean(values) for kind, values in alone.items()},
        "correlation": correlations([(c, j.truth[c.variant]) for c in j.full] for j in every),
        "estimate_error_points": mean(errors, 100),
        "seconds": round(sum(j.seconds for j in every)),
    }


def correlations(
    every: Iterable[Sequence[tuple[Candidate, float]]],
) -> dict[str, float | None]:
    """Rank correlation of each kind of evidence with the accuracy, mean over the targets.

    Args:
        every: each target's candidates with their accuracies.
    """
    ranks: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for candidates_ in every:
        for kind in KINDS:
            known = [(v, truth) for c, truth in candidates_ if (v := c.mean(kind)) is not None]
            rank = validators.correlation([v for v, _ in known], [t for _, t in known])
            ranks[kind] += [] if rank is None else [rank]
    return {kind: validators.mean(values) for kind, values in ranks.items()}


def table(every: Sequence[Judged]) -> list[str]:
    """One row per target: the choice, what labels say of it, and of every default."""
    usual = [Variant(m) for m in USUAL]
    heads = ["target", "chosen", "sure", "accuracy", "best in hindsight", "regret"]
    heads += [v.name for v in usual]
    rows = []
    for j in every:
        row = [j.target, j.found.chosen.name, sureness(j.found)]
        row += [f"{100 * j.truth[j.found.chosen]:.1f}", j.best.name]
        row.append(f"{j.regret(j.found.chosen):.1f}")
        rows.append([*row, *(f"{100 * j.truth[v]:.1f}" if v in j.truth else "–" for v in usual)])
    regrets = [j.regret(j.found.chosen) for j in every]
    always = [statistics.fmean(j.regret(v) for j in every) for v in usual]
    mean = ["mean regret", "", "", "", "", f"{statistics.fmean(regrets):.1f}"]
    return markdown(heads, [*rows, [*mean, *(f"{x:.1f}" for x in always)]])


def validator_table(found: Mapping[str, Any]) -> list[str]:
    heads = ["", "rank correlation", "regret if it chose alone"]
    rows = [
        [kind, *("–" if x is None else f"{x:.2f}" for x in (found["correlation"][kind], regret))]
        for kind, regret in found["regret_alone"].items()
    ]
    return markdown(heads, rows)


def add_options(parser: argparse.ArgumentParser, usual: Sequence[str], out: Path) -> None:
    """Add the options of a benchmark over the targets of several sets.

    Args:
        parser: to add them to.
        usual: the sets that it takes without --set.
        out: where it keeps its trainings without --out.
    """
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the data sets")
    sets = f"default: {', '.join(usual)}"
    parser.add_argument("--set", choices=SETS + MORE, action="append", help=sets)
    parser.add_argument("--target", action="append", help="default: all domains")
    parser.add_argument("--rounds", type=int, default=0, help="default: the set's")
    parser.add_argument("--images", type=int, default=0, help="per domain; default: the set's")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write what is found here")
    jobs = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="trainings at the same time")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, SETS, Path("runs/choose"))
    args = parser.parse_args(arguments)

    every = []
    command = "python examples/benchmarks/choose.py --data DATA"
    command += accuracy.typed(parser, args, "set", "target", "rounds", "images", "seeds")
    text = f"## choose\n\n    {command}\n\n"
    for name in args.set or SETS:
        whole = plan(args, name)
        text += f"- {name}: {counted(int(whole.settings['rounds']), 'round')}, seeds "
        text += f"{', '.join(map(str, whole.seeds))}\n"
        every += [judge(whole, target, args.jobs) for target in whole.targets]
    found = figures(every)
    text += "\n".join(["", *table(every), "", *validator_table(found)]) + "\n"
    for folder in filter(None, (args.out, args.results)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "choose.md").write_text(text)
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
