"""OCS in plain loops, from FRUDA's equations 5 and 17."""

import math
from collections.abc import Sequence

Row = Sequence[float]


def softmax(logits: Row) -> list[float]:
    powers = [math.exp(a - max(logits)) for a in logits]
    return [power / math.fsum(powers) for power in powers]


def l1_error(p: Sequence[Row], y: Sequence[int]) -> float:
    """Half the L1 distance between each prediction and its label's unit vector, on average."""
    total = 0.0
    for row, label in zip(p, y, strict=True):
        total += math.fsum(abs(v - (c == label)) for c, v in enumerate(row)) / 2
    return total / len(y)


def w1(candidate: Row, target: Row) -> float:
    """Eq. 17, from a critic's values on both sides."""
    return math.fsum(candidate) / len(candidate) - math.fsum(target) / len(target)


def best(rows: Sequence[tuple[float, float, float, float]]) -> int:
    """Eq. 5: the place of the smallest theta_CE (eps + 2 theta W1)."""
    scores = [theta_CE * (eps + 2 * theta * W1) for theta_CE, eps, theta, W1 in rows]
    return scores.index(min(scores))
