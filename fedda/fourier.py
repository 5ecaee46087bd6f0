"""Multi-kernel MMD by random Fourier features: a distance whose witness is linear.

Gretton et al., JMLR 2012, for MMD; Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791,
for many kernels at once; Rahimi and Recht, NIPS 2007, for the features.

    z          (N, d)   features of a batch, z = E(x)
    sigma      (B,)     bandwidths, `multiples` of one `scale`
    k          float    k(x, y) = 1/B sum_b exp(-|x - y|^2 / (2 sigma_b^2))
    W          (M, d)   random frequencies, M / B of each bandwidth
    phi        (N, 2M)  [cos(z W'), sin(z W')] / sqrt(M), so that phi(x) phi(y)' is close to k(x, y)
    mu         (2M,)    mean embedding E phi(z)
    w          (2M,)    witness, mu_S - mu_T; MMD^2 = |w|^2

A linear discriminator DI(z) = w phi(z)' with the critic's loss -E DI(z_S) + E DI(z_T) + |w|^2 / 2
is best at this w. The loss has the gradient -mu_S from a source, +mu_T from the target, and w,
which all have: mean embeddings are discriminator gradients, and minus their sum is the best w.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedda.wire import Role

PAIRED = 512  # features whose distances the median is over: 130,816 pairs


def frequencies(
    d: int, M: int, scale: float, multiples: Sequence[float], draws: torch.Generator
) -> Tensor:
    """Rahimi and Recht: W ~ N(0, 1 / sigma_b^2), the bandwidths in turn -> W (M, d).

    Where M is no multiple of B the last bandwidths have one frequency less, and count less in k.
    """
    sigma = scale * torch.tensor(multiples, dtype=torch.float32)
    W = torch.randn(M, d, generator=draws)
    return W / sigma[torch.arange(M) % len(sigma)][:, None]


def embed(z: Tensor, W: Tensor) -> Tensor:
    """Random Fourier features of z -> phi (N, 2M), rows of length 1."""
    angle = z @ W.T.to(z)  # (N, M)
    return torch.cat([angle.cos(), angle.sin()], dim=1) / math.sqrt(len(W))


def mean_embedding(z: Tensor, W: Tensor) -> Tensor:
    """E phi(z) -> mu (2M,)."""
    return embed(z, W).mean(dim=0)


def half_gradient(z: Tensor, W: Tensor, role: Role) -> Tensor:
    """Gradient in w of this side's -E DI(z_S) or E DI(z_T) -> -mu_S or mu_T (2M,)."""
    mu = mean_embedding(z.detach(), W)
    return -mu if role == "source" else mu


def witness(g: Tensor) -> Tensor:
    """The best w, from the sum of both sides' half gradients -> w = mu_S - mu_T (2M,)."""
    return -g


def mapping_loss(z: Tensor, W: Tensor, w: Tensor, role: Role) -> Tensor:
    """A function of this side's encoder with the gradient of MMD^2 = |mu_S - mu_T|^2 -> scalar.

    Its own embedding is in w too, but w is held fixed here, hence the 2: d|w|^2 = 2 w dw. Of K
    sources each has K times that gradient: it moves like one alone with the target, as in f-DANN.
    """
    value = 2 * mean_embedding(z, W) @ w.detach().to(z)
    return value if role == "source" else -value


def median_distance(z: Tensor) -> float:
    """Median heuristic on one site's features: median of |z_i - z_j|, i < j -> float.

    The usual median is over pairs of both domains, which nobody here has. That of one site is a
    single number, and no feature leaves: pairs across domains are left out, so it is smaller where
    domains are far apart; the larger `multiples` are there for those.
    """
    return float(torch.pdist(z.detach()[:PAIRED].float()).median())
