"""Means over seeds, and differences from a baseline, seed by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from .plan import Score

MEAN = "mean"  # the column over all targets
Which = Literal["last", "refined", "selected"]
Values = dict[int, float]  # accuracy by seed


class Spread(NamedTuple):
    """Mean and standard deviation over n seeds; `std` is None for one seed."""

    mean: float
    std: float | None
    n: int


class Difference(NamedTuple):
    """Mean of the differences of n pairs, and its confidence interval, None for one pair."""

    mean: float
    low: float | None
    high: float | None
    n: int


Table = dict[str, dict[str, Values]]  # by variant and target


def by_target(scores: Sequence[Score], which: Which = "last", targets: Sequence[str] = ()) -> Table:
    """Accuracies as variant -> target -> seed; several targets have a further row, `MEAN`.

    Args:
        scores: of the finished cells.
        which: after the last round, after the one selected without labels, or refined there.
        targets: all targets of the comparison; by default those of the scores. A seed counts in a
            variant's mean only if the variant has a score for it at all of them, so that no mean
            is over fewer targets.
    """
    return of_numbers(scores, [getattr(score, which) for score in scores], targets)


def of_numbers(
    scores: Sequence[Score], numbers: Sequence[float | None], targets: Sequence[str] = ()
) -> Table:
    """Any number of each score, as `by_target` does with accuracies."""
    table: Table = {}
    targets = list(dict.fromkeys([*targets, *(s.target for s in scores)]))
    for score, value in zip(scores, numbers, strict=True):
        if value is not None:
            table.setdefault(score.variant, {}).setdefault(score.target, {})[score.seed] = value
    if len(targets) > 1:
        for row in table.values():
            seeds = set.intersection(*(set(row.get(t, {})) for t in targets))
            if seeds:
                row[MEAN] = {s: statistics.fmean(row[t][s] for t in targets) for s in sorted(seeds)}
    return table


def spread(values: Mapping[int, float]) -> Spread:
    """Mean and standard deviation over seeds."""
    accuracies = list(values.values())
    std = statistics.stdev(accuracies) if len(accuracies) > 1 else None
    return Spread(statistics.fmean(accuracies), std, len(accuracies))


def difference(values: Values, baseline: Values, level: float = 0.95) -> Difference | None:
    """`values` minus `baseline` on the seeds that both have, with Student's t interval.

    Both accuracies of a pair come from one seed, hence from one initial model and one order of
    images, so that what a seed changes for both alike cancels. None if they share no seed.
    """
    pairs = [values[s] - baseline[s] for s in sorted(set(values) & set(baseline))]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    if len(pairs) == 1:
        return Difference(mean, None, None, 1)
    from scipy.stats import t  # takes long to import

    half = float(t.ppf((1 + level) / 2, len(pairs) - 1))
    half *= statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(mean, mean - half, mean + half, len(pairs))
