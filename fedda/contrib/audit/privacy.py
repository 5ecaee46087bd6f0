"""The differential privacy that noise on exchanged gradients gives to a site.

Balle and Wang, ICML 2018, https://arxiv.org/abs/1805.06530, eq. 6: the exact curve of the Gaussian
mechanism. The package dp-accounting computes it; it comes with the extra `privacy`.

    G / p    (P,)    mean gradient of one window of a site, clipped to an L2 norm of at most clip
    clip     float   exchange.clip
    noise    float   exchange.noise: N(0, (noise clip)^2) is added to every value
    T        int     windows
    epsilon  float   at a given delta

The unit of privacy is a window of one site, not an example. The norm of a window's mean gradient is
clipped, whichever examples it is over, so

    with or without the window      the sum differs by at most clip       multiplier noise
    one window in place of another  the sum differs by at most 2 clip     multiplier noise / 2

T windows with T independent draws of noise are as private as one with noise / sqrt(T), also if each
window depends on all before it. Over all T windows of a run, this hides the site: whether it took
part at all (with or without), or with which data (in place of).

It hides a single example no better than the whole site. Gradients of single examples are not
clipped. So one example can change its window, and through the other sites' answers every later
window, as much as all of the site's data could. An example has the site's epsilon and none of its
own; neither larger windows nor batches drawn at random make it smaller.

Only the gradients of the exchange are counted. A method also sends models, losses and numbers of
examples, which have no noise. Noise from a seed that somebody else knows gives no privacy.
"""

import math
from typing import Any

from fedda.errors import ConfigError
from fedda.secure.accountant import missing

DELTA = 1e-5


def spent(noise: float, windows: int, delta: float = DELTA) -> dict[str, Any]:
    """Epsilon of one window and of all T, or why it cannot be computed, as plain JSON types.

    Args:
        noise: exchange.noise, above 0: standard deviation per value in units of exchange.clip.
        windows: T, the number of windows that were or will be sent.
        delta: chance that the bound may fail.
    """
    about: dict[str, Any] = {"delta": delta, "windows": windows}
    multipliers = {"presence": noise, "replacement": noise / 2}
    try:
        return about | {
            name: {what: epsilon(m, times, delta) for what, m in multipliers.items()}
            for name, times in (("one", 1), ("all", windows))
        }
    except ConfigError as error:
        return about | {"missing": str(error)}


def epsilon(multiplier: float, times: int, delta: float = DELTA) -> float:
    """Epsilon of a Gaussian mechanism, T times -> float.

    Args:
        multiplier: standard deviation of the noise, in units of the largest difference of the sum.
        times: T.
        delta: chance that the bound may fail.

    Raises:
        ConfigError: dp-accounting is not installed, or a number is out of range.
    """
    if not (0 < multiplier < math.inf and times >= 1 and 0 < delta < 1):
        raise ConfigError(
            f"Noise of {multiplier:g}, {times} windows and a delta of {delta:g} have no epsilon; "
            "give noise above 0, at least one window, and a delta between 0 and 1."
        )
    try:
        from dp_accounting.gaussian_mechanism import get_epsilon_gaussian  # imports for seconds
    except ImportError as error:
        raise missing(error, "Computing epsilon") from None
    return float(get_epsilon_gaussian(multiplier / math.sqrt(times), delta))
