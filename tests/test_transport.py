"""Transport and barycenters: against naive twins with POT, by hand, and their symmetries."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedda.errors import NotFiniteError
from fedda.maths import optimal_transport
from tests.reference import transport as twin

few = settings(max_examples=25, deadline=None)


def points(n: int, d: int, C: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Draw classes around centres, in float64, so that rounding decides between no two plans."""
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % C
    centre = 2 * torch.randn(C, d, generator=g, dtype=torch.float64)
    x = centre[label] + torch.randn(n, d, generator=g, dtype=torch.float64) + shift
    order = torch.randperm(n, generator=g)
    return x[order], torch.eye(C, dtype=torch.float64)[label[order]]


def dictionary(n: int, d: int, C: int, K: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    z, y = zip(*(points(n, d, C, 100 * seed + k, 0.3 * k) for k in range(K)), strict=True)
    g = torch.Generator().manual_seed(seed)
    alpha = torch.rand(K, generator=g, dtype=torch.float64) + 0.1
    return torch.stack(z), 0.9 * torch.stack(y) + 0.1 / C, alpha / alpha.sum()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z, y, alpha of atoms, and a site's x with labels; n and m need not be the same."""
    C, K = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    n, m, d = draw(st.integers(3, 12)), draw(st.integers(3, 12)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 10**6))
    x, labels = points(m, d, C, seed + 1, 0.5)
    return *dictionary(n, d, C, K, seed), x, labels


# Costs and plans


def test_labelled_cost_by_hand():
    x, z = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0]])
    x_y, z_y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0]])
    # features: 0 and 25, so beta is 25; labels: |(1, -1)|^2 = 2 and 0
    cost, beta = optimal_transport.labelled_cost(optimal_transport.feature_cost(x, z), x_y, z_y)
    assert beta == 25
    torch.testing.assert_close(cost, torch.tensor([[50.0], [25.0]]))


def test_plans_by_hand():
    cost = torch.tensor([[1.0, 2.0], [2.0, 4.0]])  # 2 + 2 is less than 1 + 4
    plan = optimal_transport.solve(cost)
    assert plan.tolist() == [1, 0]
    assert optimal_transport.moved_cost(plan, cost) == 2
    assert optimal_transport.move(plan, torch.tensor([[5.0], [7.0]])).tolist() == [[7], [5]]
    # One point onto two: half of it to each.
    split = optimal_transport.solve(torch.tensor([[1.0, 3.0]]))
    assert split.tolist() == [[0.5, 0.5]]
    assert optimal_transport.moved_cost(split, torch.tensor([[1.0, 3.0]])) == 2


@few
@given(problems())
def test_a_plan_costs_the_same_as_the_plan_of_pot(problem: tuple[Tensor, ...]):
    z, y, _, x, labels = problem
    cost, beta = optimal_transport.labelled_cost(
        optimal_transport.feature_cost(z[0], x), y[0], labels
    )
    wanted = twin.cost(z[0], y[0], x, labels, beta)
    torch.testing.assert_close(cost, wanted)
    found = optimal_transport.moved_cost(optimal_transport.solve(cost), cost)
    assert found == pytest.approx(float((twin.plan(wanted) * wanted).sum()), rel=1e-9)


def test_a_plan_is_the_best_of_all_permutations():
    cost = torch.rand(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = min(
        math.fsum(float(cost[i, j]) for i, j in enumerate(p)) / 5
        for p in itertools.permutations(range(5))
    )
    assert optimal_transport.moved_cost(optimal_transport.solve(cost), cost) == pytest.approx(best)


def test_an_entropic_plan_has_the_marginals_and_nears_the_exact_one():
    (x, _), (z, _) = points(8, 3, 2, 0), points(8, 3, 2, 1)
    cost = optimal_transport.feature_cost(x, z)
    exact = optimal_transport.moved_cost(optimal_transport.solve(cost), cost)
    costs = []
    for entropy in (1.0, 0.1, 0.01):
        plan = optimal_transport.solve(cost, entropy)
        torch.testing.assert_close(plan.sum(dim=1), torch.ones(8, dtype=torch.float64))
        torch.testing.assert_close(
            plan.sum(dim=0), torch.ones(8, dtype=torch.float64), atol=1e-2, rtol=0
        )
        costs.append(optimal_transport.moved_cost(plan, cost))
    assert costs[0] > costs[1] > costs[2] > exact - 1e-6
    assert costs[2] == pytest.approx(exact, rel=0.02)


# Barycenters


def test_a_barycenter_by_hand():
    # Two atoms on a line, in different orders: sorted points are paired and mixed 3 : 1.
    z = torch.tensor([[[0.0], [10.0]], [[14.0], [4.0]]])
    y = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    b = optimal_transport.barycenter(z, y, torch.tensor([0.75, 0.25]))
    assert b.z.tolist() == [[1], [11]]
    assert b.y.tolist() == [[1, 0], [0, 1]]
    assert b.plans.tolist() == [[0, 1], [1, 0]]


@few
@given(problems())
def test_barycenters_equal_the_twins(problem: tuple[Tensor, ...]):
    z, y, alpha, *_ = problem
    b = optimal_transport.barycenter(z, y, alpha)
    wanted_z, wanted_y, plans = twin.barycenter(z, y, alpha)
    torch.testing.assert_close(b.z, wanted_z)
    torch.testing.assert_close(b.y, wanted_y)
    assert [p.argmax(dim=1).tolist() for p in plans] == b.plans.tolist()


@few
@given(problems(), st.integers(1, 9))
def test_barycenters_of_another_size_equal_the_twins(problem: tuple[Tensor, ...], m: int):
    z, y, alpha, x, labels = problem
    start = x[:m], labels[:m]
    b = optimal_transport.barycenter(z, y, alpha, start, most=3)
    wanted_z, wanted_y, _ = twin.barycenter(z, y, alpha, start, most=3)
    torch.testing.assert_close(b.z, wanted_z)
    torch.testing.assert_close(b.y, wanted_y)


@pytest.mark.nightly("fedda/maths/optimal_transport.py")
@pytest.mark.parametrize("entropy", [0.0, 0.1])
@pytest.mark.parametrize("m", [0, 5])
def test_atoms_too_many_for_stored_inner_products_give_the_same(
    monkeypatch: pytest.MonkeyPatch, m: int, entropy: float
):
    z, y, alpha = dictionary(12, 4, 3, 3, seed=2)
    start = (z[0, :m], y[0, :m]) if m else None
    stored = optimal_transport.barycenter(z, y, alpha, start, entropy=entropy)
    sizes: list[int] = []
    inner = optimal_transport._inner
    monkeypatch.setattr(optimal_transport, "_inner", lambda x: sizes.append(len(x)) or inner(x))
    monkeypatch.setattr(optimal_transport, "MOST_PAIRS", 9 * 12 * 12 - 1)
    computed_anew = optimal_transport.barycenter(z, y, alpha, start, entropy=entropy)
    assert not sizes
    for a, b in zip(stored, computed_anew, strict=True):
        torch.testing.assert_close(a, b)
    monkeypatch.setattr(optimal_transport, "MOST_PAIRS", 9 * 12 * 12)
    optimal_transport.barycenter(z, y, alpha, start, entropy=entropy)
    assert sizes == [3, 3]


def test_which_inner_products_are_kept() -> None:
    keeps = optimal_transport.keeps_inner
    assert keeps(3, 100, 10) and keeps(3, 100, 1024)  # few atoms
    assert keeps(16, 100, 1024) and not keeps(16, 100, 1023)  # 64 features per atom
    assert not keeps(5, 100, 10)  # as with labels
    assert keeps(4, 1369, 10) and not keeps(4, 1370, 10)  # 16 * 1369^2 < 3 * 10^7 < 16 * 1370^2


@pytest.mark.parametrize("features", [0, 10**6])
def test_many_atoms_give_the_twins_result(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z, y, alpha = dictionary(10, 4, 3, 7, seed=3)
    monkeypatch.setattr(optimal_transport, "FEATURES_PER_ATOM", features)
    monkeypatch.setattr(optimal_transport, "PIECE", 30)  # three of the columns at a time
    assert optimal_transport.keeps_inner(7, 10, 4) == (features == 0)
    b = optimal_transport.barycenter(z, y, alpha)
    start = torch.einsum("k,knd->nd", alpha, z), torch.einsum("k,knc->nc", alpha, y)
    wanted_z, wanted_y, _ = twin.barycenter(z, y, alpha, start)
    torch.testing.assert_close(b.z, wanted_z)
    torch.testing.assert_close(b.y, wanted_y)


def test_at_a_vertex_the_barycenter_is_the_atom():
    z, y, _ = dictionary(9, 3, 3, 3, seed=4)
    b = optimal_transport.barycenter(z, y, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(b.z, z[1])
    torch.testing.assert_close(b.y, y[1])


def test_a_barycenter_stops_where_nothing_changes():
    z, y, alpha = dictionary(12, 4, 3, 3, seed=0)
    first = optimal_transport.barycenter(z, y, alpha, most=50)
    aligned = torch.stack([a[p] for a, p in zip(z, first.plans, strict=True)])
    labels = torch.stack([a[p] for a, p in zip(y, first.plans, strict=True)])
    again = optimal_transport.barycenter(aligned, labels, alpha)
    assert first.solved > again.solved == len(z)  # one plan for each atom, to see that it stays
    torch.testing.assert_close(again.z, first.z)


def test_points_keep_their_classes_if_labels_count_in_the_cost():
    z, y, alpha = dictionary(12, 2, 3, 3, seed=1)
    b = optimal_transport.barycenter(z, y, alpha)
    torch.testing.assert_close(b.y.amax(dim=1), y.amax(dim=2).mean(dim=0))


def test_an_entropic_barycenter_is_a_blurred_one():
    z, y, alpha = dictionary(8, 3, 2, 2, seed=2)
    exact = optimal_transport.barycenter(z, y, alpha)
    blurred = [
        optimal_transport.barycenter(z, y, alpha, entropy=e, most=3) for e in (1.0, 0.1, 0.01)
    ]
    assert blurred[0].plans.shape == (2, 8, 8)
    apart = [float((b.z - exact.z).norm()) for b in blurred]
    assert apart[0] > apart[1] > apart[2]
    assert blurred[0].z.var(dim=0).sum() < exact.z.var(dim=0).sum()


# The loss and its gradients


@few
@given(problems(), st.booleans())
def test_gradients_equal_autograds(problem: tuple[Tensor, ...], labelled: bool):
    z, y, alpha, x, labels = problem
    found, _, beta = optimal_transport.reconstruction(z, y, alpha, x, labels if labelled else None)
    loss, *wanted = twin.reconstruction(z, y, alpha, x, labels if labelled else None)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.features <= found.loss + 1e-9
    for mine, theirs in zip((found.z, found.y, found.alpha), wanted, strict=True):
        torch.testing.assert_close(mine, theirs.to(mine).expand_as(mine), rtol=1e-6, atol=1e-7)
    assert (beta > 0) == labelled


def test_gradients_by_hand():
    z, y = torch.tensor([[[0.0], [4.0]]]), torch.ones(1, 2, 1)
    x = torch.tensor([[5.0], [2.0]])  # 4 goes to 5 and 0 to 2: the loss is (1 + 4) / 2
    found, b, _ = optimal_transport.reconstruction(z, y, torch.ones(1), x, None)
    assert found.loss == 2.5
    assert found.z.tolist() == [[[-2], [-1]]]  # 2 / n (z - x)
    assert found.alpha.tolist() == [-4]  # -2 * 0 - 1 * 4
    assert b.plans.tolist() == [[0, 1]]


def test_a_whole_step_along_transport_arrives():
    z, y, _ = dictionary(8, 3, 2, 1, seed=0)
    x, _ = points(8, 3, 2, seed=9)
    one = torch.ones(1, dtype=torch.float64)
    found, *_ = optimal_transport.reconstruction(z, y, one, x, None)
    after, *_ = optimal_transport.reconstruction(z - 8 / 2 * found.z, y, one, x, None)
    assert after.loss == pytest.approx(0, abs=1e-9)


@few
@given(problems(), st.floats(-2, 2), st.booleans())
def test_theorem_3_1(problem: tuple[Tensor, ...], size: float, labelled: bool):
    """Atoms moved together: f(P + e) = f(P) + e . sum_ki df/dz_ki + |e|^2.

    A shift of all atoms' points by e makes B + e of the barycenter B, so no plan changes. (The
    theorem's statement counts the gradient twice; its proof has it once, with the factor 2 inside.)
    """
    z, y, alpha, x, labels = problem
    given_labels = labels if labelled else None
    g = torch.Generator().manual_seed(7)
    e = size * torch.randn(z.shape[2], generator=g, dtype=torch.float64)

    def at(points: Tensor) -> tuple[float, Tensor]:
        b = optimal_transport.barycenter(points, y, alpha)
        cost = optimal_transport.feature_cost(b.z, x)
        if given_labels is not None:  # a fixed beta: the shift would change it
            cost = cost + 3.0 * optimal_transport.feature_cost(b.y, given_labels)
        plan = optimal_transport.solve(cost)
        r = 2 / len(b.z) * (b.z - optimal_transport.move(plan, x))
        return optimal_transport.moved_cost(plan, cost), r.sum(dim=0)

    f, slope = at(z)
    assert at(z + e)[0] == pytest.approx(f + float(e @ slope) + float(e @ e), rel=1e-7, abs=1e-9)
    if not labelled:  # the gradients of all points add up to the slope
        found, *_ = optimal_transport.reconstruction(z, y, alpha, x, None)
        torch.testing.assert_close(found.z.sum(dim=(0, 1)), slope)


# The simplex


@few
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.integers(0, 100))
def test_no_point_of_the_simplex_is_nearer(values: list[float], seed: int):
    v = torch.tensor(values, dtype=torch.float64)
    found = optimal_transport.project_simplex(v)
    assert float(found.sum()) == pytest.approx(1) and (found >= 0).all()
    e = -torch.rand(200, len(v), generator=torch.Generator().manual_seed(seed)).double().log()
    others = torch.cat([e / e.sum(dim=1, keepdim=True), torch.eye(len(v), dtype=torch.float64)])
    assert (others - v).norm(dim=1).min() >= (found - v).norm() - 1e-9


def test_the_simplex_by_hand():
    # .9, .5 and .1 are .5 too much. A sixth less of each would make the last one negative, so it
    # becomes 0 and the first two become .2 less.
    found = optimal_transport.project_simplex(torch.tensor([0.9, 0.5, 0.1]))
    assert found.tolist() == pytest.approx([0.7, 0.3, 0.0], abs=1e-6)
    assert optimal_transport.project_simplex(torch.tensor([0.2, 0.8])).tolist() == pytest.approx(
        [0.2, 0.8]
    )


@pytest.mark.parametrize("m", [3, 4])
@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_a_cost_that_is_not_finite_is_refused_by_name(m: int, entropy: float) -> None:
    cost = torch.ones(3, m)
    cost[1, 2] = math.nan
    with pytest.raises(NotFiniteError, match="not finite; lower the learning rates"):
        optimal_transport.solve(cost, entropy)
