"""Co-MDA as plain loops over images, sources and classes, in float64."""

import math
from collections.abc import Sequence

from tests.reference.shot import Row, softmax


def between_classes(values: Row) -> float:
    """Otsu: of all thresholds, the largest share * share * (difference of means)^2."""
    best = 0.0
    for threshold in values:
        low = [v for v in values if v <= threshold]
        high = [v for v in values if v > threshold]
        if high:
            apart = sum(low) / len(low) - sum(high) / len(high)
            best = max(best, len(low) * len(high) / len(values) ** 2 * apart**2)
    return best


def weights(p: Sequence[Sequence[Row]]) -> list[float]:
    """Softmax of five times the variances of each source's confidences."""
    return softmax([5 * between_classes([max(row) for row in of_source]) for of_source in p])


def consensus(answers: Sequence[Sequence[Row]], carried: str) -> list[list[float]]:
    """The consensus about each image after answers (N, C) of some rounds, one after the other."""
    found = [[0.0] * len(row) for row in answers[0]]
    Z = found
    for t, p in enumerate(answers, start=1):
        pairs = [zip(*rows, strict=True) for rows in zip(Z, p, strict=True)]
        Z = [[0.6 * z + 0.4 * q for z, q in pair] for pair in pairs]
        found = [[z / (1 - 0.6**t) for z in row] for row in Z]
        Z = found if carried == "corrected" else Z
    return found


def cross_entropy(label: Row, q: Row) -> float:
    return -sum(a * math.log(b) for a, b in zip(label, q, strict=True))


def co_teaching(
    logits: Sequence[Sequence[Row]], labels: Sequence[Row], count: int
) -> tuple[float, float]:
    """Each network's mean cross entropy on the images that the other finds easiest."""
    losses = [
        [cross_entropy(label, softmax(row)) for label, row in zip(labels, network, strict=True)]
        for network in logits
    ]
    easiest = [sorted(range(len(own)), key=own.__getitem__)[:count] for own in losses]
    first = sum(losses[0][i] for i in easiest[1]) / count
    return first, sum(losses[1][i] for i in easiest[0]) / count
