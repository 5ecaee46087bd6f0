"""What noise on exchanged gradients gives, as differential privacy: an account of what was sent.

Balle and Wang, ICML 2018, https://arxiv.org/abs/1805.06530, eq. 6: the exact curve of the Gaussian
mechanism. The computation is dp-accounting's; it comes with the extra `privacy`.

    G / p    (P,)    mean gradient of one window of a site, clipped to an L2 norm of at most clip
    clip     float   exchange.clip
    noise    float   exchange.noise: N(0, (noise clip)^2) is added to every value
    T        int     windows
    epsilon  float   at a given delta

The unit is a window of one site, not an example. The norm of a window's mean gradient is clipped,
whatever it is a mean of, so

    with or without the window      the sum differs by at most clip       multiplier noise
    one window in place of another  the sum differs by at most 2 clip     multiplier noise / 2

T windows with T independent draws of noise, each allowed to depend on all that came before, are as
private as one with noise / sqrt(T). Over all T windows of a run this is a statement on the site:
whether it took part at all (with or without), or with which data (in place of).

It is no statement on one example beyond that. Gradients of single examples are not clipped, and
one example can change its window, and through what others then send every later one, as far as all
of the site's data could. So an example has the site's epsilon and none of its own, a window over
more examples does not make it smaller, and drawing batches at random does not either.

Only the exchange's gradients are counted: models, losses and the numbers of examples that a method
sends as well have no noise. Noise that comes from a seed which somebody else knows gives nothing.
"""

import math
from typing import NamedTuple

from fedda.errors import ConfigError

DELTA = 1e-5


class Spent(NamedTuple):
    """Epsilon of some windows of one site, under both readings of what may differ."""

    presence: float  # with or without them
    replacement: float  # others in their place


def spent(noise: float, windows: int, delta: float = DELTA) -> Spent:
    """Epsilon at delta of T windows under both readings.

    Args:
        noise: exchange.noise, above 0: standard deviation per value in units of exchange.clip.
        windows: T, as many as were or will be sent; 1 for a single one.
        delta: chance that the bound may fail.

    Raises:
        ConfigError: dp-accounting is not installed, or a number is out of range.
    """
    return Spent(epsilon(noise, windows, delta), epsilon(noise / 2, windows, delta))


def epsilon(multiplier: float, times: int, delta: float = DELTA) -> float:
    """Epsilon of a Gaussian mechanism, T times -> float.

    Args:
        multiplier: standard deviation of the noise, in units of how much the sum may differ.
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
        raise ConfigError(
            f"The account of privacy needs the package {error.name}, which is not installed; "
            'install it by pip install "fedda[privacy]".'
        ) from None
    return float(get_epsilon_gaussian(multiplier / math.sqrt(times), delta))
