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


def test_what_all_classes_share_does_not_count() -> None:
    W = torch.randn(4, 3, generator=draws())
    assert ocs.theta_of(W + 5) == pytest.approx(ocs.theta_of(W))
    assert ocs.theta_of(torch.ones(4, 3)) == pytest.approx(0.0, abs=1e-9)


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


def test_the_steepest_cross_entropy_of_logits_has_a_slope_of_root_two() -> None:
    logits = torch.tensor([[20.0, -20.0]], requires_grad=True)
    torch.nn.functional.cross_entropy(logits, torch.tensor([1])).backward()
    assert float(logits.grad.norm()) == pytest.approx(ocs.THETA_CE)  # type: ignore[union-attr]


# ---- eps, W1, PAD ------------------------------------------------------------------------------


def test_the_error_is_what_the_right_classes_lack() -> None:
    p = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    assert ocs.l1_error(p, torch.tensor([0, 0])) == pytest.approx((0.1 + 0.6) / 2)


def test_the_error_is_half_the_l1_distance_to_the_labels() -> None:
    p = torch.randn(9, 4, generator=draws()).softmax(dim=1)
    y = torch.randint(4, (9,), generator=draws())
    assert ocs.l1_error(p, y) == pytest.approx(twin.l1_error(p.tolist(), y.tolist()), abs=1e-6)


@pytest.mark.parametrize("n", [2, 7, 10])
def test_both_halves_have_every_value_once(n: int) -> None:
    first, second = ocs.halves(torch.arange(n), draws())
    a = -(-n // 2)
    assert (first * a + second * (n - a)) == pytest.approx(n * (n - 1) / 2)
    assert (first, second) == ocs.halves(torch.arange(n), draws())
    assert len({ocs.halves(torch.arange(n), draws(seed)) for seed in range(20)}) > 1


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


def test_a_near_candidate_with_a_great_error_loses_against_a_far_one_with_a_small_error() -> None:
    """Bounds without theta_CE: .7 + .1 = .8 for the near one, .1 + .4 = .5 for the far one."""
    near, far = candidate("near", 0.7, 0.1), candidate("far", 0.1, 0.4, labelled=True)
    nearest = candidate("nearest", 0.9, 0.0)
    assert ocs.choose("ocs", [near, far, nearest], draws()) is far
    assert ocs.choose("pad", [near, far, nearest], draws()) is nearest


@pytest.mark.parametrize("selector", ["source", "all"])
def test_the_labelled_source_is_taken_however_far_it_is(selector: ocs.Selector) -> None:
    labelled = candidate("far", 0.5, 40.0, labelled=True)
    every = [candidate("near", 0.0, 0.0), labelled, candidate("further", 0.5, 41.0, labelled=True)]
    assert ocs.choose(selector, every, draws()) is labelled


def test_random_takes_each_and_is_repeatable() -> None:
    every = [candidate(name, 0.1, 0.1) for name in "abc"]
    found = [ocs.choose("random", every, draws(seed)).name for seed in range(40)]
    assert set(found) == set("abc")
    assert found == [ocs.choose("random", every, draws(seed)).name for seed in range(40)]
