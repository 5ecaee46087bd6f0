"""OCS's formulas against plain loops, and in cases that can be checked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedda.maths import ocs
from fedda.maths.ocs import Prospect
from tests.reference import ocs as twin

share = st.floats(0, 1)
length = st.floats(0, 50)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def candidate(name: str, eps: float, W1: float, labelled: bool = False) -> Prospect:
    return Prospect(name, labelled, eps, 0.5, W1, 0.0)


# ---- theta -------------------------------------------------------------------------------------


def test_theta_of_a_classifier_with_opposite_rows_by_hand() -> None:
    """Softmax of (a, -a) is the logistic function of 2 a, with slope 1/2 at 0: theta is 1/2."""
    assert ocs.theta_of(torch.tensor([[1.0], [-1.0]])) == pytest.approx(0.5)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_no_change_of_the_probabilities_exceeds_theta(classes: int) -> None:
    random = draws(classes)
    W = torch.randn(classes, 3, generator=random)
    theta, steepest = ocs.theta_of(W), 0.0
    for _ in range(400):
        z, u = torch.randn(2, 3, generator=random)
        moved = z + 0.01 * u
        before, after = (twin.softmax((W @ x).tolist()) for x in (z, moved))
        change = sum(abs(a - b) for a, b in zip(before, after, strict=True)) / 2
        steepest = max(steepest, change / float((moved - z).norm()))
    assert steepest <= theta * 1.001
    assert steepest > theta / 3  # the bound is not loose either


# ---- eps, W1, PAD ------------------------------------------------------------------------------


def test_the_error_is_what_the_right_classes_lack() -> None:
    p = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    assert ocs.l1_error(p, torch.tensor([0, 0])) == pytest.approx((0.1 + 0.6) / 2)


@given(st.lists(length, min_size=1, max_size=5), st.lists(length, min_size=1, max_size=5))
def test_w1_is_a_difference_of_means(c: list[float], t: list[float]) -> None:
    halves = [(sum(v) / len(v),) * 2 for v in (c, t)]
    W1, error = ocs.wasserstein(*halves)  # type: ignore[arg-type]
    assert pytest.approx(max(0.0, twin.w1(c, t)), abs=1e-9) == W1
    assert error == pytest.approx(0.0, abs=1e-9)


def test_w1_and_its_error_by_hand() -> None:
    """The halves say 3 - 1 = 2 and 5 - 2 = 3."""
    assert ocs.wasserstein((3.0, 5.0), (1.0, 2.0)) == (2.5, 0.5)
    assert ocs.wasserstein((1.0, 1.0), (2.0, 2.0)) == (0.0, 0.0)


def test_the_proxy_a_distance_by_hand() -> None:
    """One discriminator is never wrong, one in half of all cases, one in a quarter."""
    assert ocs.proxy_a_distance((0.0, 0.0), (0.0, 0.0)) == (2.0, 0.0)
    assert ocs.proxy_a_distance((0.5, 0.5), (0.5, 0.5)) == (0.0, 0.0)
    assert ocs.proxy_a_distance((0.25, 0.25), (0.25, 0.25))[0] == pytest.approx(1.0)  # err 1/4


# ---- the bound and the choice ------------------------------------------------------------------


def test_the_bound_by_hand() -> None:
    assert ocs.bound(0.1, 0.5, 0.3) == pytest.approx(math.sqrt(2) * (0.1 + 2 * 0.5 * 0.3))
    assert ocs.carried(0.1, 0.5, 0.3) == pytest.approx(0.4)
    assert ocs.carried(0.1, 0.5, 30.0) == 1.0
    # .1 + 2 * .5 * .2 of the candidate's model, whose answers the adaptation changed by .25
    p, q = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert ocs.apart(p, q) == 0.25
    assert ocs.carried(0.1, 0.5, 30.0, 0.2, 0.25) == pytest.approx(0.55)
    assert ocs.carried(0.1, 0.5, 0.3, 0.2, 0.25) == pytest.approx(0.4)


@given(st.lists(st.tuples(share, st.floats(0, 3), length), min_size=1, max_size=6))
def test_ocs_takes_the_smallest_bound(rows: list[tuple[float, float, float]]) -> None:
    candidates = [Prospect(str(i), False, e, t, w, 0.0) for i, (e, t, w) in enumerate(rows)]
    wanted = twin.best([(math.sqrt(2), *row) for row in rows])
    assert ocs.choose("ocs", candidates, draws()).bound == candidates[wanted].bound
