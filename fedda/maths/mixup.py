"""Mixup of a target's images with the labels and weights that its teachers gave them.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757, appendix F.

    N, n, C   sizes     all images, those of a mini-batch, classes
    x         (n, ·)    images
    p         (n, C)    their soft labels, the teachers' consensus
    w         (n,)      their weights in the loss
    heard     (N,) bool whether a sure teacher supports an image's label
    perm      (n,)      each image's partner, by index
"""

from typing import Literal

import torch
from torch import Tensor

Among = Literal["all", "heard"]


def mixup(
    x: Tensor, p: Tensor, w: Tensor, lam: float, perm: Tensor, weights: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Appendix F: lam of each x, p and w, plus 1 - lam of its partner's -> x, p, w.

    Without `weights` each mixed image keeps the w of its first image, as in the official code.
    """
    mixed_x, mixed_p, mixed_w = (lam * a + (1 - lam) * a[perm] for a in (x, p, w))
    return mixed_x, mixed_p, mixed_w if weights else w


def takes_part(heard: Tensor, among: Among) -> Tensor:
    """Which images are mixed with one another; the others are trained on as they are -> (N,) bool.

    An unheard image weighs next to nothing, unless it is mixed with a heard one: then its pixels
    are trained towards the heard one's label, with a good part of that one's weight. If it is a
    whole class that is unheard, the student may unlearn this class.

    Args:
        heard: (N,) bool.
        among: `all`: every image (paper); `heard`: the heard ones.
    """
    return torch.ones_like(heard) if among == "all" else heard


def partners(part: Tensor, draws: torch.Generator) -> Tensor:
    """Draw a random order of the images that take part; any other is its own partner -> perm.

    Args:
        part: (n,) bool, which images of a mini-batch take part.
        draws: the generator, of the CPU.
    """
    chosen = part.nonzero()[:, 0]
    perm = torch.arange(len(part))
    perm[chosen] = chosen[torch.randperm(len(chosen), generator=draws)]
    return perm
