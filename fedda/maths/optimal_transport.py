"""Optimal transport between sets of labelled points, and the barycenters of such sets.

Fernandes Montesuma et al., https://arxiv.org/abs/2307.14953 (DaDiL, "[5]" in FedDaDiL), sections 2
and 3; equation numbers are those of FedDaDiL. All points of a set have equal weight.

    n, m, d, C   sizes      points, points of the other set, features, classes
    K            size       atoms
    z, y         (n, d), (n, C)  points and their soft labels; (K, n, ·) for atoms
    cost         (n, m)     cost of moving each point onto each point of the other set (eq. 6)
    beta         float      weight of a difference of labels in the cost
    plan         (n,) int   point i goes to plan[i]: if n = m, some optimum is a permutation;
                            else (n, m), pi times n, whose rows sum to 1
    alpha        (K,)       coordinates in the simplex
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedda.errors import NotFiniteError

MOST_PIVOTS = 10**7  # steps of POT's network simplex
MOST_SCALINGS = 200  # steps of Sinkhorn's algorithm
MOST_PAIRS = 3 * 10**7  # inner products that a barycenter keeps, 4 bytes each for z and for y
FEW_ATOMS = 4  # it keeps those of so few atoms, and those of more with so many features an atom:
FEATURES_PER_ATOM = 64
PIECE = 2**20  # inner products of which the largest cost is found at a time
TOLERANCE = 1e-5  # Sinkhorn ends once the norm of the error of the plan's weights is below this


class Barycenter(NamedTuple):
    """The support of B(alpha; atoms), and the plans that move the atoms onto it."""

    z: Tensor  # (m, d)
    y: Tensor  # (m, C)
    plans: Tensor  # (K, m), or (K, m, n) if m is not n or plans are entropic
    solved: int  # how many transport problems were solved


class Gradients(NamedTuple):
    """The gradients of a reconstruction's loss, with all plans held fixed."""

    loss: float
    features: float  # the part of the loss that the features make
    z: Tensor  # (K, n, d)
    y: Tensor  # (K, n, C)
    alpha: Tensor  # (K,)


def feature_cost(x: Tensor, z: Tensor) -> Tensor:
    """|x_i - z_j|^2 -> (n, m)."""
    cost = torch.addmm((z * z).sum(dim=1)[None, :], x, z.T, alpha=-2)
    return cost.add_((x * x).sum(dim=1)[:, None]).clamp_(min=0)


def labelled_cost(features: Tensor, x_y: Tensor, z_y: Tensor) -> tuple[Tensor, float]:
    """Eq. 6: |x_i - z_j|^2 + beta |y_i - y_j|^2 -> (n, m), and beta.

    beta is the largest cost of features (n, m): no saving on features makes up for two labels that
    differ completely.
    """
    beta = float(features.max())
    return torch.add(features, feature_cost(x_y, z_y), alpha=beta), beta


def solve(cost: Tensor, entropy: float = 0.0) -> Tensor:
    """Eq. 2 between points of equal weight -> plan.

    If n = m, some optimal plan is a permutation, so the assignment problem has the same optimum;
    its solver takes half of the time or less. Otherwise POT's network simplex solves it. With
    `entropy` Sinkhorn's algorithm does, regularised by `entropy` times the mean cost.

    Raises:
        NotFiniteError: a cost is not finite.
    """
    n, m = cost.shape
    if not cost.isfinite().all():
        raise NotFiniteError(
            "A cost of optimal transport is not finite; lower the learning rates of the dictionary."
        )
    if n == m and not entropy:
        from scipy.optimize import linear_sum_assignment

        return torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(cost.device)
    import ot  # takes longer than torch, and every program knows this method: import only on use

    if entropy:
        pi = ot.sinkhorn(
            *(np.full(n, 1 / n), np.full(m, 1 / m), cost.double().cpu().numpy()),
            reg=entropy * max(float(cost.mean()), 1e-12),
            method="sinkhorn_log",
            numItermax=MOST_SCALINGS,
            stopThr=TOLERANCE,
            warn=False,
        )
    else:
        pi = ot.emd([], [], cost.double().cpu().numpy(), numItermax=MOST_PIVOTS)
    plan = torch.from_numpy(np.asarray(pi)).to(cost)
    return plan / plan.sum(dim=1, keepdim=True)


def move(plan: Tensor, x: Tensor) -> Tensor:
    """Eq. 3, the barycentric projection: where each point goes, n pi x -> (n, d)."""
    return x[plan] if plan.dim() == 1 else plan @ x


def moved_cost(plan: Tensor, cost: Tensor) -> float:
    """Eq. 4: the cost of a plan, sum_ij pi_ij C_ij -> float."""
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

    It ends when no plan changes any more, or after `most` rounds. Every support is a mean of moved
    atoms, so with few atoms their inner products are computed once, for the costs of all rounds. A
    cost then takes K sums over pairs of points. With many atoms, or where so many pairs do not fit
    into memory, it takes less time to compute each cost from the support.

    Args:
        z: (K, n, d) the atoms' points.
        y: (K, n, C) their labels.
        alpha: (K,) the coordinates.
        start: the first support (m, d) and its labels (m, C); by default the atoms' points
            averaged index by index, where atoms that were trained together are nearly aligned.
        most: greatest number of rounds, each with one plan per atom.
        entropy: of the plans, relative to the mean cost; 0: exact plans.
    """
    K, n, _ = z.shape
    sets = [(a, _inner(a) if keeps_inner(K, n, a.shape[2]) else None) for a in (z, y)]
    square_z, square_y = (z * z).sum(dim=2), (y * y).sum(dim=2)  # (K, n)
    beta = _largest_cost(z, square_z, sets[0][1])
    fixed = square_z + beta * square_y

    plans = None if start else [torch.arange(n, device=z.device)] * K
    solved = 0
    for _ in range(most):
        crossing = [
            _crossing(a, inner, alpha, plans, start[i] if plans is None and start else None)
            for i, (a, inner) in enumerate(sets)
        ]
        updated = []
        for k in range(K):
            cross_z, cross_y = (crossed(k) for crossed in crossing)
            # Terms of the support's point alone are constant in a row, and change no optimal plan.
            cost = torch.add(cross_z, cross_y, alpha=beta).mul_(-2).add_(fixed[k])
            if entropy:  # but regularisation is relative to the mean of costs that begin at 0
                cost -= cost.amin(dim=1, keepdim=True)
            updated.append(solve(cost, entropy))
        solved += K
        same = plans is not None and all(map(_same, plans, updated))
        plans = updated
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

    As in DaDiL, plans and beta are held fixed. Then B is linear in alpha and in the atoms, and the
    loss is the mean of |b_i - T(x)_i|^2 plus a constant. So all gradients follow from one residual,
    without autograd.

    Args:
        z: (K, n, d) the atoms' points.
        y: (K, n, C) their labels.
        alpha: (K,) the coordinates.
        x: (m, d) the site's points.
        labels: (m, C) their labels, or None at the target, where only features enter the cost.
        most: greatest number of rounds of the barycenter.
        entropy: of all plans, as in `barycenter`.
    """
    b = barycenter(z, y, alpha, most=most, entropy=entropy)
    features = feature_cost(b.z, x)
    cost, beta = (features, 0.0) if labels is None else labelled_cost(features, b.y, labels)
    plan = solve(cost, entropy)
    scale = 2 / len(b.z)
    r_z = scale * (b.z - move(plan, x))
    r_y = torch.zeros_like(b.y) if labels is None else scale * beta * (b.y - move(plan, labels))
    g_z, g_y, g_alpha = torch.empty_like(z), torch.empty_like(y), torch.empty_like(alpha)
    for k, plan_k in enumerate(b.plans):
        g_z[k], g_y[k] = _back(plan_k, alpha[k] * r_z), _back(plan_k, alpha[k] * r_y)
        g_alpha[k] = (r_z * move(plan_k, z[k])).sum() + (r_y * move(plan_k, y[k])).sum()
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
    """The inner products of every pair of atoms, each pair computed once -> (K, K, n, n)."""
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
    K, n, d = z.shape
    if inner is None:
        points, squares = z.reshape(K * n, d), square.reshape(K * n)
        most = [z.new_zeros(())]
        for start in range(0, K * n, n):
            own = points[start : start + n]
            for part, of in zip(
                points[start:].split(max(1, PIECE // n)),
                squares[start:].split(max(1, PIECE // n)),
                strict=True,
            ):
                partial = torch.addmm(of, own, part.T, alpha=-2).amax(dim=1)
                most.append((partial + squares[start : start + n]).amax())
        return float(torch.stack(most).amax())
    largest = 0.0
    for k in range(K):
        for j in range(k, K):
            partial = torch.add(square[k][:, None], inner[k, j], alpha=-2).amax(dim=0)
            largest = max(largest, float((partial + square[j]).amax()))
    return largest


def keeps_inner(K: int, n: int, d: int) -> bool:
    """Whether to keep all inner products of K atoms of n points (n, d), for later rounds.

    Then a cost takes K sums of n^2 numbers, and otherwise a product of n^2 d: with few atoms or
    many features the sums are faster. They must fit into memory.
    """
    return K * K * n * n <= MOST_PAIRS and (K <= FEW_ATOMS or d >= FEATURES_PER_ATOM * K)


def _crossing(
    x: Tensor,
    inner: Tensor | None,
    alpha: Tensor,
    plans: list[Tensor] | None,
    support: Tensor | None,
) -> Callable[[int], Tensor]:
    """Make a function of k: the inner products of the support with an atom's points -> (m, n)."""
    if support is None and inner is None:
        assert plans is not None
        support = _mean(plans, x, alpha)
    if support is not None:
        return lambda k: support @ x[k].T
    assert plans is not None and inner is not None
    return lambda k: _crossed(plans, inner[:, k], alpha)


def _crossed(plans: list[Tensor], inner: Tensor, alpha: Tensor) -> Tensor:
    """Inner products of sum_j alpha_j n pi_j P_j with an atom's points -> (m, n)."""
    total = inner.new_zeros(len(plans[0]), inner.shape[2])
    for weight, plan, products in zip(alpha.tolist(), plans, inner, strict=True):
        if weight > 0:
            total.add_(move(plan, products), alpha=weight)
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
