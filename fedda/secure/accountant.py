"""The privacy that noisy steps on random examples have spent: Rényi differential privacy.

Mironov, Talwar and Zhang, 2019, https://arxiv.org/abs/1908.10530, as Opacus computes it. It comes
with the extra `privacy`.

    sigma    float   noise of a step, in units of the clip: `privacy.noise`
    q        float   chance of each example to be in a step's batch (Poisson sampling)
    n        int     steps with this sigma and q
    epsilon  float   at a given delta: two sites that differ in one example, with it or without it,
                     send the same with chances that differ by at most a factor exp(epsilon)
"""

from collections.abc import Iterable

from fedda.errors import ConfigError

Steps = tuple[float, float, int]  # sigma, q, n


def epsilon(steps: Iterable[Steps], delta: float) -> float:
    """Epsilon of all steps together; 0 if there are none.

    Raises:
        ConfigError: Opacus is not installed.
    """
    history = [(sigma, q, n) for sigma, q, n in steps if n]
    if not history:
        return 0.0
    try:
        from opacus.accountants import RDPAccountant  # imports for seconds
    except ImportError as error:
        raise missing(error) from None
    accountant = RDPAccountant()
    accountant.history = history
    return float(accountant.get_epsilon(delta))


def missing(error: ImportError, what: str = "privacy.noise") -> ConfigError:
    """The error for a package that is not installed, and what needs it."""
    return ConfigError(
        f"{what} needs the package {error.name}, which is not installed; install it by "
        'pip install "fedda[privacy]".'
    )
