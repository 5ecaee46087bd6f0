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

from fedda.errors import WireError

STEP = {
    "infomax": 0.01,
    "loss": 0.01,
    "accuracy": 0.001,
    "predicted": 1,
}  # by the part of a name before a dash
LOSS_MOST = 10.0  # nats
SELDOM = 0.1  # a class counts as predicted from this part of an equal share of the images
ALIKE = 1e-5  # largest difference between the probabilities of two equal answers


def released(name: str, value: float, images: int, most: float, noise: float) -> float:
    """Make a number of a test what may leave the site.

    Args:
        name: infomax, loss, predicted, accuracy or accuracy-PREDICTOR. An accuracy over so few
            images that one of them changes it by a step or more is not rounded, as that would hide
            nothing.
        value: the number.
        images: how many it is over.
        most: the largest value that it can have; the least is 0.
        noise: standard deviation of Gaussian noise, in multiples of `most`. It is drawn anew for
            each number, and from no seed of the run.
    """
    if noise:
        value += random.SystemRandom().gauss(0, noise * most)
    value, kind = min(max(value, 0.0), most), name.split("-")[0]
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


def infomax(p: Tensor) -> float:
    """Label-free quality of predictions (N, C): entropy of the mean minus mean entropy, in nats.

    High where the model is sure of each image and uses all classes (Shi and Sha, ICML 2012).
    """

    def entropy(q: Tensor) -> Tensor:
        return -(q * q.clamp_min(1e-12).log()).sum(dim=-1)

    return float(entropy(p.mean(dim=0)) - entropy(p).mean())


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
