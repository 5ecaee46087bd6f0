"""FedDaDiL's small formulas, number by number."""

import math


def softmax(v: list[float]) -> list[float]:
    e = [math.exp(x - max(v)) for x in v]
    return [x / sum(e) for x in e]


def mean(versions: list[list[float]]) -> list[float]:
    """Eq. 12 for one flat support."""
    return [math.fsum(values) / len(versions) for values in zip(*versions, strict=True)]


def ensemble(
    x: list[float], W: list[list[list[float]]], b: list[list[float]], alpha: list[float]
) -> list[float]:
    """Eq. 15 for one point."""
    p = [0.0] * len(b[0])
    for weight, rows, offsets in zip(alpha, W, b, strict=True):
        logits = [
            math.fsum(w * v for w, v in zip(row, x, strict=True)) + offset
            for row, offset in zip(rows, offsets, strict=True)
        ]
        p = [total + weight * q for total, q in zip(p, softmax(logits), strict=True)]
    return p


def head_gradient(
    z: list[list[float]], y: list[list[float]], W: list[list[float]], b: list[float]
) -> list[list[float]]:
    """The gradient of a head's mean cross entropy for W, point by point."""
    slope = [[0.0] * len(z[0]) for _ in b]
    for point, label in zip(z, y, strict=True):
        p = ensemble(point, [W], [b], [1.0])
        for c, row in enumerate(slope):
            for i, value in enumerate(point):
                row[i] += (p[c] - label[c]) * value / len(z)
    return slope


def rectified(mean: float, std: float, steps: int = 20_000) -> tuple[float, float]:
    """Mean and deviation of max(0, mean + std u) for normal u, by summing over u."""
    us = [-8 + 16 * (i + 0.5) / steps for i in range(steps)]
    weights = [math.exp(-u * u / 2) for u in us]
    values = [max(0.0, mean + std * u) for u in us]
    total = math.fsum(weights)
    first = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    second = math.fsum(w * v * v for w, v in zip(weights, values, strict=True)) / total
    return first, math.sqrt(second - first**2)
