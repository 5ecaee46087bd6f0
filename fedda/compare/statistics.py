"""Means over seeds, and differences from a baseline, seed by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from .cells import Score

MEAN = "mean"  # the column over all targets
Which = Literal["last", "selected"]
Values = dict[int, float]  # accuracy by seed


class Spread(NamedTuple):
    """Over seeds; `std` is None with one."""

    mean: float
    std: float | None
    n: int


class Difference(NamedTuple):
    """Mean of the differences pair by pair, and its confidence interval; None with one pair."""

    mean: float
    low: float | None
    high: float | None
    n: int


Table = dict[str, dict[str, Values]]  # by variant and target


def by_target(scores: Sequence[Score], which: Which = "last", targets: Sequence[str] = ()) -> Table:
    """Accuracies as variant -> target -> seed; `MEAN` is a target too if there are several.

    Args:
        scores: of the finished cells.
        which: the round.
        targets: all there will be; by default those of the scores. A seed enters a variant's mean
            only if the variant has it at every one of them, so that no mean is over fewer.
    """
    table: Table = {}
    targets = list(dict.fromkeys([*targets, *(s.target for s in scores)]))
    for score in scores:
        value = getattr(score, which)
        if value is not None:
            table.setdefault(score.variant, {}).setdefault(score.target, {})[score.seed] = value
    if len(targets) > 1:
        for found in table.values():
            seeds = set.intersection(*(set(found.get(t, {})) for t in targets))
            if seeds:
                found[MEAN] = {
                    s: statistics.fmean(found[t][s] for t in targets) for s in sorted(seeds)
                }
    return table


def spread(values: Mapping[int, float]) -> Spread:
    """Mean and standard deviation over seeds."""
    found = list(values.values())
    std = statistics.stdev(found) if len(found) > 1 else None
    return Spread(statistics.fmean(found), std, len(found))


def difference(mine: Values, baseline: Values, level: float = 0.95) -> Difference | None:
    """Mine minus the baseline's on the seeds both have, with Student's t interval.

    The pairs share the seed, hence the initial model and the order of images, so that what varies
    between seeds for both alike cancels. None if they share no seed.
    """
    pairs = [mine[s] - baseline[s] for s in sorted(set(mine) & set(baseline))]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    if len(pairs) == 1:
        return Difference(mean, None, None, 1)
    from scipy.stats import t  # takes long to import

    half = float(t.ppf((1 + level) / 2, len(pairs) - 1))
    half *= statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(mean, mean - half, mean + half, len(pairs))
