"""Discriminator losses and the gradient penalty, value by value from the papers."""

import math
from collections.abc import Sequence

Row = Sequence[float]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def discriminator(loss: str, f_S: Row, f_T: Row) -> float:
    """Eq. 6, or eq. 15 without its penalty."""
    if loss == "wassda":
        return -(mean(f_S) - mean(f_T))
    found_source = mean([math.log(sigmoid(v)) for v in f_S])
    found_target = mean([math.log(1 - sigmoid(v)) for v in f_T])
    return -found_source - found_target


def mapping(loss: str, f_S: Row, f_T: Row) -> float:
    """Eqs. 7, 13 and 16; for CADA both sides' inverted labels."""
    if loss == "wassda":
        return mean(f_S) - mean(f_T)
    fooled = -mean([math.log(sigmoid(v)) for v in f_T])
    if loss == "grl":
        return mean([math.log(1 - sigmoid(v)) for v in f_T])
    return fooled - (mean([math.log(1 - sigmoid(v)) for v in f_S]) if loss == "cada" else 0.0)


def value(layers: Sequence[tuple[Sequence[Row], Row]], z: Row) -> float:
    """What linear layers (weights, bias) with ReLU between them give one sample."""
    for depth, (weights, bias) in enumerate(layers):
        if depth:
            z = [max(v, 0.0) for v in z]
        z = [
            math.fsum(w * v for w, v in zip(row, z, strict=True)) + b
            for row, b in zip(weights, bias, strict=True)
        ]
    return z[0]


def slope(layers: Sequence[tuple[Sequence[Row], Row]], z: Row, h: float = 1e-6) -> float:
    """Length of the gradient at z, by central differences."""
    total = 0.0
    for i in range(len(z)):
        up, down = list(z), list(z)
        up[i] += h
        down[i] -= h
        total += ((value(layers, up) - value(layers, down)) / (2 * h)) ** 2
    return math.sqrt(total)


def penalty(
    layers: Sequence[tuple[Sequence[Row], Row]],
    z: Sequence[Row],
    partner: Sequence[int],
    e: Sequence[float],
) -> float:
    """Mean of (slope - 1)^2 at e z_i + (1 - e) z_j."""
    found = []
    for i, j in enumerate(partner):
        u = [e[i] * a + (1 - e[i]) * b for a, b in zip(z[i], z[j], strict=True)]
        found.append((slope(layers, u) - 1) ** 2)
    return mean(found)


def reversal(q: float) -> float:
    """Ganin et al. as printed."""
    return 2 / (1 + math.exp(-10 * q)) - 1
