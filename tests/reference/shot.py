"""SHOT and DECISION as plain loops over images and classes, in float64, from the papers."""

import math
from collections.abc import Sequence

Row = Sequence[float]


def softmax(logits: Row) -> list[float]:
    most = max(logits)
    e = [math.exp(v - most) for v in logits]
    return [v / sum(e) for v in e]


def entropy(p: Row) -> float:
    return -sum(v * math.log(v) for v in p if v > 0)


def information(logits: Sequence[Row], q: Row = ()) -> float:
    """SHOT, section 3.2: L_ent plus KL(mean prediction, q) - ln C; q is even if it is not given."""
    p = [softmax(row) for row in logits]
    C = len(p[0])
    mean = [sum(row[c] for row in p) / len(p) for c in range(C)]
    divergence = sum(m * math.log(m / s) for m, s in zip(mean, q or [1 / C] * C, strict=True))
    return sum(map(entropy, p)) / len(p) + divergence - math.log(C)


def objective(logits: Sequence[Row], labels: Sequence[int], beta: float) -> float:
    """SHOT, section 3.3: the whole objective of the target."""
    chosen = [-math.log(softmax(row)[y]) for row, y in zip(logits, labels, strict=True)]
    return information(logits) + beta * sum(chosen) / len(chosen)


def smooth_cross_entropy(logits: Sequence[Row], labels: Sequence[int], smoothing: float) -> float:
    """SHOT, section 3.1: the label gets 1 - a, and every class a / C more."""
    total = 0.0
    for row, y in zip(logits, labels, strict=True):
        C = len(row)
        q = [(1 - smoothing) * (c == y) + smoothing / C for c in range(C)]
        total -= sum(q[c] * math.log(softmax(row)[c]) for c in range(C))
    return total / len(logits)


def length(v: Row) -> float:
    return math.sqrt(sum(a * a for a in v))


def cosine_distance(u: Row, v: Row) -> float:
    return 1 - sum(a * b for a, b in zip(u, v, strict=True)) / (length(u) * length(v))


def unit_with_one(z: Row) -> list[float]:
    """The authors' code: append a 1, and make the length 1."""
    longer = [*z, 1.0]
    return [a / length(longer) for a in longer]


def mean_of(points: Sequence[Row], weights: Row) -> list[float] | None:
    total = sum(weights)
    if not total:
        return None
    d = range(len(points[0]))
    return [sum(w * p[j] for w, p in zip(weights, points, strict=True)) / total for j in d]


def closest(point: Row, centroids: Sequence[Row | None]) -> int:
    known = [c for c, mu in enumerate(centroids) if mu is not None]
    return min(known, key=lambda c: cosine_distance(point, centroids[c] or []))


def labels(
    points: Sequence[Row], p: Sequence[Row]
) -> tuple[list[int], list[Sequence[float] | None]]:
    """SHOT, section 3.3: labels of the soft centroids, then of these labels' own centroids."""
    C = range(len(p[0]))
    soft = [mean_of(points, [row[c] for row in p]) for c in C]
    first = [closest(v, soft) for v in points]
    hard: list[Sequence[float] | None] = [
        mean_of(points, [float(y == c) for y in first]) for c in C
    ]
    return [closest(v, hard) for v in points], hard


def together(
    points: Sequence[Sequence[Row]], centroids: Sequence[Sequence[Row]], w: Row
) -> list[int]:
    """DECISION: the nearest weighted centroid to each image's weighted point, by Euclid."""
    K, N, C = range(len(points)), len(points[0]), len(centroids[0])
    d = range(len(points[0][0]))
    found = []
    for i in range(N):
        v = [sum(w[k] * points[k][i][j] for k in K) for j in d]
        mus = [[sum(w[k] * centroids[k][c][j] for k in K) for j in d] for c in range(C)]
        gaps = [length([a - b for a, b in zip(v, mu, strict=True)]) for mu in mus]
        known = [c for c in range(C) if any(any(centroids[k][c]) for k in K)]
        found.append(min(known, key=lambda c: gaps[c]))
    return found


def mean_probability(logits: Sequence[Sequence[Row]], w: Row) -> list[list[float]]:
    """SHOT with several sources: the weighted mean of the models' softmax."""
    N, C = len(logits[0]), len(logits[0][0])
    p = [[softmax(row) for row in model] for model in logits]
    return [
        [sum(a * q[i][c] for a, q in zip(w, p, strict=True)) for c in range(C)] for i in range(N)
    ]


def of_mean_logits(logits: Sequence[Sequence[Row]], w: Row) -> list[list[float]]:
    """DECISION: softmax of the weighted sum of the models' logits."""
    N, C = len(logits[0]), len(logits[0][0])
    sums = [
        [sum(a * model[i][c] for a, model in zip(w, logits, strict=True)) for c in range(C)]
        for i in range(N)
    ]
    return [softmax(row) for row in sums]
