"""Estimates of how frequent a target's classes are, for shares.py: none of them reads its labels.

    EM     Saerens, Latinne and Decaestecker, Neural Computation 2002, section 2.2
    BBSE   Lipton, Wang and Smola, ICML 2018, https://arxiv.org/abs/1802.03916
    RLLS   Azizzadenesheli et al., ICLR 2019, https://arxiv.org/abs/1903.09734
    BCTS   Alexandari, Kundaje and Shrikumar, ICML 2020, https://arxiv.org/abs/1901.06852

    N, C    sizes   images, classes
    p       (N, C)  class probabilities of images; log_p, their logarithms
    prior   (C,)    shares of the classes where the model was trained
    q       (C,)    shares of the classes at the target; they sum to 1
    J       (C, C)  joint confusion of the sources: share of the images predicted i and of class j
    mu      (C,)    shares of the target's predictions
    w       (C,)    q over the sources' shares; theta is w - 1
    t, b    float, (C,)  scale and bias of log p

All suppose that a class looks alike at all sites, and that only its share differs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

STEPS, CLOSE = 1000, 1e-9  # most steps of EM, and the change of q from which on it is done
DECAY = 1e-3  # of b, which its likelihood alone leaves free by a constant
RIDGE = 1e-3  # of theta
LEAST = 1e-12  # a smaller share counts as this one


def corrected(p: Tensor, q: Tensor, prior: Tensor | None = None) -> Tensor:
    """Saerens et al., eq. 4: predictions for other shares, p_ic q_c / prior_c -> (..., N, C).

    Without a prior the classes were even where the model was trained.
    """
    joint = p * (q if prior is None else q / prior.clamp_min(LEAST)).to(p)
    return joint / joint.sum(dim=-1, keepdim=True).clamp_min(LEAST)


def em(p: Tensor, prior: Tensor, steps: int = STEPS) -> Tensor:
    """Saerens et al., eq. 9: q_c <- mean_i of p_ic q_c / prior_c, normalised -> q (C,).

    The first step gives the mean of p.
    """
    q = prior.double()
    for _ in range(steps):
        before, q = q, corrected(p.double(), q, prior.double()).mean(dim=0)
        if float((q - before).abs().sum()) < CLOSE:
            break
    return q


def confusion(p: Tensor, y: Tensor) -> Tensor:
    """J of predictions and labels (N,) -> (C, C), sums to 1."""
    C = p.shape[1]
    cells = p.argmax(dim=1) * C + y
    return torch.bincount(cells, minlength=C * C).reshape(C, C).double() / len(y)


def bbse(J: Tensor, mu: Tensor, ridge: float = 0.0) -> Tensor:
    """Lipton et al., J w = mu; with a ridge RLLS, least |J theta - (mu - J 1)|^2 + ridge |theta|^2.

    Returns:
        q (C,), w times the sources' shares, without what is negative, and normalised.
    """
    J, mu = J.double(), mu.double()
    missing = mu - J.sum(dim=1)
    if ridge:
        square = J.T @ J + ridge * torch.eye(len(mu), dtype=J.dtype)
        theta = torch.linalg.solve(square, J.T @ missing)
    else:  # a class that is never predicted leaves J without an inverse
        theta = torch.linalg.pinv(J) @ missing
    q = (1 + theta).clamp_min(0) * J.sum(dim=0)
    return q / q.sum()


def bcts(log_p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Alexandari et al., section 3.2: least cross entropy of t log p + b -> t, b (C,)."""
    scale = torch.zeros((), dtype=log_p.dtype, requires_grad=True)
    b = torch.zeros(log_p.shape[1], dtype=log_p.dtype, requires_grad=True)
    steps = torch.optim.LBFGS([scale, b], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        steps.zero_grad()
        total = F.cross_entropy(log_p * scale.exp() + b, y) + DECAY * b.square().sum()
        total.backward()
        return total

    steps.step(loss)
    return scale.exp().detach(), b.detach()


def distance(q: Tensor, true: Tensor) -> float:
    """Total variation, the part of the images that would have to change class -> [0, 1]."""
    return float((q - true).abs().sum()) / 2
