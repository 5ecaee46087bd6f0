"""A comparison as CSV, with one row per training, and as Markdown for people."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fedda.results.escaping import cell, in_table, markdown
from fedda.results.read import counted

from .plan import Score
from .statistics import (
    MEAN,
    Difference,
    Table,
    Values,
    by_target,
    difference,
    spread,
)

T = TypeVar("T")

COLUMNS = (
    "variant",
    "target",
    "seed",
    "accuracy_last",
    "accuracy_refined",
    "accuracy_selected",
    "selected_round",
    "seconds",
    "bytes",
    "weights",
    "transductive",
)
NOTHING, MARK = "–", " †"
SPREAD = (
    "Target accuracy in %, mean ± standard deviation over the seeds; in `mean` each seed's values "
    "are averaged over the targets first."
)
INTERVAL = (
    "Differences in points, seed by seed: their mean, and its 95 % confidence interval by "
    "Student's t over n pairs (n − 1 degrees of freedom; n is the number of seeds unless given). "
    "One interval each, not widened for the number of comparisons."
)
CHOSEN = (
    "No label takes part in choosing the round: it is the one with the highest infomax on the "
    "target's unlabelled training examples."
)
TRANSDUCTIVE = (
    "† transductive: trained on the very images, without their labels, that the target is tested "
    "on; the other rows have not seen them. So a difference between the two is not only adaptation."
)
BOUND = (
    "Oracle: trained on the labels of the target's own training examples alone, which no "
    "federation has: a bound to compare with, and no method."
)
REFINED = (
    "After the last round the target averages what the models that it has predict, and refines it "
    "by its own images, without labels."
)
UNTESTED = "no labelled tests there, hence no accuracy"


def as_csv(scores: Sequence[Score]) -> str:
    """One row per training, with accuracies between 0 and 1."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for s in scores:
        weights = " ".join(f"{site}={weight:.6g}" for site, weight in s.weights.items())
        row = (s.variant, s.target, s.seed, s.last, s.refined, s.selected)
        row += (s.selected_round, s.seconds)
        row += (s.bytes, weights, "yes" if s.transductive else "no")
        rounded = (round(v, 6) if isinstance(v, float) else v for v in row)
        writer.writerow(["" if v is None else cell(v) for v in rounded])
    return text.getvalue()


def as_markdown(scores: Sequence[Score], baseline: str, targets: Sequence[str] = ()) -> str:
    """Accuracies of the last round, of the round chosen without labels, and the differences.

    Args:
        scores: of the finished trainings.
        baseline: the variant from which differences are taken; without its scores there are none.
        targets: all targets of the comparison; by default those of the scores.
    """
    scores = [replace(s, variant=s.variant + MARK * s.transductive) for s in scores]
    baseline = next((s.variant for s in scores if s.variant == baseline + MARK), baseline)
    targets = list(dict.fromkeys([*targets, *(s.target for s in scores)]))
    if not scores:
        return "No training has finished, so there is nothing to show.\n"
    seeds = len({s.seed for s in scores})
    last, selected = (by_target(scores, which, targets) for which in ("last", "selected"))

    def text(values: Values) -> str:
        few = "" if len(values) == seeds else f" ({len(values)} of {counted(seeds, 'seed')})"
        return spread_text(values) + few

    def minus(change: Difference) -> str:
        return difference_text(change) + ("" if change.n == seeds else f" (n = {change.n})")

    parts = ["### Last round", ""]
    parts += [SPREAD, "", *_rows(last, text, targets)] if last else []
    parts += _untested(scores)
    parts += ["", TRANSDUCTIVE] if any(s.transductive for s in scores) else []
    parts += ["", BOUND] if any(s.oracle for s in scores) else []
    if baseline in last and len(last) > 1:
        parts += ["", f"### Minus {in_table(baseline)}, paired by seed", "", INTERVAL, ""]
        parts += _rows(differences(last, baseline), minus, targets)
    if refined := by_target(scores, "refined", targets):
        parts += ["", "### Refined at the target", "", REFINED, ""]
        parts += _rows(refined, text, targets)
    if selected:
        parts += ["", "### Round chosen without labels (highest infomax)", "", CHOSEN, ""]
        parts += _rows(selected, text, targets)
    return "\n".join(parts) + "\n"


def _untested(scores: Sequence[Score]) -> list[str]:
    """A sentence that names targets without accuracies, so that their column is explained."""
    tested = {s.target for s in scores if s.last is not None}
    without = [t for t in dict.fromkeys(s.target for s in scores) if t not in tested]
    return ["", f"{', '.join(map(in_table, without))}: {UNTESTED}."] if without else []


def differences(table: Table, baseline: str) -> dict[str, dict[str, Difference]]:
    """Every variant's difference from the baseline, by target, if the two share a seed there."""
    base = table[baseline]
    by_variant: dict[str, dict[str, Difference]] = {}
    for name, row in table.items():
        if name != baseline:
            pairs = {t: difference(values, base.get(t, {})) for t, values in row.items()}
            by_variant[name] = {t: d for t, d in pairs.items() if d is not None}
    return by_variant


def spread_text(values: Values) -> str:
    """Mean and standard deviation in percent, such as 75.9 ± 0.8."""
    mean, std, _ = spread(values)
    return f"{100 * mean:.1f}" + ("" if std is None else f" ± {100 * std:.1f}")


def difference_text(change: Difference) -> str:
    """A difference and its interval in points, such as +9.4 [+5.1, +13.7]."""
    text = f"{100 * change.mean:+.1f}"
    if change.low is None or change.high is None:
        return text
    return f"{text} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def columns(table: Mapping[str, Mapping[str, object]], targets: Sequence[str] = ()) -> list[str]:
    """The targets in order; the mean over them, if there is one, is last."""
    names = dict.fromkeys([*targets, *(t for row in table.values() for t in row)])
    mean = any(MEAN in row for row in table.values())
    return [t for t in names if t != MEAN] + [MEAN] * mean


def _rows(
    table: Mapping[str, Mapping[str, T]], text: Callable[[T], str], targets: Sequence[str]
) -> list[str]:
    heads = columns(table, targets)
    body = [
        [name, *(text(row[h]) if h in row else NOTHING for h in heads)]
        for name, row in table.items()
    ]
    return markdown(["", *heads], body)


__all__ = ["as_csv", "as_markdown"]
