"""Mixup of a target's images with the labels and weights that its teachers gave them.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757, appendix F.

    N, n, C   sizes     all images, those of a mini-batch, classes
    x         (n, ·)    images
    p         (n, C)    their soft labels, the teachers' consensus
    w         (n,)      their weights in the loss
    perm      (n,)      each image's partner, by index
"""

from torch import Tensor


def mixup(
    x: Tensor, p: Tensor, w: Tensor, lam: float, perm: Tensor, weights: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Appendix F: lam of each x, p and w, plus 1 - lam of its partner's -> x, p, w.

    Without `weights` each mixed image keeps the w of its first image, as in the official code.
    """
    mixed_x, mixed_p, mixed_w = (lam * a + (1 - lam) * a[perm] for a in (x, p, w))
    return mixed_x, mixed_p, mixed_w if weights else w
