"""The local last step: a Gaussian for each class, tied to what models predict.

    x      (N, D)  a target's features, without labels
    z      (N, d)  the same, each column standardised, each row of unit length, in d components
    p      (N, C)  what models predict for them, the mean of several
    q      (N, C)  what is predicted then
    mu     (C, d)  mean of each class
    S      (d, d)  the covariance within a class, the same for all classes
    pi     (C,)    shares of the classes, each image counted to its likeliest class under p

q begins as p. A step takes the mean of each class and the one covariance, weighted by q, and then

    q_ic  proportional to  exp(-s/2 (z_i - mu_c)' S^-1 (z_i - mu_c) + w log p_ic + beta log pi_c)

It is expectation maximisation for linear discriminant analysis (Fraley and Raftery, JASA 2002,
model EEE), with bounds that make it safe: one covariance, so that no class can take in the others,
and p in each step, so that answers cannot drift from what was learnt with labels.

Shares cost points where the models merely overlook a class, and save many where a class is rare or
missing. So they count by the evidence for them, beta: the divergence of a model's mean prediction
from even shares, less what chance makes of N images, over FULL_EVIDENCE, and at most 1. But a shift
can make a model give too many images one class. So the same model with BatchNorm's statistics of
the target is asked, too: beta is at most HIDDEN times what that one gives, and multiplied by the
cosine of both's deviations from even shares: 1 where they see the same classes too often, and 0
where they see others. Unlike q the shares stay as they are, as shares that follow q feed on
themselves.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

Strength = Literal["careful", "strong"]
Shares = Literal["auto", "even", "estimated"]

# Chosen on the sets of examples/benchmarks/refine.py, before others were looked at; but that
# FULL_DOUBT is a part of ln C was settled with subsets of two others in sight.
COMPONENTS, IMAGES_EACH = 64, 4  # at most so many components, of so many images each
STEPS = 8
FULL_EVIDENCE = 0.1  # nats from which the estimated shares count in full
FULL_DOUBT = 0.174  # parts of ln C from which statistics that suppose even classes do not count
# So many times less evidence is left of uneven classes by statistics that suppose even ones, at
# most: on SURF's features a fifth, on digits and photographs half or more.
HIDDEN = 5
PRIOR = 0.3  # images that each class has more in the estimate
FEWEST = 40  # of fewer images there is nothing to learn: each is 2.5 points or more
LEAST_P = 1e-6  # a smaller probability counts as this one
EXACT = 1024  # up to so many rows or columns, components are computed to the last digit


class Weights(NamedTuple):
    """How much the Gaussians say, how much the models, and the ridge on the covariance."""

    s: float
    w: float
    ridge: float  # in multiples of the mean variance


WEIGHTS: dict[Strength, Weights] = {
    "careful": Weights(0.3, 1.0, 0.1),
    "strong": Weights(1.0, 2.0, 0.5),
}


@dataclass(frozen=True)
class Space:
    """How features become points z."""

    mean: Tensor  # (D,) of each column
    scale: Tensor  # (D,) what each column is divided by: its deviation, and a tenth of their mean
    centre: Tensor  # (D,) mean of the rows of unit length
    axes: Tensor  # (D, d) the first principal components of these rows

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """The space of features (N, D).

        Raises:
            ValueError: all rows are the same, so there is nothing to tell them apart by.
        """
        x = x.double()
        mean, spread = x.mean(dim=0), x.std(dim=0, correction=0)
        if not spread.max() > 0:
            raise ValueError("all images have the same features")
        scale = spread + 0.1 * spread.mean()
        rows = _unit((x - mean) / scale)
        centre = rows.mean(dim=0)
        d = max(1, min(COMPONENTS, len(x) // IMAGES_EACH, x.shape[1]))
        return cls(mean, scale, centre, _components(rows - centre, d))

    def __call__(self, x: Tensor) -> Tensor:
        """Points of features (N, D) -> (N, d)."""
        return (_unit((x - self.mean) / self.scale) - self.centre) @ self.axes


@dataclass(frozen=True)
class Gaussians:
    """What the step has found: a mean for each class, and one covariance."""

    means: Tensor  # (C, d)
    root: Tensor  # (d, d) with root root' = s S^-1
    offset: Tensor  # (C,) beta log pi
    w: float  # what log p counts

    def logits(self, z: Tensor, p: Tensor) -> Tensor:
        """Logits of points (N, d) with predictions (N, C), whose softmax is q -> (N, C)."""
        return logits(z, p.clamp_min(LEAST_P).log(), self.means, self.root, self.offset, self.w)


def logits(
    z: Tensor, log_p: Tensor, means: Tensor, root: Tensor, offset: Tensor, w: float
) -> Tensor:
    """-1/2 |root' (z_i - mu_c)|^2 + w log p_ic + offset_c -> (N, C)."""
    points, centres = z @ root, means @ root
    apart = points.square().sum(dim=1, keepdim=True) - 2 * points @ centres.T
    return w * log_p + offset - 0.5 * (apart + centres.square().sum(dim=1))


def evidence(p: Tensor, full: float = FULL_EVIDENCE) -> float:
    """How surely the classes of predictions (N, C) are not even, from 0 to 1: beta for one model.

    Args:
        p: the predictions.
        full: nats that are full evidence.
    """
    N, C = p.shape
    mean = p.double().mean(dim=0)
    divergence = float(torch.special.xlogy(mean, mean * C).sum()) - (C - 1) / (2 * N)
    return min(max(divergence / full, 0.0), 1.0)


def alike(p: Tensor, other: Tensor) -> float:
    """How far two models, (N, C) each, find the same classes too frequent, from 0 to 1: cosine."""
    one, two = (q.double().mean(dim=0) - 1 / q.shape[1] for q in (p, other))
    return max(float(torch.cosine_similarity(one, two, dim=0)), 0.0)


def shown(p: Tensor, own: Tensor, full: float = FULL_EVIDENCE) -> float:
    """How surely two models, (N, C) each, show together that classes are not even: beta.

    Of two classes the first one's evidence counts alone: a deviation is a sign there, and chance
    decides that of the second, which supposes even classes.

    Args:
        p: of a model.
        own: of the same with BatchNorm statistics of these images.
        full: nats that are full evidence.
    """
    if p.shape[1] == 2:
        return evidence(p, full)
    return min(evidence(p, full), HIDDEN * evidence(own, full)) * alike(p, own)


def offset(p: Tensor, shares: Shares = "auto", beta: float | None = None) -> Tensor:
    """The offset beta log pi of predictions (N, C), by default with their own beta -> (C,)."""
    count = torch.bincount(p.argmax(dim=1), minlength=p.shape[1]).to(p.dtype) + PRIOR
    auto = evidence(p) if beta is None else beta
    return (auto if shares == "auto" else float(shares == "estimated")) * (
        count / count.sum()
    ).log()


def refine(
    p: Tensor,
    z: Tensor,
    strength: Strength = "careful",
    shares: Shares = "auto",
    beta: float | None = None,
) -> tuple[Tensor, Gaussians]:
    """The local last step, for predictions (N, C) and points (N, d) -> q (N, C), and its Gaussians.

    Args:
        p: what models predict.
        z: the points, as `Space` makes them.
        strength: how much the Gaussians may say against p.
        shares: whether the estimated shares of the classes count: by the evidence, never, in full.
        beta: the evidence for uneven shares; None: that of p.
    """
    s, w, ridge = WEIGHTS[strength]
    p, z = p.double(), z.double()
    N, d = z.shape
    ridge += d / N  # of few images a covariance says little
    of_shares = offset(p, shares, beta)
    q, total, found = p, z.T @ z, None
    for _ in range(STEPS):
        n = q.sum(dim=0)
        sums = q.T @ z
        means = sums / (n + 1e-3)[:, None]  # a class that nobody is in has its mean at the centre
        # sum_ic q_ic (z_i - mu_c) (z_i - mu_c)', without a loop over classes
        within = (total - means.T @ sums - sums.T @ means + (means.T * n) @ means) / N
        within += ridge * within.trace() / d * torch.eye(d, dtype=z.dtype)
        root = math.sqrt(s) * torch.linalg.cholesky(torch.linalg.inv(within))
        found = Gaussians(means, root, of_shares, w)
        q = found.logits(z, p).softmax(dim=1)
    assert found is not None
    return q, found


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True).clamp_min(1e-9)


def _components(rows: Tensor, d: int) -> Tensor:
    """The first d right singular vectors of centred rows (N, D) -> (D, d)."""
    if min(rows.shape) <= EXACT:
        return torch.linalg.svd(rows, full_matrices=False).Vh[:d].T
    with torch.random.fork_rng(devices=[]):  # Halko et al., 2011, by random projections
        torch.default_generator.manual_seed(0)
        return torch.svd_lowrank(rows, q=d + 16, niter=6)[2][:, :d]
