r"""OCS, optimal collaborator selection: from which domain should a target adapt?

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, section 3.1 and appendix D.1 (equations as in
the manuscript of 2020). Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217, theorem 1.

    z         (d,)    features of an example. Candidate c and target use c's encoder, so the
                      hypothesis that eq. 5 speaks of is c's classifier h over z
    W         (C, d)  weights of the classifier's linear layer: h(z) = softmax(W z + b)
    eps       float   error of h on a domain: mean of |h(z) - e_y|_1 / 2 = 1 - h(z)_y, in [0, 1]
    theta     float   Lipschitz constant of h: |h(z) - h(z')|_1 / 2 <= theta |z - z'|
    theta_CE  float   Lipschitz constant of the cross entropy of logits
    W1        float   Wasserstein distance between both domains' features
    v         (n,)    a critic's values on one side's features

The error is that of a hypothesis with values in [0, 1], as in the paper: half the L1 distance
between the probabilities and the label's.

theta: the Jacobian of softmax is J = diag(p) - p p'. For a change u of the logits, |J u|_1 / 2 is
half the mean absolute deviation of u under p. That is at most half its standard deviation, which is
at most half its range (Popoviciu), and the range is at most sqrt(2) |u|. So theta is at most
sqrt(2) / 4 times the spectral norm of W, and p = (1/2, 1/2) with u = (1, -1) attains it. Adding the
same to all logits changes no probability, so the mean row of W may be subtracted first.

theta_CE: eq. 51 takes it of the cross entropy of logits. Its gradient is p - e_y, whose norm is at
most sqrt(2): so it is the same for all candidates, and scales the bound without changing the
choice. The last step of eq. 53 bounds the candidate's cross entropy by theta_CE times its L1 error,
which holds for errors of logits only; labels have no logits. So with errors of probabilities the
whole bound is a score. eps + 2 theta W1 without theta_CE is a bound indeed, on the target's eps, if
the true labels are a theta-Lipschitz function of z as well (Shen et al.).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedda.maths.spectral import spectral_norm

Selector = Literal["ocs", "source", "random", "pad", "all"]

THETA_CE = math.sqrt(2)  # the largest |p - e_y|


@dataclass(frozen=True)
class Prospect:
    """A domain that a target may adapt from, with what was measured of it."""

    name: str  # the domain's
    labelled: bool  # whether it has labels
    eps: float  # the error of its model on its own data; carried forward if it has no labels
    theta: float  # Lipschitz constant of its classifier
    distance: float  # W1 to the target, or with the selector `pad` the proxy A-distance
    error: float  # of the distance, as two halves of the data give it

    @property
    def bound(self) -> float:
        """Eq. 5, if the distance is W1 -> float."""
        return bound(self.eps, self.theta, self.distance)


def theta_of(W: Tensor) -> float:
    """sqrt(2) / 4 |W - mean row of W| -> theta."""
    return math.sqrt(2) / 4 * float(spectral_norm(W - W.mean(dim=0)))


def l1_error(p: Tensor, y: Tensor) -> float:
    """Mean of 1 - p_y, over probabilities (N, C) and labels (N,) -> eps."""
    return float(1 - p.gather(1, y[:, None]).double().mean())


def halves(v: Tensor, draws: torch.Generator) -> tuple[float, float]:
    """The means of two random halves of a side's values (n,), n >= 2 -> two floats."""
    order = torch.randperm(len(v), generator=draws)
    first, second = v.double().cpu()[order].tensor_split(2)
    return float(first.mean()), float(second.mean())


def wasserstein(candidate: tuple[float, float], target: tuple[float, float]) -> tuple[float, float]:
    """Eq. 17: mean v of the candidate minus mean v of the target -> W1, its error.

    A critic that found no difference gives a W1 around 0, also below it; no distance is below 0.

    Args:
        candidate: the means of two halves of the candidate's data.
        target: the same of the target's data.
    """
    first, second = (c - t for c, t in zip(candidate, target, strict=True))
    return max(0.0, (first + second) / 2), abs(first - second) / 2


def proxy_a_distance(
    candidate: tuple[float, float], target: tuple[float, float]
) -> tuple[float, float]:
    """Ben-David et al., NeurIPS 2007: 2 (1 - 2 err) of a domain discriminator -> PAD, its error.

    Args:
        candidate: the shares of two halves of the candidate's data that it takes for the target's.
        target: the shares of the target's data that it takes for the candidate's.
    """
    first, second = (2 * (1 - c - t) for c, t in zip(candidate, target, strict=True))
    return max(0.0, (first + second) / 2), abs(first - second) / 2


def bound(eps: float, theta: float, W1: float) -> float:
    """Eq. 5: theta_CE (eps + 2 theta W1) -> float; the smaller, the better the candidate."""
    return THETA_CE * (eps + 2 * theta * W1)


def apart(p: Tensor, q: Tensor) -> float:
    """Mean of |p - q|_1 / 2, over two models' probabilities (N, C) of the same images -> [0, 1]."""
    return float((p - q).abs().double().sum(dim=1).mean() / 2)


def carried(
    eps: float, theta: float, W1: float, before: float = math.inf, moved: float = 0.0
) -> float:
    """Bound an adapted target's error, which has no labels to measure it -> eps in [0, 1].

    The paper needs it where an adapted target is a candidate, but does not say how to get it. Two
    bounds hold, and the smaller one is taken. The bound of Shen et al. that eq. 5 contains, eps_c +
    2 theta W1, after the adaptation; W1 is that between the candidate's features by its encoder and
    the target's by the adapted one. And the same before the adaptation, where it bounds the
    candidate's model at the target, and the adapted one's error is at most `moved` above that. Both
    say nothing once 2 theta W1 is above 1, which only small layers prevent (train.lipschitz).

    Args:
        eps: of the candidate from which the target has adapted.
        theta: of the classifier, which is the candidate's.
        W1: after the adaptation.
        before: W1 before it; unknown by default.
        moved: how far `apart` the candidate's and the adapted model are on the target's images.
    """
    return min(1.0, eps + 2 * theta * W1, moved + eps + 2 * theta * before)


def choose(selector: Selector, candidates: Sequence[Prospect], draws: torch.Generator) -> Prospect:
    """Choose the collaborator among one candidate or more; of equal ones the first.

    Args:
        selector: `ocs` takes the smallest bound, `source` the same among those with labels,
            `random` any with the same chance, `pad` the smallest distance. With `all`, where
            every candidate takes part, it is the one to start from, and chosen as by `source`.
        candidates: those to choose from; for `source` and `all` one or more has labels.
        draws: of `random`.
    """
    if selector == "random":
        return candidates[int(torch.randint(len(candidates), (1,), generator=draws))]
    if selector == "pad":
        return min(candidates, key=lambda c: c.distance)
    labelled = selector in ("source", "all")
    among = [c for c in candidates if c.labelled] if labelled else candidates
    return min(among, key=lambda c: c.bound)
