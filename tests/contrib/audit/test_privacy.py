"""The account of noise: compared with our own computation, and with what any account must hold."""

import ast
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedda.adversarial.lazy import protect
from fedda.contrib.audit import privacy
from fedda.contrib.audit.privacy import epsilon, spent
from fedda.errors import ConfigError


def naive_delta(multiplier: float, epsilon: float) -> float:
    """The most by which P(x in S) may exceed e^epsilon P(x' in S), for x, x' one apart.

    S is where the likelihood ratio of N(1, m^2) over N(0, m^2) is above e^epsilon: x > m^2 epsilon
    + 1 / 2.
    """
    edge = multiplier**2 * epsilon + 0.5
    above = norm.sf(edge, 1, multiplier) - math.exp(epsilon) * norm.sf(edge, 0, multiplier)
    return float(above)


def naive_epsilon(multiplier: float, delta: float) -> float:
    low, high = 0.0, 60.0
    if naive_delta(multiplier, 0) <= delta:
        return 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if naive_delta(multiplier, middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 4.0])
def test_one_window_costs_what_the_analytic_gaussian_says(multiplier: float, delta: float) -> None:
    assert epsilon(multiplier, 1, delta) == pytest.approx(
        naive_epsilon(multiplier, delta), rel=1e-6
    )


@pytest.mark.parametrize("times", [4, 100])
def test_many_windows_cost_as_much_as_one_with_less_noise(times: int) -> None:
    found = epsilon(5.0, times)
    assert found == pytest.approx(naive_epsilon(5.0 / math.sqrt(times), 1e-5), rel=1e-6)


def test_a_generic_accountant_agrees() -> None:
    """It adds up privacy loss distributions and makes no use of a square root of T."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    once = pld.from_gaussian_mechanism(8.0, value_discretization_interval=1e-3)
    found = once.self_compose(30).get_epsilon_for_delta(1e-5)
    assert epsilon(8.0, 30) == pytest.approx(found, rel=0.01)


def test_a_case_by_hand() -> None:
    # From delta = P(|N(0, 1)| < 1/2) = 0.3829... on, epsilon is 0.
    assert naive_delta(1.0, 0.0) == pytest.approx(0.38292, abs=1e-5)
    assert epsilon(1.0, 1, 0.383) == 0
    assert epsilon(1.0, 1, 0.382) > 0
    assert math.isfinite(epsilon(0.001, 100_000))


def test_replacing_data_counts_as_twice_the_distance_of_leaving_them_out() -> None:
    found = spent(2.0, 9)["all"]
    assert found["presence"] == epsilon(2.0, 9)
    assert found["replacement"] == epsilon(1.0, 9) > found["presence"]


def test_clipping_gives_the_distances_that_the_account_assumes() -> None:
    """The output of `protect` moves by clip if a window is left out, by 2 clip if replaced."""
    g = torch.from_numpy(np.random.default_rng(0).normal(size=50)) * 100
    first, second = protect(g, clip=3.0), protect(-g, clip=3.0)
    assert float(first.norm()) == pytest.approx(3.0)
    assert float((first - second).norm()) == pytest.approx(6.0)
    draws = torch.Generator().manual_seed(0)
    blur = protect(torch.zeros(40_000), 3.0, 0.5, draws)
    assert float(blur.std()) == pytest.approx(0.5 * 3.0, rel=0.02)  # multiplier: 1.5 / 3


@pytest.mark.parametrize("numbers", [(0, 1, 1e-5), (1, 0, 1e-5), (1, 1, 0), (1, 1, 1.5)])
def test_numbers_without_a_meaning_are_refused(numbers: tuple[float, int, float]) -> None:
    with pytest.raises(ConfigError, match="have no epsilon; give noise above 0"):
        epsilon(*numbers)


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    monkeypatch.delitem(sys.modules, "dp_accounting.gaussian_mechanism", raising=False)
    with pytest.raises(ConfigError, match=r"not installed; install it by pip .*fedda\[privacy\]"):
        epsilon(1.0, 1)


def test_the_library_is_imported_when_it_is_used() -> None:
    tree = ast.parse(Path(privacy.__file__).read_text())
    modules = [n.module for n in tree.body if isinstance(n, ast.ImportFrom)]
    assert "fedda.errors" in modules
    assert not [m for m in modules if m and m.startswith("dp_accounting")]
