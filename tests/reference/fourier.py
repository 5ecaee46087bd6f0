"""Exact multi-kernel MMD, pair by pair, and its gradient."""

import math
import statistics
from collections.abc import Sequence

Row = Sequence[float]


def distance2(x: Row, y: Row) -> float:
    return math.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True))


def kernel(x: Row, y: Row, sigmas: Sequence[float]) -> float:
    """Mean of Gaussian kernels."""
    return statistics.fmean(math.exp(-distance2(x, y) / (2 * s * s)) for s in sigmas)


def mmd2(S: Sequence[Row], T: Sequence[Row], sigmas: Sequence[float]) -> float:
    """E k(s, s') - 2 E k(s, t) + E k(t, t'), over all pairs, a sample with itself included."""

    def mean(A: Sequence[Row], B: Sequence[Row]) -> float:
        return statistics.fmean(kernel(a, b, sigmas) for a in A for b in B)

    return mean(S, S) - 2 * mean(S, T) + mean(T, T)


def mmd2_gradient(S: Sequence[Row], T: Sequence[Row], sigmas: Sequence[float]) -> list[list[float]]:
    """Derivative of `mmd2` in every value of S; swap the two for T's.

    d k(x, y) / dx = mean_b -k_b(x, y) (x - y) / sigma_b^2, and each s occurs in two of the sums.
    """

    def along(x: Row, y: Row, i: int) -> float:
        return statistics.fmean(
            -math.exp(-distance2(x, y) / (2 * s * s)) * (x[i] - y[i]) / (s * s) for s in sigmas
        )

    rows = []
    for s in S:
        own = [math.fsum(along(s, o, i) for o in S) / len(S) for i in range(len(s))]
        other = [math.fsum(along(s, t, i) for t in T) / len(T) for i in range(len(s))]
        rows.append([2 / len(S) * (a - b) for a, b in zip(own, other, strict=True)])
    return rows


def median_distance(z: Sequence[Row]) -> float:
    """The lower median of all pairs' distances."""
    pairs = [math.sqrt(distance2(a, b)) for i, a in enumerate(z) for b in z[i + 1 :]]
    return statistics.median_low(pairs)
