"""Estimates of class shares as plain loops, from the papers."""

from collections.abc import Sequence

import numpy as np

Row = Sequence[float]


def em(p: Sequence[Row], prior: Row, steps: int) -> list[float]:
    """Saerens et al., section 2.2: the expectation of each image's class, then their mean."""
    q = list(prior)
    for _ in range(steps):
        total = [0.0] * len(q)
        for row in p:
            a = [v * n / o for v, n, o in zip(row, q, prior, strict=True)]
            total = [t + v / sum(a) for t, v in zip(total, a, strict=True)]
        q = [t / len(p) for t in total]
    return q


def bbse(label: Sequence[int], y: Sequence[int], target: Sequence[int], C: int) -> list[float]:
    """Lipton et al., algorithm 1: count, invert, weigh the sources' shares."""
    J = [[0.0] * C for _ in range(C)]
    for i, j in zip(label, y, strict=True):
        J[i][j] += 1 / len(y)
    w = np.linalg.inv(J) @ [target.count(i) / len(target) for i in range(C)]
    q = [max(w[c], 0.0) * y.count(c) / len(y) for c in range(C)]
    return [v / sum(q) for v in q]


def rlls(J: np.ndarray, mu: np.ndarray, ridge: float) -> np.ndarray:
    """Azizzadenesheli et al.: theta as least squares of two stacked systems."""
    C = len(mu)
    rows = np.vstack([J, np.sqrt(ridge) * np.eye(C)])
    wanted = np.concatenate([mu - J @ np.ones(C), np.zeros(C)])
    theta = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    q = np.maximum(1 + theta, 0) * J.sum(axis=0)
    return q / q.sum()
