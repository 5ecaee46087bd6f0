"""Means and variances per channel, as BatchNorm's: of batches, and how far those of models differ.

x               (N, d, ...)  values of one batch, with d channels
n               int          values per channel
mean, variance  (d,)         over all batches
spread          (d,)         sum of squared distances from the mean, float64
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Count, mean and spread of a layer's inputs so far."""

    n: int
    mean: Tensor  # (d,) float64
    spread: Tensor  # (d,) float64

    @property
    def variance(self) -> Tensor:
        """Sigma^2 = spread / (n - 1), unbiased like BatchNorm's running variance -> (d,)."""
        return self.spread / (self.n - 1)


def moments(x: Tensor) -> Moments:
    """Mean and spread of every channel of one batch -> Moments over (d,)."""
    axes = [a for a in range(x.dim()) if a != 1]
    variance, mean = torch.var_mean(x, dim=axes, correction=0)
    n = x.numel() // x.shape[1]
    return Moments(n, mean.double(), variance.double() * n)


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two sets of values (Chan et al., 1979) -> Moments.

    The result is the variance of all values that entered the layer. A cumulative average of the
    batches' variances would ignore the distances between the batches' means, and so depend on the
    batch size.
    """
    n = a.n + b.n
    apart = b.mean - a.mean
    mean = a.mean + apart * (b.n / n)
    return Moments(n, mean, a.spread + b.spread + apart**2 * (a.n * b.n / n))


def batchnorm_distance(
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    target_means: Sequence[Tensor],
    target_variances: Sequence[Tensor],
) -> Tensor:
    """KD3A, eq. 11 over all layers: |mu - mu_T|^2 + |second - second_T|^2 -> float64 scalar."""
    total = torch.zeros((), dtype=torch.float64)
    layers = zip(means, variances, target_means, target_variances, strict=True)
    for layer in layers:
        m, v, m_T, v_T = (a.double() for a in layer)
        second, second_T = v + m**2, v_T + m_T**2
        total = total.to(m.device) + ((m - m_T) ** 2).sum() + ((second - second_T) ** 2).sum()
    return total


def batchnorm_mmd_loss(
    mu_T: Sequence[Tensor],
    second_T: Sequence[Tensor],
    mu: Sequence[Tensor],
    second: Sequence[Tensor],
    alpha: Tensor,
) -> Tensor:
    """KD3A, eq. 12: sum_l sum_k alpha_k (|mu_T - mu_k|^2 + |second_T - second_k|^2) -> scalar.

    Args:
        mu_T: per layer (d_l,), mean over the batch of what enters the layer; with gradient.
        second_T: per layer (d_l,), mean over the batch of its square; with gradient.
        mu: per layer (K + 1, d_l), the models' means.
        second: per layer (K + 1, d_l), the models' Var + mean^2.
        alpha: (K + 1,).
    """
    loss = mu_T[0].new_zeros(())
    for m_T, s_T, m, s in zip(mu_T, second_T, mu, second, strict=True):
        apart = ((m_T - m) ** 2).sum(dim=1) + ((s_T - s) ** 2).sum(dim=1)  # (K + 1,)
        loss = loss + alpha.to(apart) @ apart
    return loss


def mix_moments(
    means: Tensor, variances: Tensor, alpha: Tensor, form: Literal["moments", "linear"] = "moments"
) -> tuple[Tensor, Tensor]:
    """KD3A, eq. 18 for one layer: moments (K + 1, d) of the models, averaged -> mu (d,), var (d,).

    "linear" averages the variances themselves, as the official code does.
    """
    a, m, v = alpha.double().to(means.device), means.double(), variances.double()
    mu = a @ m
    var = a @ v
    if form == "moments":
        # sum alpha (Var + mu_k^2) - mu^2, written without cancellation: it is never negative.
        var = var + a @ (m - mu) ** 2
    return mu.to(means.dtype), var.to(variances.dtype)
