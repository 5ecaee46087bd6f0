"""Infomax from its formula alone, in plain Python."""

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def entropy(row: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in row if p > 0)


def infomax(p: Rows) -> float:
    mean = [sum(column) / len(p) for column in zip(*p, strict=True)]
    return entropy(mean) - sum(map(entropy, p)) / len(p)
