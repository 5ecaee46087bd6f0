"""Which of several models to take, from what can be known of each without labels.

    v       (M,)    one kind of evidence on M models; higher is better, None where it is not known
    p       (M, N, C)  class probabilities that each model gives N images of the target
    group   (M,)    the method of each model: settings of one method are alike, so it counts once

Kinds of evidence have no common unit, so models are compared pair by pair: how many others a model
is ahead of (Borda, 1784; Copeland, 1951). Values within a step of each other are a draw.

Four witnesses have one vote each. Infomax and BNM both ask whether predictions are sure and
balanced, so they share a vote. SND has none: it is highest where all images are given one class.
The witness of agreement is the only one that a model cannot win by being sure of itself: one that
is sure, balanced, well clustered and wrong agrees with no independent model. It is EnsV (Hu, Luo,
Liang and Foo, NeurIPS 2024, Datasets and Benchmarks): agreement with the mean of all models'
probabilities. Methods that make their predictions sharp at the target have no part in that mean.
"""

import statistics
from collections.abc import Mapping, Sequence

import torch
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
APART = 0.5  # a model agrees with the ensemble less than this part of what others do


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


def ensemble(p: Tensor, group: Sequence[str], voting: Sequence[bool]) -> Tensor:
    """EnsV: the mean of what the methods predict, each the mean of its models -> (N, C).

    Args:
        p: (M, N, C) class probabilities.
        group: each model's method.
        voting: whether a model has a part in it; if none has, all have.
    """
    some = [i for i, votes in enumerate(voting) if votes] or [*range(len(group))]
    methods = dict.fromkeys(group[i] for i in some)
    means = [p[[i for i in some if group[i] == method]].mean(dim=0) for method in methods]
    return torch.stack(means).mean(dim=0)


def agreement(p: Tensor, mean: Tensor) -> Tensor:
    """EnsV: share of images to which a model gives the class of the mean (N, C) -> (M,)."""
    return (p.argmax(dim=-1) == mean.argmax(dim=-1)).double().mean(dim=-1)


def apart(agreed: Values, group: Sequence[str]) -> list[bool]:
    """Whether a model agrees with the ensemble less than half as much as other methods do.

    Half of their median, each method's the mean of its models. Without two others nobody is apart.
    """
    found = []
    for own, value in zip(group, agreed, strict=True):
        others = [
            statistics.fmean(known)
            for method in dict.fromkeys(group)
            if method != own and (known := _known(agreed, group, method))
        ]
        odd = value is not None and len(others) > 1 and value < APART * statistics.median(others)
        found.append(odd)
    return found


def _known(agreed: Values, group: Sequence[str], method: str) -> list[float]:
    pairs = zip(agreed, group, strict=True)
    return [value for value, name in pairs if name == method and value is not None]
