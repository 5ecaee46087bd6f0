"""DaDiL's step with POT: all costs computed anew, plans as matrices, gradients by autograd.

Fernandes Montesuma et al., DaDiL, algorithms 1 and 2; FedDaDiL, eqs. 2 to 6, 11 and 14.
"""

import numpy as np
import ot
import torch
from torch import Tensor


def cost(x: Tensor, x_y: Tensor, z: Tensor, z_y: Tensor, beta: float) -> Tensor:
    """Eq. 6, in the precision of the points -> (n, m)."""
    features = torch.from_numpy(ot.dist(x.numpy(), z.numpy()))
    return features + beta * torch.from_numpy(ot.dist(x_y.numpy(), z_y.numpy()))


def plan(cost: Tensor) -> Tensor:
    """Eq. 2 -> (n, m), sums to 1."""
    n, m = cost.shape
    weights = np.full(n, 1 / n), np.full(m, 1 / m)
    return torch.from_numpy(ot.emd(*weights, cost.double().numpy(), numItermax=10**7)).to(cost)


def label_weight(z: Tensor) -> float:
    """The largest squared distance between any two points of the atoms -> beta."""
    every = z.reshape(-1, z.shape[2]).numpy()
    return float(np.max(ot.dist(every, every)))


def barycenter(
    z: Tensor,
    y: Tensor,
    alpha: Tensor,
    start: tuple[Tensor, Tensor] | None = None,
    most: int = 10,
    beta: float | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Eq. 14 until the plans no longer change -> support (m, d), labels (m, C), K plans (m, n)."""
    beta = label_weight(z) if beta is None else beta
    if start is None:
        start = torch.einsum("k,knd->nd", alpha, z), torch.einsum("k,knc->nc", alpha, y)
    b_z, b_y = start
    plans: list[Tensor] = []
    for _ in range(most):
        latest = [plan(cost(b_z, b_y, z[k], y[k], beta)) for k in range(len(z))]
        m = len(b_z)
        b_z = torch.stack([alpha[k] * m * p @ z[k] for k, p in enumerate(latest)]).sum(dim=0)
        b_y = torch.stack([alpha[k] * m * p @ y[k] for k, p in enumerate(latest)]).sum(dim=0)
        if plans and all(torch.equal(a, b) for a, b in zip(plans, latest, strict=True)):
            break
        plans = latest
    return b_z, b_y, plans


def reconstruction(
    z: Tensor,
    y: Tensor,
    alpha: Tensor,
    x: Tensor,
    labels: Tensor | None,
    most: int = 10,
    beta: float | None = None,
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Eq. 11 and its gradients by autograd, with the plans held fixed -> loss, dz, dy, dalpha."""
    with torch.no_grad():
        plans = barycenter(z, y, alpha, most=most, beta=beta)[2]
    z, y, alpha = (t.clone().requires_grad_() for t in (z, y, alpha))
    n = len(plans[0])
    b_z = sum((alpha[k] * n * p @ z[k] for k, p in enumerate(plans)), torch.zeros(()))
    b_y = sum((alpha[k] * n * p @ y[k] for k, p in enumerate(plans)), torch.zeros(()))
    c = torch.cdist(b_z, x, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    if labels is not None:
        c_y = torch.cdist(b_y, labels, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        c = c + c.max().detach() * c_y
    loss = (plan(c.detach()) * c).sum()
    none = torch.zeros(())
    gradients = torch.autograd.grad(loss, (z, y, alpha), allow_unused=True)
    g_z, g_y, g_a = (none if g is None else g for g in gradients)
    return float(loss.detach()), g_z, g_y, g_a
