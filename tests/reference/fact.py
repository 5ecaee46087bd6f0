"""FACT's discrepancy as plain loops, in float64."""

from collections.abc import Sequence

from tests.reference.shot import softmax


def discrepancy(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], twice: bool
) -> float:
    """The mean of |p1 - p2| over images and classes."""
    gaps = []
    for a, b in zip(one, other, strict=True):
        p, q = softmax(a), softmax(b)
        if twice:
            p, q = softmax(p), softmax(q)
        gaps += [abs(u - v) for u, v in zip(p, q, strict=True)]
    return sum(gaps) / len(gaps)
