"""A choice in words: a table, one paragraph, and choice.json.

The decision is written first, and holds nothing that labels of the target had a part in. What its
labelled tests say, if it has any, is a part of its own.
"""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedda
from fedda import plugins
from fedda.comparison import Cell, Variant
from fedda.comparison.tables import markdown
from fedda.halves import REFERENCE
from fedda.results.read import counted, printable
from fedda.results.worth import VALIDATORS, WHAT

from .decision import Candidate, Decision
from .labelled import interval
from .search import Outcome, Search, truths

NOTHING = "–"
BLIND = (
    "No label took part. What this cannot see: a shift that makes all methods wrong in the same "
    "way, or several methods that fail alike."
)
APART = (
    "The target has not compared the models on its images (its last step keeps them, so it needs "
    "run.refine and --state-dir): one that is sure of wrong classes alone was not looked for."
)
CLEARLY, RATHER = 0.75, 0.5  # shares of seeds, and net shares of evidence, for these words


@dataclass(frozen=True)
class Choice:
    """A search's outcome, the decision, and the settings that the user gave for all candidates.

    Attributes:
        search: what was searched.
        outcome: what was trained.
        decision: what was taken.
        options: words for `fedda run` that give the shared settings.
        left_out: methods that were not candidates, and why.
    """

    search: Search
    outcome: Outcome
    decision: Decision
    options: Sequence[str]
    left_out: Mapping[str, str]

    @property
    def target(self) -> str:
        return self.search.plan.targets[0]

    @property
    def folders(self) -> list[Path]:
        """The chosen candidate's trainings, one per seed."""
        plan = self.outcome.plan
        return [plan.folder(Cell(self.decision.chosen, self.target, s)) for s in self.seeds]

    @property
    def seeds(self) -> list[int]:
        """The seeds that the decision rests on."""
        return [*self.outcome.candidates[0].trained]

    @property
    def full(self) -> bool:
        """Whether the decision rests on trainings with all rounds."""
        return self.outcome.rung == self.search.rungs[-1]

    @property
    def sure(self) -> str:
        """`sureness`; what rests on short trainings is weak."""
        return sureness(self.decision) if self.full else "weak"

    @property
    def command(self) -> str:
        """The command that runs the choice."""
        v, plan = self.decision.chosen, self.search.plan
        own = [word for k, x in v.settings.items() for word in ("-c", f"{k}={_plain(x)}")]
        where = plan.where(self.target)
        return shlex.join(["fedda", "run", v.method, *where, *self._shared, *own])

    @property
    def _shared(self) -> list[str]:
        """The shared options without settings of other methods, which `fedda run` would refuse."""
        others = tuple(f"{m}." for m in plugins.methods() if m != self.decision.chosen.method)
        pairs = zip(self.options[::2], self.options[1::2], strict=True)
        return [
            word
            for flag, value in pairs
            if not (flag == "-c" and value.startswith(others))
            for word in (flag, value)
        ]

    @property
    def truths(self) -> dict[Variant, float]:
        """What labelled tests say of the candidates, for the report alone."""
        variants = [c.variant for c in self.outcome.candidates]
        return truths(self.outcome.plan, variants, self.seeds)

    @property
    def refined(self) -> dict[Variant, float]:
        """The same for what the target's last step makes of each, which is what one takes."""
        variants = [c.variant for c in self.outcome.candidates]
        return truths(self.outcome.plan, variants, self.seeds, refined=True)

    @property
    def best(self) -> tuple[str, float]:
        """The best of all that was trained, also in earlier rungs, by the labels."""
        every = self.search.everything()
        every |= {v.name: accuracy for v, accuracy in self.refined.items()}
        return max(every.items(), key=lambda item: item[1])


def as_json(choice: Choice) -> dict[str, Any]:
    """The content of choice.json: `truth` is apart, and `decision` does not depend on it."""
    d, outcome = choice.decision, choice.outcome
    decision = {
        "target": choice.target,
        "method": d.chosen.method,
        "settings": dict(d.chosen.settings),
        "name": d.chosen.name,
        "command": choice.command,
        "leader": d.leader.name,
        "as good as the leader": [v.name for v in d.alike],
        "rounds": outcome.rung.rounds,
        "seeds": choice.seeds,
        "seeds_first": d.seeds[0],
        "evidence": dict(zip(("above", "below", "all"), d.pieces, strict=True)),
        "sure": choice.sure,
        "alone": {kind: v.name for kind, v in d.alone.items()},
        "labels": {v.name: {"right": right, "of": n} for v, (right, n) in d.labels.items()},
        "without_labels": d.unlabelled.name if d.unlabelled else None,
        "candidates": [_entry(choice, c) for c in outcome.candidates],
        "dropped": {v.name: rung for v, rung in outcome.dropped.items()},
        "untried": list(outcome.untried),
        "left_out": dict(choice.left_out),
        "fedda": fedda.__version__,
    }
    truth = choice.truths
    apart = None
    if truth:
        name, accuracy = choice.best
        apart = {
            "accuracy": {v.name: value for v, value in truth.items()},
            "refined": {v.name: value for v, value in choice.refined.items()},
            "best": name,
            "regret_points": round(100 * (accuracy - choice.refined[d.chosen]), 3),
        }
    folders = [str(folder) for folder in choice.folders]
    return {"decision": decision, "folders": folders, "truth": apart}


def as_markdown(choice: Choice) -> str:
    """The table, the paragraph, and what labels say, if there are any."""
    rung = choice.outcome.rung
    lines = [
        f"## A method for {printable(choice.target)}",
        "",
        paragraph(choice),
        "",
        f"    {choice.command}",
        "",
        f"{counted(len(choice.outcome.candidates), 'candidate')} in the last rung, "
        f"{counted(rung.rounds, 'round')}, seeds {', '.join(map(str, choice.seeds))}. First is the "
        "rank with each seed; standing is the mean share of the other candidates that one is "
        f"ahead of. {WHAT[0].upper()}{WHAT[1:]}.",
        "",
        *_table(choice),
        "",
    ]
    lines += [f"- out: {v.name}: {why}" for v, why in choice.decision.out.items()]
    alone = _grouped({k: v.name for k, v in choice.decision.alone.items()})
    lines += [f"- {' and '.join(kinds)} alone would take {name}" for name, kinds in alone.items()]
    lines += [f"- ended in rung {rung}: {v.name}" for v, rung in choice.outcome.dropped.items()]
    lines += [f"- not tried: {text}" for text in choice.outcome.untried]
    of_methods = _grouped(choice.left_out)
    lines += [f"- left out: {', '.join(names)}: {why}" for why, names in of_methods.items()]
    lines += [
        f"- failed: {cell.variant.name}, seed {cell.seed}: {error}"
        for cell, error in choice.outcome.failed.items()
    ]
    return "\n".join([*lines, "", *_truth(choice)]).rstrip() + "\n"


def paragraph(choice: Choice) -> str:
    """Which to take, why, and how sure that is."""
    d = choice.decision
    text = [f"Take {d.chosen.name}."]
    if d.chosen != d.unlabelled and d.unlabelled is not None:
        text.append(
            f"The labels say so; the evidence without labels would have taken {d.unlabelled.name}."
        )
    elif d.chosen != d.leader:
        text.append(
            f"{d.leader.name} stands highest, but is not clearly ahead of it, and it is the "
            "simpler one."
        )
    elif d.chosen.method == REFERENCE:
        text.append("No candidate stands above it, so adapting is not worth it by this evidence.")
    else:
        text.append("It stands highest by the evidence without labels.")
    if d.chosen.method != REFERENCE:
        above, below, every = d.pieces
        text.append(
            f"Of {counted(every, 'piece')} of evidence ({_kinds(choice)}, over the seeds) {above} "
            f"are above FedAvg's and {below} below."
        )
    text += _labels(choice)
    first, seeds = d.seeds
    agree = sum(v == d.chosen for v in d.alone.values())
    text.append(
        f"It stands first in {first} of {counted(seeds, 'seed')}, and {agree} of "
        f"{len(d.alone)} kinds of evidence would take it alone: this choice is {choice.sure}."
    )
    text.append(
        "What to use is the model that the target's last step makes of it (run.refine), which has "
        "gained on almost every target that was measured, whatever the method."
    )
    if not choice.full:
        text.append(
            f"It rests on short trainings, {choice.outcome.rung.rounds} of "
            f"{choice.search.rounds} rounds."
        )
    blind = [] if d.labels else [BLIND]
    return " ".join([*text, *blind, *([] if _agreement(choice) else [APART])])


def _labels(choice: Choice) -> list[str]:
    """What a few labels say of the chosen candidate and of FedAvg; nothing without them."""
    d, known = choice.decision, choice.search.labels
    if known is None or d.chosen not in d.labels:
        return []
    looks, reference = known.drawn.looks, choice.outcome.candidates[0].variant
    told = []
    for v in dict.fromkeys([d.chosen, reference]):
        bounds = interval(*d.labels[v], looks)
        told.append(
            f"{v.name} {bounds.right} ({100 * bounds.low:.0f} to {100 * bounds.high:.0f} %)"
        )
    _, n = d.labels[d.chosen]
    return [
        f"Of {counted(n, 'labelled image')} the refined models have right: {', '.join(told)}; the "
        f"intervals hold for all {counted(looks, 'look')} at these labels together."
    ]


def _agreement(choice: Choice) -> bool:
    """Whether models were compared on the target's images."""
    return any(c.mean("agreement") is not None for c in choice.outcome.candidates)


def _kinds(choice: Choice) -> str:
    """The kinds of evidence, in words."""
    if _agreement(choice):
        return "estimate, infomax, BNM, ClassAMI and agreement with the other methods"
    return "estimate, infomax, BNM and ClassAMI"


def sureness(decision: Decision) -> str:
    """`clear`, `likely` or `weak`: by the seeds in which the choice is first, and by evidence.

    One seed says nothing of chance, so it is never clear. For FedAvg only the seeds count.
    """
    (first, seeds), (above, below, every) = decision.seeds, decision.pieces
    shares = [first / seeds]
    if decision.chosen.method != REFERENCE:
        shares.append((above - below) / every if every else 0.0)
    if min(shares) >= CLEARLY and seeds > 1 and decision.chosen == decision.leader:
        return "clear"
    return "likely" if min(shares) >= RATHER else "weak"


def _entry(choice: Choice, candidate: Candidate) -> dict[str, Any]:
    """A candidate's numbers: means over the seeds, and its standing with each."""
    d, v = choice.decision, candidate.variant
    kinds = ("estimate", *VALIDATORS, "agreement")
    return {
        "name": v.name,
        "method": v.method,
        "settings": dict(v.settings),
        "standing": d.standing[v],
        "standing_by_seed": {str(s): x for s, x in d.by_seed[v].items()},
        "out": d.out.get(v, ""),
        **{kind: candidate.mean(kind) for kind in kinds},
        "interval": _interval(candidate),
        "bytes": statistics.fmean(t.bytes for t in candidate.trained.values()),
    }


def _table(choice: Choice) -> list[str]:
    d = choice.decision
    head = ["candidate", "standing", "first", "estimate in %"]
    head += [heading for heading, _ in VALIDATORS.values()] + ["agreement in %"]
    head += ["labels right"] * bool(d.labels)
    order = sorted(choice.outcome.candidates, key=lambda c: -d.standing[c.variant])
    body = []
    for c in order:
        name = f"**{c.variant.name}**" if c.variant == d.chosen else c.variant.name
        row = [name, f"{d.standing[c.variant]:.2f}", " ".join(map(str, _ranks(choice, c)))]
        bounds = _interval(c)
        low_high = f" [{100 * bounds[0]:.0f}, {100 * bounds[1]:.0f}]" if bounds else ""
        row.append(f"{_text(c.mean('estimate'), 100, 1)}{low_high}")
        row += [_text(c.mean(n), 1, digits) for n, (_, digits) in VALIDATORS.items()]
        row.append(_text(c.mean("agreement"), 100, 1))
        body.append([*row, *(["{} of {}".format(*d.labels[c.variant])] if d.labels else [])])
    return markdown(head, body)


def _ranks(choice: Choice, candidate: Candidate) -> list[int]:
    """The candidate's rank with each seed; the first is 1."""
    by_seed = choice.decision.by_seed
    own = by_seed[candidate.variant]
    return [1 + sum(other[s] > own[s] for other in by_seed.values()) for s in own]


def _interval(candidate: Candidate) -> tuple[float, float] | None:
    """Means over the seeds of the estimate's bounds."""
    found = [t.worth["estimate"] for t in candidate.trained.values() if t.worth.get("estimate")]
    if not found or candidate.mean("estimate") is None:
        return None
    low, high = (statistics.fmean(e[key] for e in found) for key in ("low", "high"))
    return low, high


def _truth(choice: Choice) -> list[str]:
    """What labelled tests of the target say; nothing without them."""
    truth, chosen = choice.truths, choice.decision.chosen
    if not truth:
        return []
    refined, (name, best) = choice.refined, choice.best
    rows = [[v.name, f"{100 * x:.1f}", f"{100 * refined[v]:.1f}"] for v, x in truth.items()]
    return [
        "### What its labels say",
        "",
        f"{printable(choice.target)} has labelled tests. They had no part in the above. "
        f"{chosen.name} has {100 * truth[chosen]:.1f} %, refined {100 * refined[chosen]:.1f} %. "
        f"The best of all that was trained is {name}, {100 * best:.1f} %: a regret of "
        f"{100 * (best - refined[chosen]):.1f} points.",
        "",
        *markdown(["candidate", "accuracy in %", "refined"], rows),
    ]


def _grouped(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys by their value."""
    found: dict[str, list[str]] = {}
    for key, value in values.items():
        found.setdefault(value, []).append(key)
    return found


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(value: float | None, times: float, digits: int) -> str:
    return NOTHING if value is None else f"{times * value:.{digits}f}"
