"""The benchmark's estimates of class shares: against plain loops, by hand, and where they hold."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedda.maths import class_shares
from tests.reference import label_shift as twin
from tests.small_benchmarks import FOLDER


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("label_shift")


def drawn(shares: list[float], n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (n, 2) around one corner of a triangle for each class, and their labels."""
    draws = np.random.default_rng(seed)
    y = draws.choice(3, n, p=shares)
    corners = np.array([[0.0, 0.0], [2.0, 0.0], [1.0, 1.7]])
    return torch.tensor(corners[y] + draws.normal(size=(n, 2))), torch.tensor(y)


def posterior(x: Tensor, prior: Tensor) -> Tensor:
    """The true class probabilities of such points, where classes have these shares -> (n, 3)."""
    corners = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 1.7]], dtype=x.dtype)
    return (prior.log() - torch.cdist(x, corners).square() / 2).softmax(dim=1)


def test_em_is_the_plain_loop_and_its_first_step_the_mean(shift: Any) -> None:
    p = torch.rand(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p /= p.sum(dim=1, keepdim=True)
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    for steps in (1, 2, 7):
        wanted = twin.em(p.tolist(), prior.tolist(), steps)
        assert shift.em(p, prior, steps).tolist() == pytest.approx(wanted)
    assert shift.em(p, prior, 1).tolist() == pytest.approx(p.mean(dim=0).tolist())


def test_em_by_hand(shift: Any) -> None:
    """Three images at .9 and one at .1: (.1 + .8q)^3 (.9 - .8q) is largest at q = 2.6 / 3.2."""
    p = torch.tensor([[0.9, 0.1]] * 3 + [[0.1, 0.9]], dtype=torch.float64)
    even = torch.full((2,), 0.5, dtype=torch.float64)
    assert shift.em(p, even).tolist() == pytest.approx([0.8125, 0.1875], abs=1e-6)
    assert shift.em(p[[0, 0, 3, 3]], even).tolist() == pytest.approx([0.5, 0.5])


def test_bbse_by_hand(shift: Any) -> None:
    """Right in 8 of 10 cases of each class: .68 predicted as one class comes of .8 of it."""
    J = torch.tensor([[0.4, 0.1], [0.1, 0.4]])
    assert shift.bbse(J, torch.tensor([0.68, 0.32])).tolist() == pytest.approx([0.8, 0.2])
    assert shift.bbse(J, torch.tensor([0.5, 0.5])).tolist() == pytest.approx([0.5, 0.5])
    assert shift.bbse(J, torch.tensor([0.9, 0.1])).tolist() == pytest.approx([1.0, 0.0])
    drawn_to_the_sources = shift.bbse(J, torch.tensor([0.68, 0.32]), ridge=1e6)
    assert drawn_to_the_sources.tolist() == pytest.approx([0.5, 0.5], abs=1e-4)


def test_bbse_and_rlls_are_plain_loops(shift: Any) -> None:
    draws = np.random.default_rng(2)
    y = [*range(3), *draws.integers(0, 3, 60).tolist()]
    label = [c if draws.random() < 0.8 else int(draws.integers(3)) for c in y]
    target = draws.choice(3, 50, p=[0.6, 0.3, 0.1]).tolist()
    J = shift.confusion(torch.eye(3)[label], torch.tensor(y))
    mu = torch.bincount(torch.tensor(target), minlength=3).double() / 50
    assert shift.bbse(J, mu).tolist() == pytest.approx(twin.bbse(label, y, target, 3))
    for ridge in (1e-3, 0.1):
        wanted = twin.rlls(J.numpy(), mu.numpy(), ridge)
        assert shift.bbse(J, mu, ridge).tolist() == pytest.approx(wanted.tolist())


def test_a_class_that_is_never_predicted_does_not_stop_bbse(shift: Any) -> None:
    q = shift.bbse(torch.tensor([[0.5, 0.5], [0.0, 0.0]]), torch.tensor([1.0, 0.0]))
    assert q.tolist() == pytest.approx([0.5, 0.5])


def test_both_find_shares_where_classes_look_alike_everywhere(shift: Any) -> None:
    prior, true = [0.4, 0.4, 0.2], torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    even = torch.tensor(prior, dtype=torch.float64)
    x, y = drawn(prior, 4000, 1)
    new, _ = drawn(true.tolist(), 4000, 2)
    p, there = posterior(new, even), posterior(x, even)
    mu = shift.confusion(p, torch.zeros(len(p), dtype=torch.long)).sum(dim=1)
    first = shift.distance(shift.em(p, even, 1), true)
    for q in (shift.em(p, even), shift.bbse(shift.confusion(there, y), mu)):
        assert shift.distance(q, true) < 0.05 < first / 2
    assert shift.distance(torch.tensor([0.5, 0.5]), torch.tensor([0.8, 0.2])) == pytest.approx(0.3)
    exact = posterior(new, true)
    assert torch.allclose(class_shares.corrected(p, true, even), exact)


def test_calibration_undoes_a_scale_and_a_bias(shift: Any) -> None:
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    x, y = drawn([1 / 3] * 3, 6000, 3)
    log_p = posterior(x, even).log()
    wrong = (4 * log_p + torch.tensor([1.0, 0.0, -1.0])).log_softmax(dim=1)
    t, b = shift.bcts(wrong, y)
    assert float(t) == pytest.approx(0.25, abs=0.02)
    assert (b - b.mean()).tolist() == pytest.approx([-0.25, 0.0, 0.25], abs=0.08)
