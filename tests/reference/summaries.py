"""What a site tells of one column, value by value."""

import math
from collections.abc import Sequence

FLOOR, BINS = 10, 8


def edge(values: Sequence[float]) -> float:
    """The mean of ten values next to the lowest ones, without these."""
    first = max(FLOOR, math.floor(0.05 * len(values)))
    return math.fsum(sorted(values)[first : first + FLOOR]) / FLOOR


def column(values: Sequence[float]) -> dict[str, float]:
    """Range, mean and deviation of a table's column, before they are rounded."""
    seen = [v for v in values if not math.isnan(v)]
    low, high = edge(seen), -edge([-v for v in seen])
    within = [min(max(v, low), high) for v in seen]
    mean = math.fsum(within) / len(within)
    square = math.fsum((v - mean) ** 2 for v in within) / len(within)
    return {"low": low, "high": high, "mean": mean, "deviation": math.sqrt(square)}


def share(values: Sequence[float], low: float, high: float) -> list[float]:
    """How many of the values are in each bin, in tens, as shares; small bins are empty."""
    counts = [0] * BINS
    for v in values:
        counts[min(max(math.floor((v - low) / (high - low) * BINS), 0), BINS - 1)] += 1
    n = len(values) // 10 * 10
    return [min(10 * round(c / 10) / n, 1.0) if c >= FLOOR else 0.0 for c in counts]


def drift(
    m: Sequence[float], s: Sequence[float], m2: Sequence[float], s2: Sequence[float]
) -> float:
    """The root mean square of differences in units of the pooled deviation, 10 at most."""
    squares = []
    for a, d, b, e in zip(m, s, m2, s2, strict=True):
        pooled = math.sqrt((d * d + e * e) / 2)
        far = 10.0 if a != b else 0.0
        squares.append(min(abs(a - b) / pooled if pooled else far, 10.0) ** 2)
    return math.sqrt(math.fsum(squares) / len(squares))
