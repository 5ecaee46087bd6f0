"""Successive halving: each rung trains half of the last one's candidates with more rounds.

Halved are the settings of a method: the best one of each method goes on to the last rung, as a
quarter of the rounds says little of a method that needs them all.

Every rung is a `fedda.comparison.Plan` in a folder of its own, so what has been trained is not
trained again, and a training that was interrupted goes on. A rung's trainings begin anew:
schedules of learning rates and phases depend on the number of rounds.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from fedda import models
from fedda.comparison import Cell, Plan, Variant
from fedda.data import domains
from fedda.errors import RunError
from fedda.halves import REFERENCE
from fedda.maths import choice
from fedda.results.read import REFINED, counted, model_file

from . import agreement
from .decision import Candidate, Trained, decide
from .labelled import Labels

MOST = 3  # candidates besides FedAvg from which on nothing is halved
HALVINGS = 2  # at most, so the first rung has a quarter of the rounds
MINUTE = 60.0


class Watch(Protocol):
    """Shows the trainings of a batch while it is entered, as `fedda.comparison.headway` does."""

    def __call__(self, plan: Plan, cells: Sequence[Cell], /) -> Any: ...


@dataclass(frozen=True)
class Rung:
    """One rung.

    Attributes:
        number: from 1.
        rounds: of each training.
        width: how many candidates besides FedAvg it has.
        seeds: every candidate is trained with each.
    """

    number: int
    rounds: int
    width: int
    seeds: Sequence[int]


@dataclass
class Outcome:
    """What a search has trained.

    Attributes:
        rung: the one that the decision is about.
        plan: the trainings of that rung.
        candidates: those that have all its finished seeds, FedAvg first.
        dropped: candidates that an earlier rung ended, by variant: their rung.
        untried: what the budget left out, as sentences.
        failed: errors by training.
    """

    rung: Rung
    plan: Plan
    candidates: list[Candidate]
    dropped: dict[Variant, int] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    failed: dict[Cell, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """A search for one target.

    Args:
        plan: data, folder, target, seeds and settings of the full trainings; its variants are the
            candidates, FedAvg first.
        jobs: trainings at a time.
        budget: minutes for the trainings in all; 0: no limit.
        labels: of a few of the target's images; they take part in the choice.
    """

    plan: Plan
    jobs: int = 1
    budget: float = 0.0
    labels: Labels | None = None

    @cached_property
    def rounds(self) -> int:
        """Rounds of a full training."""
        (target,) = self.plan.targets
        return self.plan.config(Cell(self.plan.variants[0], target, self.plan.seeds[0])).rounds

    @cached_property
    def _images(self) -> agreement.Images:
        (target,) = self.plan.targets
        return agreement.Images(
            domains(self.plan.data, self.plan.reading)[target], self.plan.reading
        )

    @cached_property
    def _labelled(self) -> agreement.Images:
        (target,) = self.plan.targets
        images = self.labels.drawn.images if self.labels else ()
        return agreement.Images(
            domains(self.plan.data, self.plan.reading)[target], self.plan.reading, images
        )

    def _right(self, folder: Path) -> tuple[bool, ...] | None:
        """Which labelled images a training's refined model has right, or its own without one."""
        if self.labels is None:
            return None
        network, about = models.load(agreement.refined_model(folder) or model_file(folder))
        y = torch.tensor(self.labels.classes(about.classes))
        x = self._labelled.inputs(network, about)[: len(y)]
        return tuple((models.predict(network, x).argmax(dim=1) == y).tolist())

    @cached_property
    def rungs(self) -> list[Rung]:
        """All rungs; the last one has all rounds and seeds, the others one seed."""
        widths = [len(self.plan.variants) - 1]
        least = max(MOST, len({v.method for v in self.plan.variants} - {REFERENCE}))
        while widths[-1] > least and len(widths) <= HALVINGS:
            widths.append(max(math.ceil(widths[-1] / 2), least))
        last = len(widths) - 1
        return [
            Rung(
                i + 1,
                max(math.ceil(self.rounds / 2 ** (last - i)), 1),
                width,
                self.plan.seeds if i == last else self.plan.seeds[:1],
            )
            for i, width in enumerate(widths)
        ]

    def at(self, rung: Rung, variants: Sequence[Variant]) -> Plan:
        """The trainings of a rung."""
        settings = {**self.plan.settings, "rounds": rung.rounds}
        out = self.plan.out / f"rung-{rung.number}"
        return replace(self.plan, out=out, variants=variants, seeds=rung.seeds, settings=settings)

    def check(self) -> None:
        """Find, before the first training, what would make one of them fail.

        Raises:
            FeddaError: as `Plan.check`.
        """
        for rung in self.rungs:
            whole = self.at(rung, self.plan.variants)
            replace(whole, seeds=whole.seeds[:1]).check()

    def run(self, watch: Watch) -> Outcome:
        """Train rung by rung -> the last rung that has trained something besides FedAvg.

        Raises:
            RunError: FedAvg, with which all others are compared, could not be trained.
        """
        variants, dropped, untried = [*self.plan.variants], dict[Variant, int](), list[str]()
        failed: dict[Cell, str] = {}
        outcome = None
        for rung in self.rungs:
            plan, late = self._train(rung, variants, failed, watch)
            untried += late
            found = self.evidence(plan)
            if not found or not found[0].reference:
                raise RunError(
                    "FedAvg could not be trained, and every method is judged beside it: "
                    f"{next(iter(failed.values()), 'no training of it has finished')}"
                )
            if len(found) == 1 and outcome is not None:
                untried.append(
                    f"full trainings: the budget has no time for one besides FedAvg, so the "
                    f"choice rests on rung {outcome.rung.number}, with {outcome.rung.rounds} "
                    f"of {self.rounds} rounds"
                )
                break
            outcome = Outcome(rung, plan, found)
            if rung is not self.rungs[-1]:
                order = ranked(found)
                stay = going_on(order, self.rungs[rung.number].width)
                variants = [found[0].variant, *(v for v in order if v in stay)]
                dropped |= dict.fromkeys([v for v in order if v not in stay], rung.number)
        assert outcome is not None, "the first rung has an outcome"
        return replace(outcome, dropped=dropped, untried=untried, failed=failed)

    def _train(
        self, rung: Rung, variants: Sequence[Variant], failed: dict[Cell, str], watch: Watch
    ) -> tuple[Plan, list[str]]:
        """Train a rung as far as the budget goes -> its plan, and what was not tried."""
        whole = self.at(rung, variants)
        cells, late = whole.cells(), list[str]()
        step = max(self.jobs, 1) if self.budget else len(cells)
        for start in range(0, len(cells), step):
            batch = cells[start : start + step]
            wanted = [c for c in batch if whole.results(c) is None]
            if wanted and self.budget and not self._fits(rung, wanted):
                # The reference is trained whatever it takes, with one seed.
                essential = [c for c in wanted if c.seed == rung.seeds[0] and _is_reference(c)]
                late += [
                    f"{c.variant.name}, seed {c.seed}, {rung.rounds} rounds: "
                    "would not fit into the budget"
                    for c in wanted
                    if c not in essential
                ]
                wanted = essential
            failed |= _run(whole, wanted, self.jobs, watch)
        return whole, late

    def _fits(self, rung: Rung, cells: Sequence[Cell]) -> bool:
        """Whether the budget has time for these trainings and, after them, a last rung at all."""
        seconds, pace = self.spent()
        usual = statistics.fmean(pace.values()) if pace else 0.0
        cost = sum(rung.rounds * pace.get(c.variant.method, usual) for c in cells)
        if rung is not self.rungs[-1]:
            cost += self.rounds * (pace.get(REFERENCE, usual) + usual)
        return seconds + cost <= self.budget * MINUTE * max(self.jobs, 1)

    def spent(self) -> tuple[float, dict[str, float]]:
        """Seconds of all trainings of this search, and seconds of a round by method."""
        total, paces = 0.0, dict[str, list[float]]()
        for rung in self.rungs:
            plan = self.at(rung, self.plan.variants)
            for cell in plan.cells():
                if (results := plan.results(cell)) is not None:
                    (training,) = results["trainings"][cell.variant.method]
                    total += results["seconds"]
                    paces.setdefault(cell.variant.method, []).append(
                        results["seconds"] / len(training["rounds"])
                    )
        return total, {method: statistics.fmean(each) for method, each in paces.items()}

    def everything(self) -> dict[str, float]:
        """Accuracies on labelled tests of all that was trained, for the report alone, by words."""
        found: dict[str, float] = {}
        for rung in self.rungs:
            plan = self.at(rung, self.plan.variants)
            for words, refined in (("", False), (", refined", True)):
                for v, accuracy in truths(plan, plan.variants, plan.seeds, refined).items():
                    found[f"{v.name}{words}, {counted(rung.rounds, 'round')}"] = accuracy
        return found

    def evidence(self, plan: Plan) -> list[Candidate]:
        """What the trainings of a rung say without labels.

        Of the variants that have finished the first seed, and of the seeds that all these have.
        """
        entries = {c: e for c in plan.cells() if (e := unlabelled(plan, c)) is not None}
        (target,), first = plan.targets, plan.seeds[0]
        variants = [v for v in plan.variants if Cell(v, target, first) in entries]
        seeds = [s for s in plan.seeds if all(Cell(v, target, s) in entries for v in variants)]
        trained: dict[Variant, dict[int, Trained]] = {v: {} for v in variants}
        for seed in seeds:
            cells = [Cell(v, target, seed) for v in variants]
            stays = [bool(entries[c].pop("elsewhere")) for c in cells]
            beside = [entries[c].pop("beside") for c in cells]
            groups = [c.variant.method for c in cells]
            if self.plan.simulated:
                folders = [(plan.folder(c), s) for c, s in zip(cells, stays, strict=True)]
                agreed = agreement.here(folders, groups, self._images)
            else:  # the last training's target had the models of all
                told = max(beside, key=len)
                agreed = [told.get(c.training) for c in cells]
            votes = zip(cells, agreed, choice.apart(agreed, groups), strict=True)
            for cell, share, apart in votes:
                entry = entries[cell]
                size, right = entry.pop("bytes"), self._right(plan.folder(cell))
                trained[cell.variant][seed] = Trained(entry, size, share, apart, right)
        return [Candidate(v, trained[v]) for v in variants]


def unlabelled(plan: Plan, cell: Cell) -> dict[str, Any] | None:
    """What a finished training says without labels of the target, and nothing else of it."""
    results = plan.results(cell)
    if results is None:
        return None
    (training,) = results["trainings"][cell.variant.method]
    estimate = training.get("estimate")
    return {
        "validators": training.get("validators") or {},
        "estimate": estimate,
        "bytes": sum(training["bytes"].values()),
        "beside": training.get("beside") or {},
        "elsewhere": "adapted" in training or (estimate or {}).get("same_model") is False,
    }


def truths(
    plan: Plan, variants: Sequence[Variant], seeds: Sequence[int], refined: bool = False
) -> dict[Variant, float]:
    """Mean accuracies on the target's labelled tests, for the report alone; empty without any.

    Args:
        plan: the trainings.
        variants: those of them that are wanted; one that has not finished is left out.
        seeds: over which the mean is.
        refined: of the models that the target's last step has made, where it has made one.
    """
    found: dict[Variant, float] = {}
    for variant in variants:
        values: list[float | None] = []
        for seed in seeds:
            results = plan.results(Cell(variant, plan.targets[0], seed))
            for training in results["trainings"][variant.method] if results else [{}]:
                after = (training.get(REFINED) or {}).get("accuracy") if refined else None
                values.append(training.get("final_accuracy") if after is None else after)
        known = [v for v in values if v is not None]
        if known and len(known) == len(values):
            found[variant] = statistics.fmean(known)
    return found


def ranked(candidates: Sequence[Candidate]) -> list[Variant]:
    """The candidates but the reference, best first; those that are out come last."""
    found = decide(candidates)
    others = [c.variant for c in candidates if not c.reference]
    return sorted(others, key=lambda v: (v in found.out, -found.standing[v]))


def going_on(order: Sequence[Variant], width: int) -> set[Variant]:
    """Those of ranked candidates that a smaller rung trains: each method's best, then the best."""
    methods = {v.method: v for v in reversed(order)}
    rest = [v for v in order if v not in methods.values()]
    return {*methods.values(), *rest[: max(width - len(methods), 0)]}


def _is_reference(cell: Cell) -> bool:
    return cell.variant.method == REFERENCE and not cell.variant.settings


def _run(plan: Plan, cells: Sequence[Cell], jobs: int, watch: Watch) -> dict[Cell, str]:
    """Train some cells of a plan -> errors by cell."""
    failed: dict[Cell, str] = {}
    seeds = dict.fromkeys(c.seed for c in cells)
    for seed in seeds:
        variants = [c.variant for c in cells if c.seed == seed]
        part = replace(plan, variants=variants, seeds=[seed])
        with watch(part, part.cells()) as notify:
            failed |= part.run(min(jobs, len(variants)), notify)
    return failed
