"""Co-MDA: two networks at the target learn what the sources' models say, and check each other.

Liu, Xi, Li, Xu, Bai and Zhao, IEEE TCSVT 2023, https://doi.org/10.1109/TCSVT.2023.3277135.

    N, n, C, K  sizes       images of the target, of a mini-batch, classes, sources
    p           (K, N, C)   what each source's model says of the images; nothing else of it is used
    c           (K, N)      its confidences, max_c p
    w           (K,)        weights of the sources, summing to 1
    v           (K,)        how clearly each source's confidences fall into two, Otsu's variance
    Z           (N, C)      the running sum of the answers, and t, how often they were asked for
    consensus   (N, C)      the labels that are learnt
    logits      (2, n, C)   of the target's two networks
    alpha       float       how far the second half of the training is, 0 to 1
    lam         float       lambda, drawn from Beta(.3, .3), then the larger of it and 1 - lambda
    small       (m,)        S, images of a mini-batch with the smallest loss under the other network
    f           float       the share that is left out in the first half (`comda.forget`)

Sources train as SHOT's do, once, and may leave (`fedda.algorithms.shot`). The target sends no
image: it holds their models, and asks them at home. Its networks never see their weights. The
first one begins as the run's first model, the second one is drawn from a seed of its own. The
target's prediction is the mean of both networks' probabilities.

The authors' program departs from this in three places that can be had as settings, all in the
preset `official`: it feeds the corrected consensus back, it never leaves the training mode, and
the optimizer of its heads takes no step. It also reports the best round by the labels of the test,
and chooses `forget` for each target by them; both need labels that a target has not.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedda.algorithms import shot
from fedda.config.sections import Scalar
from fedda.contrib.methods.decision import algorithm as decision
from fedda.methods import Method

Carried = Literal["sum", "corrected"]
KEEP = 0.6  # what Z keeps of itself each time
SHARPNESS = 5.0  # of the sources' weights


class Config(shot.SourcesOnce):
    """The settings of SHOT's sources, and of the target's two networks."""

    forget: float = Field(default=0.2, ge=0, lt=1)
    """share of a mini-batch that a network leaves out in the first half of the target's rounds, as
    the other one finds it hard; none is left out in the last round. The default is ours, between
    the authors' .04 and .4"""
    mixup: float = Field(default=0.3, ge=0, le=100)
    """the Beta distribution's parameter; 0: no mixup"""
    answers: Literal["evaluation", "training"] = "evaluation"
    """the mode in which sources' models answer; `training`, as in the authors' code: with the
    statistics of mini-batches, and dropout"""
    carried: Carried = "sum"
    """what the consensus goes on from: the sum, or as in the authors' code the sum after its
    correction"""
    heads: Literal["learnt", "drawn"] = "learnt"
    """the two networks' heads; `drawn`, as in the authors' code: they stay as drawn"""


def between_classes(c: Tensor) -> Tensor:
    """Otsu's largest variance between two classes, max_i w0 w1 (mu0 - mu1)^2 -> (...).

    The classes are the i smallest values and all others, with their shares w0 and w1.

    Args:
        c: (..., N) values; of a single one the variance is 0.
    """
    N = c.shape[-1]
    if N < 2:
        return c.new_zeros(c.shape[:-1])
    c = c.double().sort(dim=-1).values
    below = c.cumsum(dim=-1)
    i = torch.arange(1, N, device=c.device)
    apart = below[..., :-1] / i - (below[..., -1:] - below[..., :-1]) / (N - i)
    return (i * (N - i) / N**2 * apart**2).amax(dim=-1)


def source_weights(p: Tensor) -> Tensor:
    """Softmax of 5 v, v the variances between classes of the confidences -> w (K,) float64."""
    return (SHARPNESS * between_classes(p.amax(dim=2))).softmax(dim=0)


def agreed(Z: Tensor, p: Tensor, t: int, carried: Carried) -> tuple[Tensor, Tensor]:
    """Z <- .6 Z + .4 p, and the consensus Z / (1 - .6^t) -> Z, consensus (N, C).

    Args:
        Z: (N, C); zeros before the first time.
        p: (N, C) the weighted mean of the sources' answers.
        t: how often they have been asked for, this time included.
        carried: whether the Z that is returned is the sum or the consensus.
    """
    Z = KEEP * Z + (1 - KEEP) * p
    consensus = Z / (1 - KEEP**t)
    return (Z if carried == "sum" else consensus), consensus


def kept_share(done: float, forget: float) -> float:
    """1 - (1 - alpha) forget, alpha = max(0, 2 done - 1) -> share of a mini-batch.

    Args:
        done: how much of the training is done, 0 to 1.
        forget: the share that is left out in the first half.
    """
    return 1 - (1 - max(0.0, 2 * done - 1)) * forget


def kept(n: int, share: float, least: int) -> int:
    """How many of n images are kept: the share, rounded down, but `least` of them or more."""
    return min(n, max(int(share * n + 1e-9), least))


def co_teaching_loss(logits: Tensor, consensus: Tensor, count: int) -> Tensor:
    """Each network's mean -sum_c consensus_c log q_c, where the other's is smallest -> (2,).

    Args:
        logits: (2, n, C), q = softmax(logits).
        consensus: (n, C).
        count: how many of the n images each network learns from.
    """
    loss = -(consensus * logits.log_softmax(dim=2)).sum(dim=2)  # (2, n)
    small = loss.detach().flip(0).topk(count, dim=1, largest=False).indices
    return loss.gather(1, small).mean(dim=1)


PAPER: dict[str, Scalar] = {"smoothing": 0.1, "head": "linear", "mixup": 0.3}
PAPER |= {"answers": "evaluation", "carried": "sum", "heads": "learnt"}
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": PAPER,
    "official": PAPER | {"answers": "training", "carried": "corrected", "heads": "drawn"},
}

METHOD = Method(
    "comda",
    "Co-MDA",
    Config,
    shot.phases(decision.ADAPT),
    PRESETS,
    stays=lambda options: True,
    extend=shot.extend,
)
