"""FedAvg and FedProx, term by term."""


def weights(counts: list[int]) -> list[float]:
    """n_k / n."""
    return [n / sum(counts) for n in counts]


def proximal(w: list[list[float]], anchor: list[list[float]], mu: float) -> float:
    """Half of mu times |w - w^t|^2."""
    total = 0.0
    for tensor, start in zip(w, anchor, strict=True):
        for value, at in zip(tensor, start, strict=True):
            total += (value - at) ** 2
    return mu / 2 * total
