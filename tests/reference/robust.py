"""Robust means, parameter by parameter and site by site, in plain Python."""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def median(values: Vector) -> float:
    """The value in the middle; of an even number the mean of the two."""
    ordered, K = sorted(values), len(values)
    return ordered[K // 2] if K % 2 else (ordered[K // 2 - 1] + ordered[K // 2]) / 2


def trimmed(values: Vector, f: int) -> float:
    """Mean without the f smallest and the f largest."""
    kept = sorted(values)[f : len(values) - f]
    return sum(kept) / len(kept)


def distance(a: Vector, b: Vector) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def krum(models: Sequence[Vector], f: int) -> set[int]:
    """Blanchard et al., section 4 and 5: the K - f models with the smallest scores."""
    K = len(models)
    scores = []
    for i in range(K):
        others = sorted(distance(models[i], models[j]) ** 2 for j in range(K) if j != i)
        scores.append((sum(others[: K - f - 2]), i))
    return {i for _, i in sorted(scores)[: K - f]}


def mean(models: Sequence[Vector], w: Vector) -> list[float]:
    """Weighted mean of each parameter."""
    return [
        sum(share * model[p] for share, model in zip(w, models, strict=True)) / sum(w)
        for p in range(len(models[0]))
    ]


def bounded(start: Vector, models: Sequence[Vector], w: Vector) -> list[float]:
    """Each update shortened to the median length, then the weighted mean."""
    lengths = [distance(model, start) for model in models]
    most = median(lengths)
    moved = []
    for model, length in zip(models, lengths, strict=True):
        factor = min(1.0, most / length) if length else 1.0
        moved.append([s + factor * (x - s) for s, x in zip(start, model, strict=True)])
    return mean(moved, w)


def clipped(
    start: Vector, models: Sequence[Vector], times: float, liars: float
) -> list[list[float]]:
    """Each update no longer than so many times the f-th longest of the others', from three on."""
    f = math.ceil(round(liars * len(models), 6))
    lengths = [distance(model, start) for model in models]
    moved = []
    for k, (model, length) in enumerate(zip(models, lengths, strict=True)):
        others = sorted(lengths[:k] + lengths[k + 1 :], reverse=True)
        most = times * others[f - 1] if len(models) > 2 else 0.0
        factor = most / length if 0 < most < length else 1.0
        moved.append([s + factor * (x - s) for s, x in zip(start, model, strict=True)])
    return moved
