"""Optimal transport between sets of labelled points, and the barycenters of such sets.

Fernandes Montesuma et al., https://arxiv.org/abs/2309.07670 (DaDiL, "[5]" in FedDaDiL), sections 2
and 3; numbered equations are FedDaDiL's. All points of a set weigh the same.

    n, m, d, C   sizes      points, points of the other set, features, classes
    K            size       atoms
    z, y         (n, d), (n, C)  points and their soft labels; (K, n, ·) for atoms
    cost         (n, m)     what it takes to move a point onto another one (eq. 6)
    beta         float      what a difference of labels counts in it
    plan         (n,) int   point i goes to plan[i]: the optimum between as many points is a
                            permutation; else (n, m), rows sum to 1: pi times n
    alpha        (K,)       coordinates in the simplex
"""

from typing import NamedTuple

import numpy as np
import ot
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

MOST_PIVOTS = 10**7  # of POT's network simplex
MOST_SCALINGS = 200  # of Sinkhorn's algorithm
MOST_PAIRS = 3 * 10**7  # inner products that a barycenter keeps, 4 bytes each for z and for y
OFF = 1e-5  # it may end when the plan's weights are off by this, as a vector


class Barycenter(NamedTuple):
    """The support of B(alpha; atoms), and how the atoms were brought onto it."""

    z: Tensor  # (m, d)
    y: Tensor  # (m, C)
    plans: Tensor  # (K, m), or (K, m, n) where m is not n or plans are entropic
    solved: int  # transport problems it took


class Gradients(NamedTuple):
    """Of a reconstruction's loss, with all plans held fixed."""

    loss: float
    features: float  # the part of the loss that is not labels'
    z: Tensor  # (K, n, d)
    y: Tensor  # (K, n, C)
    alpha: Tensor  # (K,)


def feature_cost(x: Tensor, z: Tensor) -> Tensor:
    """|x_i - z_j|^2 -> (n, m)."""
    cost = torch.addmm((z * z).sum(dim=1)[None, :], x, z.T, alpha=-2)
    return cost.add_((x * x).sum(dim=1)[:, None]).clamp_(min=0)


def labelled_cost(features: Tensor, x_y: Tensor, z_y: Tensor) -> tuple[Tensor, float]:
    """Eq. 6: |x_i - z_j|^2 + beta |y_i - y_j|^2 -> (n, m), and beta.

    Of the cost of features (n, m) beta is the largest: no saving on features makes up for two
    labels that differ altogether.
    """
    beta = float(features.max())
    return torch.add(features, feature_cost(x_y, z_y), alpha=beta), beta


def solve(cost: Tensor, entropy: float = 0.0) -> Tensor:
    """Eq. 2 between points of equal weight -> plan.

    Between as many points some optimal plan is a permutation, so the assignment problem has the
    same optimum, and its solver is done in half of the time or less. Otherwise it is POT's network
    simplex. With `entropy` it is Sinkhorn's algorithm, regularised by so many times the mean cost.
    """
    n, m = cost.shape
    if entropy:
        found = ot.sinkhorn(
            *(np.full(n, 1 / n), np.full(m, 1 / m), cost.double().cpu().numpy()),
            reg=entropy * max(float(cost.mean()), 1e-12),
            method="sinkhorn_log",
            numItermax=MOST_SCALINGS,
            stopThr=OFF,
            warn=False,
        )
    elif n == m:
        return torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(cost.device)
    else:
        found = ot.emd([], [], cost.double().cpu().numpy(), numItermax=MOST_PIVOTS)
    plan = torch.from_numpy(np.asarray(found)).to(cost)
    return plan / plan.sum(dim=1, keepdim=True)


def move(plan: Tensor, x: Tensor) -> Tensor:
    """Eq. 3, the barycentric projection: where each point goes, n pi x -> (n, d)."""
    return x[plan] if plan.dim() == 1 else plan @ x


def moved_cost(plan: Tensor, cost: Tensor) -> float:
    """Eq. 4: what the plan costs, sum_ij pi_ij C_ij -> float."""
    if plan.dim() == 1:
        return float(cost.gather(1, plan[:, None]).mean(dtype=torch.float64))
    return float((plan * cost).sum(dtype=torch.float64)) / len(plan)


def barycenter(
    z: Tensor,
    y: Tensor,
    alpha: Tensor,
    start: tuple[Tensor, Tensor] | None = None,
    most: int = 10,
    entropy: float = 0.0,
) -> Barycenter:
    """Eq. 5 by the fixed point of eq. 14, B = sum_k alpha_k n pi_k P_k -> Barycenter.

    It ends where no plan changes any more, or after `most` rounds of plans. The features are
    looked at once: a support is a mean of moved atoms, so all that later rounds need of it is in
    the atoms' inner products. Those of many or large atoms would not fit into memory, and are
    made anew for each plan.

    Args:
        z: (K, n, d) the atoms' points.
        y: (K, n, C) their labels.
        alpha: (K,) the coordinates.
        start: the first support (m, d) and its labels (m, C); by default the atoms' points
            averaged index by index, where atoms that were trained together are nearly aligned.
        most: so many plans are made for each atom at most.
        entropy: of the plans, relative to the mean cost; 0: exact.
    """
    K, n, _ = z.shape
    inner = (_inner(z), _inner(y)) if K * K * n * n <= MOST_PAIRS else None
    square_z, square_y = (z * z).sum(dim=2), (y * y).sum(dim=2)  # (K, n)
    beta = _largest_cost(z, square_z, inner[0] if inner else None)
    fixed = square_z + beta * square_y

    plans = None if start else [torch.arange(n, device=z.device)] * K
    solved = 0
    for _ in range(most):
        support = start if plans is None else None
        if plans is not None and inner is None:
            support = _mean(plans, z, alpha), _mean(plans, y, alpha)
        found = []
        for k in range(K):
            if support is not None:
                cross_z, cross_y = (s @ a[k].T for s, a in zip(support, (z, y), strict=True))
            else:
                assert plans is not None and inner is not None
                cross_z, cross_y = (_crossed(plans, of[:, k], alpha) for of in inner)
            # What depends on the support's point alone is the same along a row: no plan heeds it.
            cost = torch.add(cross_z, cross_y, alpha=beta).mul_(-2).add_(fixed[k])
            if entropy:  # but its regularisation is relative to a cost that begins at 0
                cost -= cost.amin(dim=1, keepdim=True)
            found.append(solve(cost, entropy))
        solved += K
        same = plans is not None and all(map(_same, plans, found))
        plans = found
        if same:
            break
    assert plans is not None
    return Barycenter(_mean(plans, z, alpha), _mean(plans, y, alpha), torch.stack(plans), solved)


def reconstruction(
    z: Tensor,
    y: Tensor,
    alpha: Tensor,
    x: Tensor,
    labels: Tensor | None,
    most: int = 10,
    entropy: float = 0.0,
) -> tuple[Gradients, Barycenter, float]:
    """Eq. 11: T(Q, B(alpha; atoms)) and its gradients -> Gradients, Barycenter, beta.

    As in DaDiL plans, and beta, are held fixed. Then B is linear in alpha and in the atoms, and
    the loss is the mean of |b_i - T(x)_i|^2 and a constant, so all gradients follow from one
    residual; no graph is kept.

    Args:
        z: (K, n, d) the atoms' points.
        y: (K, n, C) their labels.
        alpha: (K,) the coordinates.
        x: (m, d) the site's points.
        labels: (m, C) their labels, or None at the target: then the cost is of features alone.
        most: rounds of the barycenter.
        entropy: of all plans.
    """
    b = barycenter(z, y, alpha, most=most, entropy=entropy)
    features = feature_cost(b.z, x)
    cost, beta = (features, 0.0) if labels is None else labelled_cost(features, b.y, labels)
    plan = solve(cost, entropy)
    scale = 2 / len(b.z)
    r_z = scale * (b.z - move(plan, x))
    r_y = torch.zeros_like(b.y) if labels is None else scale * beta * (b.y - move(plan, labels))
    g_z, g_y, g_alpha = torch.empty_like(z), torch.empty_like(y), torch.empty_like(alpha)
    for k, own in enumerate(b.plans):
        g_z[k], g_y[k] = _back(own, alpha[k] * r_z), _back(own, alpha[k] * r_y)
        g_alpha[k] = (r_z * move(own, z[k])).sum() + (r_y * move(own, y[k])).sum()
    loss, part = moved_cost(plan, cost), moved_cost(plan, features)
    return Gradients(loss, part, g_z, g_y, g_alpha), b, beta


def project_simplex(v: Tensor) -> Tensor:
    """The nearest point of the simplex (Duchi et al., ICML 2008) -> like v, sums to 1."""
    u = v.double().sort(descending=True).values
    excess = u.cumsum(dim=0) - 1
    rank = torch.arange(1, len(u) + 1, device=v.device)
    last = int((u * rank > excess).nonzero()[-1])
    w = (v.double() - excess[last] / (last + 1)).clamp(min=0)
    return (w / w.sum()).to(v.dtype)


def _inner(x: Tensor) -> Tensor:
    """Every pair of atoms' inner products, each pair once -> (K, K, n, n)."""
    K, n, _ = x.shape
    out = x.new_empty(K, K, n, n)
    for k in range(K):
        for j in range(k, K):
            torch.mm(x[k], x[j].T, out=out[k, j])
            if j > k:
                out[j, k] = out[k, j].T
    return out


def _largest_cost(z: Tensor, square: Tensor, inner: Tensor | None) -> float:
    """The largest |z_i - z_j|^2 between points of any two atoms."""
    most = 0.0
    for k in range(len(z)):
        for j in range(k, len(z)):
            both = z[k] @ z[j].T if inner is None else inner[k, j]
            apart = torch.add(square[k][:, None], both, alpha=-2).amax(dim=0)
            most = max(most, float((apart + square[j]).amax()))
    return most


def _crossed(plans: list[Tensor], inner: Tensor, alpha: Tensor) -> Tensor:
    """Inner products of sum_j alpha_j n pi_j P_j with an atom's points -> (m, n)."""
    total = inner.new_zeros(len(plans[0]), inner.shape[2])
    for weight, plan, own in zip(alpha.tolist(), plans, inner, strict=True):
        if weight > 0:
            total.add_(move(plan, own), alpha=weight)
    return total


def _mean(plans: list[Tensor], x: Tensor, alpha: Tensor) -> Tensor:
    """Eq. 14 for points or labels -> (m, ·)."""
    return torch.stack([a * move(p, k) for a, p, k in zip(alpha, plans, x, strict=True)]).sum(dim=0)


def _back(plan: Tensor, r: Tensor) -> Tensor:
    """The transpose of `move` -> (n, ·)."""
    if plan.dim() == 2:
        return plan.T @ r
    out = torch.empty_like(r)
    out[plan] = r
    return out


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) if a.dim() == 1 else bool((a - b).abs().max() < 1e-6)
