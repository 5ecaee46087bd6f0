"""OCS in plain loops, from FRUDA's equations 5 and 17."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.reference.adversarial import shorten

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


def critic(
    DI: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]], lr: float, betas: tuple[float, float]
) -> nn.Module:
    """Train a critic by eqs. 17 and 18 where both sides' features are in one place.

    Each step raises the difference of eq. 17 over one pair of batches; then no layer's norm may be
    above 1.
    """
    moves = torch.optim.Adam(DI.parameters(), lr=lr, betas=betas)
    for z_C, z_T in pairs:
        moves.zero_grad()
        (-(DI(z_C).mean() - DI(z_T).mean()) / 2).backward()
        moves.step()
        shorten(DI)
    return DI
