"""What a site's numbers tell: all are rounded, those of tests also clipped and noised.

A server chooses the weights that are tested or trained. From weights made for the purpose, a few
hundred answers would add up to an image, if each number said exactly what the model makes of it. So
the numbers are coarse, and a model is refused whose answers are not those of a trained network.
This makes such tests dearer, not impossible: a number of a thousand images that changes by one step
still says something about some of them. Only noise bounds it, and the number of tests that a site
answers; its policy sets both.
"""

import math
import random
from collections.abc import Mapping

import torch
from torch import Tensor

from fedda.errors import FewImagesError, NotFiniteError, WireError
from fedda.wire import ANSWERS, DIGITS, EXACT, WHOLE, Number, Rule

FEW = 10  # no count of fewer images than these leaves a site
SIGNIFICANT = 3  # digits of a number, at most; else a large one would say much of one image
SELDOM = 0.1  # a class counts as predicted from this part of an equal share of the images
# Of honest features of digits a tenth of the images had .5 of the variance at most; those of a rare
# class have more.
UNEVEN = 0.8
ALIKE = 1e-5  # largest difference between the probabilities of two equal answers
CAUSES = (
    "Training has failed, these images differ much from all others, as of a rare class, or the "
    "model was made to read images."
)


def privatise(
    number: Number, value: float, images: int, bounds: tuple[float, float], noise: float
) -> float:
    """Make a number of a test what may leave the site.

    Args:
        number: its declaration.
        value: the number.
        images: how many it is over.
        bounds: the smallest and the largest value that it may have.
        noise: standard deviation of Gaussian noise, in multiples of the largest value. It is drawn
            anew for each number, and from no seed of the run. Before it the value is kept within
            the bounds: one far beyond would show through any noise.

    Raises:
        NotFiniteError: the number is none, and there is no noise.
    """
    low, high = bounds
    if noise:
        value = low if math.isnan(value) else min(max(value, low, -high), high)
        value += random.SystemRandom().gauss(0, noise * high)
    if math.isnan(value):
        raise NotFiniteError(
            f"The tested model's {number} is not a number: its training diverged, or a lying site "
            "spoilt it; lower train.lr, or set guard.max-change or guard.mean."
        )
    value = min(max(value, low), high)
    value = round(value) if number.step == WHOLE else value
    return rounded(number, value, 0 if noise else images)


def ends(share: float, images: int, few: int) -> float:
    """A share of images, which is none or all of them if it is within `few` images of that."""
    count = round(share * images)
    if count < few and count <= images - count:
        return 0.0
    return 1.0 if images - count < few else share


def quantise(numbers: Mapping[str, int | float], rule: Rule) -> dict[str, int | float]:
    """Round every number of a reply, so that none says exactly what single images make of it.

    A number that was rounded before stays as it is.

    Args:
        numbers: by name, as in the contract; `tested` is how many images an accuracy is over.
            Tables of answers by class are rounded already.
        rule: of the contract, which declares them.

    Raises:
        WireError: a number is not declared, or is not whole though it should be.
        NotFiniteError: a number is not finite.
    """
    images = int(numbers.get("tested", 0))
    return {
        n: v if n in ANSWERS else rounded(rule.number(n), v, images) for n, v in numbers.items()
    }


def rounded(number: Number, value: float, images: int = 0) -> int | float:
    """Round a number to its step and a few digits; `images` are those of an accuracy.

    Raises:
        WireError: it is not whole though it should be.
        NotFiniteError: it is not finite.
    """
    step = number.step
    if not math.isfinite(value):
        raise NotFiniteError(f"'{number}' of this site is not finite; lower train.lr.")
    if step == WHOLE and value != round(value):
        raise WireError(f"'{number}' is {value}, but is to be a whole number.")
    few = number.is_accuracy and 0 < images * step <= 1
    if step in (WHOLE, EXACT) or few:
        return value
    if step != DIGITS:
        value = round(round(value / step) * step, 6)
    return float(f"{value:.{SIGNIFICANT}g}") + 0.0  # never -0


def few_of(images: int, least: int) -> int:
    """How many of a site's images are few: `least`, but at most a tenth of all."""
    return max(1, min(least, images // 10))


def check_answers(p: Tensor, least: int) -> None:
    """Check that a model answers a site's images as a trained network would.

    Args:
        p: (N, C) its answers, as probabilities.
        least: so many answers or more, but at most a tenth of all, must differ from the usual one,
            and be unsure. Of few images a good model may answer all but one class alike.

    Raises:
        FewImagesError: all images but a few have the same answer, so that a number of the test is
            about these few; or the answers are infinitely sure, which takes weights of a size that
            training does not give.
    """
    least = few_of(len(p), least)
    usual = p.median(dim=0).values
    odd = int(((p - usual).abs().amax(dim=1) > ALIKE).sum())
    unsure = int(((p > 0).sum(dim=1) > 1).sum())
    if odd < least or unsure < least:
        what = (
            f"answers all but {odd} of {len(p)} images alike"
            if odd < least
            else f"is infinitely sure of all but {unsure} of {len(p)} images"
        )
        raise FewImagesError(
            f"The model to test {what}, so the numbers would be about few images; {least} "
            f"or more are needed. {CAUSES}"
        )


def check_spread(z: Tensor, least: int) -> None:
    """Check that a model's features of a site's images differ, and not in a few images alone.

    Args:
        z: (N, d) the features.
        least: the `least` images farthest from the mean, but at most a tenth of all, are few.

    Raises:
        FewImagesError: they have more of the variance than `UNEVEN`, or the features are all equal,
            so that what leaves would be about few images.
    """
    far = ((z - z.mean(dim=0)) ** 2).sum(dim=1).double()
    few = few_of(len(z), least)
    share = float(far.topk(few).values.sum() / far.sum().clamp_min(1e-300))
    if not 0 < share <= UNEVEN:
        raise FewImagesError(
            f"With the server's model {few} of {len(z)} images have {share:.0%} of the features' "
            f"variance, so what leaves would be about few images; it may be {UNEVEN:.0%} at most, "
            f"and more than 0. {CAUSES}"
        )


def check_window(z: Tensor, least: int) -> None:
    """Check the features (N, d) that a sum of gradients is computed from, as `check_spread` does.

    Each is taken in units of its own spread, so that one huge feature hides no others. Equal ones,
    as of a network that died, tell of no image, and features of texts are uneven by themselves.

    Raises:
        FewImagesError: few images have more of the variance than `UNEVEN`.
    """
    if (z != z[0]).any():
        z = z.double() - z.double().mean(dim=0)
        check_spread(z / z.norm(dim=0).clamp_min(1e-300), least)


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


def infomax(p: Tensor) -> float:
    """What predictions (N, C) are worth without labels, which tends to rise with the accuracy.

    The entropy of the mean prediction minus the mean entropy, in nats, at most ln C: high where the
    model is sure of each image and uses all classes. It is no proof: a model may be sure, balanced
    and wrong. Runs name their selected round by it, and `run.patience` ends them by it.

    Shi and Sha, ICML 2012, https://arxiv.org/abs/1206.6438
    """
    return float(_entropy(p.mean(dim=0)) - _entropy(p).mean())


def _entropy(q: Tensor) -> Tensor:
    """Entropies of distributions (..., C) -> (...), in nats."""
    return -(q * q.clamp_min(1e-12).log()).sum(dim=-1)


def answers(p: Tensor, y: Tensor, few: int) -> list[int]:
    """How the tests of each class are answered, so that no cell tells of few images.

    Args:
        p: (N, C) probabilities.
        y: (N,) classes.
        few: cells are rounded down to multiples of it.

    Returns:
        C times the counts of C answers and of all, row by row.
    """
    C = p.shape[1]
    cells = torch.bincount(y * C + p.argmax(dim=1), minlength=C * C).reshape(C, C)
    table = torch.cat([cells, cells.sum(dim=1, keepdim=True)], dim=1)
    return (table // few * few).flatten().tolist()


def right(p: Tensor, y: Tensor) -> float:
    """The share of predictions (N, C) that are the labels (N,)."""
    return float((p.argmax(dim=1) == y).double().mean())
