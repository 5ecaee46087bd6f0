"""What a site's gradients say of its critic's mean, whatever the site itself says of it.

Euler's theorem on homogeneous functions, for the last layer; then the trapezoidal rule.

    w       (T + 1, P)  weights of the critic at the last T sums, and at the end
    g       (T, P)      gradient in w_t of the critic's mean over a batch, perhaps shortened
    last    int         parameters of the last layer: its weights W and its bias b, the last of w
    m       (T,)        the mean at the end, as each g_t tells it
    v       (N,)        the critic's values on the images of the site that asks

A critic's value is W h + b, so the gradient of its mean in (W, b) is (mean h, 1), and the product
of this gradient with (W, b) is the mean at w_t itself. Shortening multiplies the 1, too, which so
tells by how much. From w_t to the end the mean changes by the integral of g dw along the critic's
way. What is left are the rule's error, and that a batch is not all of the site's images.
"""

import torch
from torch import Tensor

LEAST = 4  # sums; fewer do not tell how far off the rule may be
TIMES = 3.0  # as far as batches differ, and as far as g changes in a step, a mean may be off
PART = 0.1  # of the distance and of the values' standard deviation: likewise
ROUNDING = 0.02  # of numbers that leave a site, absolute and relative


def means_at_the_end(w: Tensor, g: Tensor, last: int) -> Tensor:
    """Euler's (W, b) g at w_t, and the integral of g dw from there by the trapezoidal rule -> m."""
    g = _unshortened(g)
    here = (g[:, -last:] * w[:-1, -last:]).sum(dim=1)
    between = torch.cat([(g[:-1] + g[1:]) / 2, g[-1:]])  # after the last sum no other g is known
    change = (between * (w[1:] - w[:-1])).sum(dim=1)
    return here + change.flip(0).cumsum(0).flip(0)


def told(w: Tensor, g: Tensor, last: int, v: Tensor) -> tuple[float, float]:
    """The mean of m, and how far an honest site's own mean may be from it -> two floats."""
    m, g, v = means_at_the_end(w, g, last), _unshortened(g), v.double()
    mean, differ = float(m.mean()), float(m.std(correction=0))
    # What the trapezoidal rule adds in a step is missing in the last one.
    added = ((g[1:] - g[:-1]) * (w[1:-1] - w[:-2])).sum(dim=1) / 2
    scale = abs(mean - float(v.mean())) + float(v.std(correction=0))
    off = TIMES * (differ + float(added.abs().amax())) + PART * scale
    return mean, off + ROUNDING * (1 + abs(mean))


def _unshortened(g: Tensor) -> Tensor:
    return g / g[:, -1:].clamp(min=1e-9)
