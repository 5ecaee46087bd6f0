"""Numbers that follow from the round alone; without torch, as the report draws them too."""


def gate(t: int, rounds: int, low: float, high: float, reach: bool = True) -> float:
    """g(t) of KD3A's Alg. 1, linear: `low` in round 1, `high` in round `rounds` -> float.

    Without `reach` only round `rounds` + 1 would reach `high`, as in the official code.
    """
    return low + (high - low) * (t - 1) / (max(rounds - 1, 1) if reach else rounds)
