"""The local last step from its formula alone: plain Python over images, numpy for the inverse."""

import math

import numpy as np


def refine(
    p: list[list[float]],
    x: list[list[float]],
    s: float,
    w: float,
    ridge: float,
    shares: str,
    beta: float,
) -> list[list[float]]:
    """Answers q of predictions p and features x, with the evidence beta for shares."""
    z = points(x)
    N, C, d = len(p), len(p[0]), len(z[0])
    offset = offsets(p, shares, beta)
    q = p
    for _ in range(8):
        n = [sum(row[c] for row in q) for c in range(C)]
        mu = [
            [sum(q[i][c] * z[i][k] for i in range(N)) / (n[c] + 1e-3) for k in range(d)]
            for c in range(C)
        ]
        S = np.zeros((d, d))
        for i in range(N):
            for c in range(C):
                off = np.subtract(z[i], mu[c])
                S += q[i][c] * np.outer(off, off) / N
        S += (ridge + d / N) * np.trace(S) / d * np.eye(d)
        inverse = np.linalg.inv(S)
        new = []
        for i in range(N):
            a = []
            for c in range(C):
                off = np.subtract(z[i], mu[c])
                likelihood = -0.5 * s * float(off @ inverse @ off)
                a.append(likelihood + w * math.log(max(p[i][c], 1e-6)) + offset[c])
            top = max(a)
            total = sum(math.exp(v - top) for v in a)
            new.append([math.exp(v - top) / total for v in a])
        q = new
    return q


def points(x: list[list[float]]) -> list[list[float]]:
    """Standardised columns, rows of unit length, the first principal components."""
    N, D = len(x), len(x[0])
    columns = list(zip(*x, strict=True))
    means = [sum(c) / N for c in columns]
    spreads = [
        math.sqrt(sum((v - m) ** 2 for v in c) / N) for c, m in zip(columns, means, strict=True)
    ]
    mean_spread = sum(spreads) / D
    rows = []
    for row in x:
        u = [
            (v - m) / (sd + 0.1 * mean_spread) for v, m, sd in zip(row, means, spreads, strict=True)
        ]
        length = math.sqrt(sum(v * v for v in u))
        rows.append([v / length for v in u])
    centred = np.array(rows) - np.mean(rows, axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    d = max(1, min(64, N // 4, D))
    return (centred @ vectors[:, ::-1][:, :d]).tolist()


def offsets(p: list[list[float]], shares: str, beta: float) -> list[float]:
    """What each class's share adds to its logit."""
    count = [0.3] * len(p[0])
    for row in p:
        count[row.index(max(row))] += 1
    weight = {"even": 0.0, "estimated": 1.0, "auto": beta}[shares]
    return [weight * math.log(n / sum(count)) for n in count]


def evidence(p: list[list[float]]) -> float:
    """How far one model's mean prediction is from even shares, from 0 to 1."""
    N, C = len(p), len(p[0])
    divergence = sum(m * math.log(m * C) for m in mean_of(p)) - (C - 1) / (2 * N)
    return min(max(divergence / 0.1, 0.0), 1.0)


def alike(p: list[list[float]], other: list[list[float]]) -> float:
    """The cosine of two models' mean predictions less even shares, if it is above 0."""
    one, two = ([m - 1 / len(p[0]) for m in mean_of(q)] for q in (p, other))
    dot = sum(a * b for a, b in zip(one, two, strict=True))
    lengths = math.sqrt(sum(a * a for a in one)) * math.sqrt(sum(b * b for b in two))
    return max(dot / lengths, 0.0)


def shown(p: list[list[float]], own: list[list[float]]) -> float:
    """What two models show together; of two classes the first one alone."""
    if len(p[0]) == 2:
        return evidence(p)
    return min(evidence(p), 5 * evidence(own)) * alike(p, own)


def mean_of(p: list[list[float]]) -> list[float]:
    """The mean prediction."""
    return [sum(column) / len(p) for column in zip(*p, strict=True)]
