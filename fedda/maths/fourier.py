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
is best at this w. The gradient of that loss in w is -mu_S from a source, +mu_T from the target, and
w itself, which all sites have. So mean embeddings are discriminator gradients, and the best w is
minus their sum.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedda.wire import Role

PAIRED = 512  # features that the median distance looks at: 130,816 pairs


def frequencies(
    d: int, M: int, scale: float, multiples: Sequence[float], draws: torch.Generator
) -> Tensor:
    """Rahimi and Recht: W ~ N(0, 1 / sigma_b^2), the bandwidths in turn -> W (M, d).

    If M is not a multiple of B, the last bandwidths have one frequency less and count less in k.
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
    """The best w from g, the sum of both sides' half gradients -> w = mu_S - mu_T (2M,).

    A mean embedding has a length of 1 at most, so w has one of 2, and is scaled to that if it came
    longer: from a server that made it, or with noise.
    """
    return -g * (2 / g.norm().clamp(min=2))


def mapping_loss(z: Tensor, W: Tensor, w: Tensor, role: Role) -> Tensor:
    """A function of this side's encoder with the gradient of MMD^2 = |mu_S - mu_T|^2 -> scalar.

    w also depends on this side's embedding, but is held fixed here, hence the 2: d|w|^2 = 2 w dw.
    With K sources each has K times that gradient, and so moves as if it were alone with the target,
    as in f-DANN.
    """
    value = 2 * mean_embedding(z, W) @ w.detach().to(z)
    return value if role == "source" else -value


def median_distance(z: Tensor) -> float:
    """Median heuristic on one site's features: median of |z_i - z_j|, i < j -> float.

    The usual median is over pairs of both domains, but no site has both. The median of one site is
    a single number, so that no feature leaves. It lacks the pairs across domains, and is smaller
    than the usual one if the domains are far apart; the larger `multiples` make up for that.
    """
    return float(torch.pdist(z.detach()[:PAIRED].float()).median())
