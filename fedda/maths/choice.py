"""Which of several models to take, from what can be known of each without labels.

    v       (M,)    one kind of evidence on M models; higher is better, None where it is not known
    label   (M, N)  the class that each model predicts for each of N images of the target
    A       (M, M)  share of the images on which two models predict the same class; NaN where nobody
                    has compared them
    group   (M,)    the method of each model: settings of one method are alike, so it counts once

Kinds of evidence have no common unit, so models are compared pair by pair: how many others a model
is ahead of (Borda, 1784; Copeland, 1951). Values within a step of each other are a draw.

Four witnesses have one vote each. Infomax and BNM both ask whether predictions are sure and
balanced, so they share a vote. SND has none: it is highest where all images are given one class.
The witness of agreement is the only one that a model cannot win by being sure of itself: one that
is sure, balanced, well clustered and wrong agrees with no independent model.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

Values = Sequence[float | None]
Evidence = Mapping[str, Values]  # by kind

WITNESSES = {
    "estimate": ("estimate",),
    "sure and balanced": ("infomax", "bnm"),
    "clusters": ("ami",),
    "agreement": ("agreement",),
}
STEP = 0.01  # the step in which numbers of a test leave a site
APART = 0.5  # a model agrees with others less than this part of what they do among themselves


def lead(a: float | None, b: float | None) -> float | None:
    """Who is ahead: 1 for a, -1 for b, 0 within a step; None if either is not known."""
    if a is None or b is None:
        return None
    difference = round(a - b, 6)  # a step is not more than a step
    return float(difference > STEP) - float(difference < -STEP)


def duel(evidence: Evidence, i: int, j: int) -> float:
    """Mean over the witnesses of who is ahead, model i or model j -> [-1, 1], 0 if none knows."""
    votes = []
    for kinds in WITNESSES.values():
        leads = [lead(evidence[k][i], evidence[k][j]) for k in kinds if k in evidence]
        known = [one for one in leads if one is not None]
        votes += [statistics.fmean(known)] if known else []
    return statistics.fmean(votes) if votes else 0.0


def standing(evidence: Evidence, count: int) -> list[float]:
    """Each model's mean duel with all others -> [0, 1], .5 where nothing tells them apart."""
    return [
        (1 + statistics.fmean([duel(evidence, i, j) for j in range(count) if j != i] or [0.0])) / 2
        for i in range(count)
    ]


def agreement(label: Tensor) -> Tensor:
    """Shares of equal predictions (M, N) -> A (M, M)."""
    return (label[:, None] == label[None, :]).double().mean(dim=2)


def support(A: Tensor, group: Sequence[str]) -> list[float | None]:
    """How far each model agrees with models of other methods; each of these counts once."""
    groups = [*dict.fromkeys(group)]
    found: list[float | None] = []
    for i, own in enumerate(group):
        others = _known(_between(A, group, [i], g) for g in groups if g != own)
        found.append(statistics.fmean(others) if others else None)
    return found


def apart(A: Tensor, group: Sequence[str]) -> list[bool]:
    """Whether a model agrees with others less than half as much as they do among themselves.

    That is its `support` below half the median over all pairs of the other methods. Without such
    a pair nobody is apart.
    """
    groups, supports = [*dict.fromkeys(group)], support(A, group)
    found = []
    for own, value in zip(group, supports, strict=True):
        others = [g for g in groups if g != own]
        pairs = _known(
            _between(A, group, [i for i, name in enumerate(group) if name == g], h)
            for n, g in enumerate(others)
            for h in others[n + 1 :]
        )
        found.append(bool(pairs) and value is not None and value < APART * statistics.median(pairs))
    return found


def _between(A: Tensor, group: Sequence[str], rows: Sequence[int], other: str) -> float:
    """Mean agreement of the models in `rows` with those of a method; NaN if none is known."""
    columns = [j for j, name in enumerate(group) if name == other]
    known = _known(float(A[i, j]) for i in rows for j in columns)
    return statistics.fmean(known) if known else math.nan


def _known(values: Iterable[float]) -> list[float]:
    return [v for v in values if not math.isnan(v)]
