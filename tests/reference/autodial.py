"""AutoDIAL's layer and loss as plain loops, in float64."""

import math
from collections.abc import Sequence

from tests.reference.shot import softmax


def normalise(
    x: Sequence[float], other_mean: float, other_square: float, alpha: float, eps: float
) -> list[float]:
    """One channel of a batch, by the moments of the mixture alpha q + (1 - alpha) q_other."""
    mean = alpha * sum(x) / len(x) + (1 - alpha) * other_mean
    square = alpha * sum(v * v for v in x) / len(x) + (1 - alpha) * other_square
    return [(v - mean) / math.sqrt(square - mean * mean + eps) for v in x]


def entropy(logits: Sequence[Sequence[float]]) -> float:
    """The mean of -sum_c p_c log p_c over images."""
    terms = [-sum(p * math.log(p) for p in softmax(row)) for row in logits]
    return sum(terms) / len(terms)
