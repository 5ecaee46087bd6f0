"""Linear heads for a site's features, fitted on points of atoms, for FedDaDiL (its section 4).

N, K, C, d, n   sizes                 examples, atoms, classes, features, points of an atom
x               (N, d)                features of a site
z, y            (K, n, d), (K, n, C)  points and soft labels; points are scaled features
W, b            (K, C, d), (K, C)     heads, one per atom
alpha           (K,)                  a site's coordinates, in the simplex
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scaling(NamedTuple):
    """How a site turns its features into points: (x - shift) / scale."""

    shift: Tensor  # (d,)
    scale: Tensor  # (d,)

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.scale


def scaling(x: Tensor, form: Literal["scalar", "dimension", "none"]) -> Scaling:
    """Compute the scaling that gives a site's points a mean |z|^2 of 1, as at all sites.

    Args:
        x: (n, d) the site's features.
        form: `scalar`: one scale for all features; `dimension`: a shift and a scale for each, where
            a feature that never changes gets the scale of the average one; `none`: no scaling.
    """
    zero, one = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    if form == "none":
        return Scaling(zero, one)
    tiny = torch.finfo(x.dtype).tiny
    if form == "scalar":
        return Scaling(zero, one * x.square().sum(dim=1).mean().sqrt().clamp(min=tiny))
    var, mean = torch.var_mean(x, dim=0, correction=0)
    std = torch.where(var > 1e-6 * var.mean(), var, var.mean()).sqrt().clamp(min=tiny)
    return Scaling(mean, std * math.sqrt(x.shape[1]))


def fit_heads(
    z: Tensor,
    y: Tensor,
    decay: float,
    steps: int = 60,
    anchor: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Fit one linear head per set of points by cross entropy -> W (K, C, d), b (K, C).

    Args:
        z: (K, n, d).
        y: (K, n, C) soft labels.
        decay: L2 penalty of W minus the anchor's, in units of the points' mean squared length.
        steps: most iterations of L-BFGS.
        anchor: W (C, d) and b (C,) of the head at which all begin; by default zeros.
    """
    K, _, d = z.shape
    size = z.square().sum(dim=2).mean().sqrt().clamp(min=1e-12)
    first_W, first_b = anchor or (z.new_zeros(y.shape[2], d), z.new_zeros(y.shape[2]))
    first_W = first_W * size
    W = first_W.repeat(K, 1, 1).requires_grad_()
    b = first_b.repeat(K, 1).requires_grad_()
    x = z / size
    optimizer = torch.optim.LBFGS([W, b], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = torch.einsum("knd,kcd->knc", x, W) + b[:, None]
        total = -(y * F.log_softmax(logits, dim=2)).sum() / y.shape[1]
        total = total + decay / 2 * (W - first_W).square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return (W / size).detach(), b.detach()


def unscaled(W: Tensor, b: Tensor, scale: Scaling) -> tuple[Tensor, Tensor]:
    """Turn heads for points into heads for the encoder's features -> W (K, C, d), b (K, C)."""
    W = W / scale.scale
    return W, b - W @ scale.shift


def scaled(W: Tensor, b: Tensor, scale: Scaling) -> tuple[Tensor, Tensor]:
    """Turn a head (C, d), (C,) for the encoder's features into one for points; see `unscaled`."""
    return W * scale.scale, b + W @ scale.shift


def ensemble(x: Tensor, W: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    """Eq. 15: sum_k alpha_k softmax(W_k x + b_k) -> (N, C), rows sum to 1."""
    p = (torch.einsum("nd,kcd->knc", x, W) + b[:, None]).softmax(dim=2)
    return torch.einsum("k,knc->nc", alpha, p)
