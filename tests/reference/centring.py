"""Centring's formulas, example by example."""

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def mean(rows: Rows) -> list[float]:
    """The mean of some examples, value by value."""
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def of_class(x: Rows, y: Sequence[int], c: int) -> list[Sequence[float]]:
    """The examples of a class."""
    return [row for row, label in zip(x, y, strict=True) if label == c]


def surest(p: Rows, share: float, least: int = 1) -> list[int]:
    """The places of the surest examples of each predicted class."""
    y = [row.index(max(row)) for row in map(list, p)]
    kept = []
    for c in set(y):
        members = sorted((i for i, label in enumerate(y) if label == c), key=lambda i: -p[i][c])
        kept += members[: max(math.ceil(share * len(members)), least)]
    return sorted(kept)


def moved(x: Rows, y: Sequence[int], target: Rows, predicted: Sequence[int], least: int) -> Rows:
    """A source's examples, each moved by the distance of its class's means at both sites."""
    out = []
    for row, c in zip(x, y, strict=True):
        there = of_class(target, predicted, c)
        if len(there) < least:
            out.append(list(row))
            continue
        apart = zip(row, mean(there), mean(of_class(x, y, c)), strict=True)
        out.append([value + t - s for value, t, s in apart])
    return out
