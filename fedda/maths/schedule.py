"""Numbers that follow from the round alone; without torch, as the report draws them too."""

import math
from typing import Literal

Growth = Literal["ganin", "constant"]
Late = Literal["late", "constant"]


def gate(t: int, rounds: int, low: float, high: float, reach: bool = True) -> float:
    """g(t) of KD3A's Alg. 1, linear: `low` in round 1, `high` in round `rounds` -> float.

    Without `reach` only round `rounds` + 1 would reach `high`, as in the official code.
    """
    return low + (high - low) * (t - 1) / (max(rounds - 1, 1) if reach else rounds)


def growth(q: float, form: Growth | Late = "ganin") -> float:
    """A weight when a share q of the training is over -> [0, 1].

    Ganin et al., section 5.2.2: 2 / (1 + exp(-10 q)) - 1. Late: 0 in the first half, then linear.
    """
    if form == "constant":
        return 1.0
    return math.tanh(5 * q) if form == "ganin" else max(0.0, 2 * q - 1)
