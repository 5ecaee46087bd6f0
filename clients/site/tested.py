"""What a test tells the server: numbers that are clipped, rounded and, if the site wants, noised.

A server chooses the weights that are tested. From weights made for the purpose, answers to a few
hundred tests would add up to an image, if each number said exactly how the model answers it. So the
numbers are coarse, and a model is refused whose answers are not those of a trained network. This
makes such tests dearer, not impossible: a number of a thousand images that changes by one step
still says something about some of them. Only noise bounds it, and the number of tests that a site
answers; its policy sets both.
"""

import math
import random

from torch import Tensor

from fedda.errors import NotFiniteError, WireError

STEP = {
    "infomax": 0.01,
    "loss": 0.01,
    "accuracy": 0.001,
    "predicted": 1,
    "gain": 0.001,
    "bnm": 0.01,
    "snd": 0.01,
    "ami": 0.01,
    "largest": 0.01,
    "ece": 0.01,
    "confidence": 0.01,
    "above": 0.01,
    "threshold": 0.01,
}  # by the part of a name before a dash
LOSS_MOST = 10.0  # nats
SELDOM = 0.1  # a class counts as predicted from this part of an equal share of the images
ALIKE = 1e-5  # largest difference between the probabilities of two equal answers


def released(
    name: str, value: float, images: int, most: float, noise: float, least: float = 0.0
) -> float:
    """Make a number of a test what may leave the site.

    Args:
        name: what the number is; up to a dash it is in STEP. An accuracy over so few images that
            one of them changes it by a step or more is not rounded, as that would hide nothing.
        value: the number.
        images: how many it is over.
        most: the largest value that it may have.
        noise: standard deviation of Gaussian noise, in multiples of `most`. It is drawn anew for
            each number, and from no seed of the run.
        least: the smallest value that it may have.

    Raises:
        NotFiniteError: the number is none.
    """
    if math.isnan(value):
        raise NotFiniteError(
            f"The tested model's {name} is not a number: its training diverged, or a lying site "
            "spoilt it; lower train.lr, or set guard.max-change or guard.mean."
        )
    if noise:
        value += random.SystemRandom().gauss(0, noise * most)
    value, kind = min(max(value, least), most), name.split("-")[0]
    step = STEP[kind]
    if kind == "accuracy" and not noise and images * step <= 1:
        return value
    return round(round(value / step) * step, 6)


def check_answers(p: Tensor, least: int) -> None:
    """Check that a model answers a site's images as a trained network would.

    Args:
        p: (N, C) its answers, as probabilities.
        least: so many answers or more must differ from the usual one, and be unsure.

    Raises:
        WireError: all images but a few have the same answer, so that a number of the test is about
            these few; or the answers are infinitely sure, which takes weights of a size that
            training does not give.
    """
    least = min(least, len(p))
    usual = p.median(dim=0).values
    odd = int(((p - usual).abs().amax(dim=1) > ALIKE).sum())
    unsure = int(((p > 0).sum(dim=1) > 1).sum())
    if odd < least or unsure < least:
        what = (
            f"answers all but {odd} of {len(p)} images alike"
            if odd < least
            else f"is infinitely sure of all but {unsure} of {len(p)} images"
        )
        raise WireError(
            f"The model to test {what}, so the test's numbers would be about few images; {least} "
            "or more are needed. Training has failed, or the model was made to read images."
        )


def check_spread(z: Tensor, least: int) -> None:
    """Check that a model's features of a site's images differ, and not in a few images alone.

    Args:
        z: (N, d) the features.
        least: the `least` images farthest from the mean, but at most a tenth of all, may not have
            more of the features' variance than all others together.

    Raises:
        WireError: they do, or the features are all equal, so that a number about the features'
            clusters would be about few images.
    """
    far = ((z - z.mean(dim=0)) ** 2).sum(dim=1).double()
    few = max(1, min(least, len(z) // 10))
    share = float(far.topk(few).values.sum() / far.sum().clamp_min(1e-300))
    if not 0 < share <= 0.5:
        raise WireError(
            f"In a model to compare, {few} of {len(z)} images have {share:.0%} of the features' "
            "variance, so the comparison would be about few images; it may be 50% at most, and "
            "more than 0. Training has failed, or the model was made to read images."
        )


def predicted(p: Tensor, least: int) -> int | None:
    """How many classes the predictions (N, C) use: a sign, without labels, of a class that is lost.

    A class counts if it is the most probable one of a tenth of N / C images or more, and of
    `least` or more, so that the number is never about few images. If there are not even twice
    `least` images per class, the number would say nothing, and is None.
    """
    N, C = p.shape
    if 2 * least * C > N:
        return None
    enough = max(least, math.ceil(SELDOM * N / C))
    return int((p.argmax(dim=1).bincount(minlength=C) >= enough).sum())


def right(p: Tensor, y: Tensor) -> float:
    """The share of predictions (N, C) that are the labels (N,)."""
    return float((p.argmax(dim=1) == y).float().mean())
