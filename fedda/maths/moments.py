"""Means and variances per channel, of values that come in batches.

x               (N, d, ...)  values of one batch, with d channels
n               int          values per channel
mean, variance  (d,)         over all batches
spread          (d,)         sum of squared distances from the mean, float64
"""

from typing import NamedTuple

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
