"""An estimate of accuracy where there are no labels, from images elsewhere that have labels.

    ATC   average thresholded confidence: Garg et al., ICLR 2022, https://arxiv.org/abs/2201.04234
    DoC   difference of confidences: Guillory et al., ICCV 2021, https://arxiv.org/abs/2107.03315
    ECE   expected calibration error: Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599

    p       (N, C)  predicted class probabilities
    y       (N,)    labels
    score   (N,)    how sure a prediction is, in one of two ways
    t       float   threshold: where labels are, as many scores are below it as are wrong

Both estimates assume that being sure means the same here as there. Under a strong shift of the
domain it does not, and they are too high or too low. How the target's images lie is a sign of that:
where the last step (`fedda.maths.refine`) was taken, DoC counts each answer that it changed as a
wrong one. Of such rules this one was taken on six sets; examples/benchmarks/grand.py measures it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .validators import entropy

MOST = 16.0  # largest score, and smallest with a minus; a float32 says no more
BINS = 15
NORMAL = 1.96  # standard deviations of a normal distribution's 95 %
# Logits by which an accuracy can be below all estimates: a shift deceives them alike. Fitted on all
# but one of six sets, such an offset held 86 % of the accuracies of the one left out, and without
# it 50 % were held (examples/benchmarks/refine.py).
OVER = 1.0
LEAST = 0.005  # accuracies nearer to 0 or 1 have this one's logit


def scores(p: Tensor) -> dict[str, Tensor]:
    """Both scores of predictions (N, C) -> `confidence` and `entropy`, (N,) each.

    ATC asks for the order of scores alone. So each is written here as the logarithm of its
    distance from knowing nothing over its distance from being sure. On these, the coarse steps of
    a released threshold still divide predictions that are all nearly sure, or all nearly even.
    """
    p = p.double()
    C, tiny = p.shape[1], math.exp(-MOST)
    best, place = p.max(dim=1)
    rest = p.scatter(1, place[:, None], 0.0).sum(dim=1)  # 1 - best would lose the small ones
    H = entropy(p)

    def odds(known: Tensor, missing: Tensor) -> Tensor:
        odd = known.clamp_min(tiny).log() - missing.clamp_min(tiny).log()
        return odd.clamp(-MOST, MOST)

    return {"confidence": odds(best - 1 / C, rest), "entropy": odds(math.log(C) - H, H)}


def threshold(score: Tensor, wrong: float, few: int = 1) -> float:
    """ATC's t: the share of scores (N,) below it is the share of wrong predictions.

    It lies half way between two scores. If nothing is wrong it is below all of them, and if
    everything is, above. With `few` above 1 so many scores or more are on either side of it, or
    half of them if there are not twice as many; so it is about no score at an end.
    """
    ordered, count = score.sort().values, round(wrong * len(score))
    if few > 1:
        few = min(few, len(score) // 2)
        count = min(max(count, few), len(score) - few)
    if count == 0:
        return max(float(ordered[0]) - 1.0, -MOST)
    if count == len(ordered):
        return min(float(ordered[-1]) + 1.0, MOST)
    return float(ordered[count - 1] + ordered[count]) / 2


def above(score: Tensor, t: float) -> float:
    """ATC's estimate: the share of scores (N,) that are not below the threshold."""
    return float((score >= t).double().mean())


def confidence(p: Tensor) -> float:
    """Mean probability of the most probable class, of predictions (N, C)."""
    return float(p.double().max(dim=1).values.mean())


def doc(accuracy: float, there: float, here: float) -> float:
    """DoC: the accuracy there, minus what the mean confidence is lower here -> in [0, 1]."""
    return min(max(accuracy - (there - here), 0.0), 1.0)


def ece(p: Tensor, y: Tensor, bins: int = BINS) -> float:
    """Mean gap of confidence and accuracy, over equal bins -> [0, 1]."""
    sure, label = p.double().max(dim=1)
    right = (label == y).double()
    place = (sure * bins).long().clamp_max(bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, sure - right)
    return float(gap.abs().sum() / len(p))


def logit(share: float) -> float:
    """log(p / (1 - p)), for shares within LEAST of 0 or 1 that of LEAST."""
    share = min(max(share, LEAST), 1 - LEAST)
    return math.log(share / (1 - share))


def wider(share: float, by: float) -> float:
    """The share that is so many logits lower."""
    return 1 / (1 + math.exp(by - logit(share)))


@dataclass(frozen=True)
class Calibration:
    """What a site with labels says of a model, and what the target says with it.

    Attributes:
        examples: how much the site counts.
        accuracy: on the site's labelled images.
        confidence: mean confidence on them.
        above: ATC's estimates at the target, with the site's thresholds, by score.
    """

    examples: float
    accuracy: float
    confidence: float
    above: Mapping[str, float]


@dataclass(frozen=True)
class EstimatedAccuracy:
    """Estimated accuracy, with an interval, and what it is made of.

    Attributes:
        accuracy: what to expect.
        low: the lower end of the interval.
        high: its upper end.
        parts: the three estimates, by name.
        changed: share of the answers that was taken off DoC's; None: the mean of the three.
        over: logits by which the lower end was moved.
    """

    accuracy: float
    low: float
    high: float
    parts: Mapping[str, float]
    changed: float | None = None
    over: float = OVER


def estimate(
    sites: Sequence[Calibration], here: float, images: int, changed: float | None = None
) -> EstimatedAccuracy:
    """The estimate of several sites' calibrations.

    Each of the three estimates is a mean over the sites, by their examples. The estimate is DoC's
    without the share of the answers that the last step changed, or the mean of the three where it
    was not taken. The interval goes from the lowest to the highest of it and of all sites'
    estimates, and further by the sampling error of so many images. So it is wide where the sites
    or the ways to estimate disagree. As a shift can deceive all of them alike, the lower end is
    OVER logits further down.

    Args:
        sites: the calibrations, at least one.
        here: mean confidence at the target.
        images: of the target, that the estimates are over.
        changed: share of the target's images whose class the last step changed; None without one.
    """
    single = [{**site.above, "doc": doc(site.accuracy, site.confidence, here)} for site in sites]
    total = sum(site.examples for site in sites)
    parts = {
        name: sum(s.examples * e[name] for s, e in zip(sites, single, strict=True)) / total
        for name in single[0]
    }
    mean = sum(parts.values()) / len(parts)
    middle = mean if changed is None else max(parts["doc"] - changed, 0.0)
    all_of_them = [middle, *(value for each in single for value in each.values())]

    def margin(share: float) -> float:
        return NORMAL * math.sqrt(share * (1 - share) / max(images, 1))

    low, high = min(all_of_them), max(all_of_them)
    lowest = wider(max(low - margin(low), 0.0), OVER)
    return EstimatedAccuracy(middle, lowest, min(high + margin(high), 1.0), parts, changed)
