"""FedAvg's weights and FedProx's penalty, against their references and by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedda.algorithms import fedavg, fedprox
from fedda.config.sections import validate
from fedda.errors import ConfigError
from tests.reference import averaging


def test_weights_by_hand():
    # 30 of 30 + 10 + 60 = 100 examples, and so on
    assert fedavg.weights(torch.tensor([30, 10, 60])).tolist() == pytest.approx([0.3, 0.1, 0.6])
    assert fedavg.weights(torch.tensor([30, 10]), "uniform").tolist() == [0.5, 0.5]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8).filter(any))
def test_weights_match_the_reference(counts: list[int]):
    found = fedavg.weights(torch.tensor(counts))
    assert found.tolist() == pytest.approx(averaging.weights(counts), rel=1e-12)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)


def test_weights_are_equal_if_no_site_has_examples():
    assert fedavg.weights(torch.tensor([0, 0])).tolist() == [0.5, 0.5]


def test_the_penalty_matches_the_reference_and_pulls_towards_the_anchor():
    generator = torch.Generator().manual_seed(0)
    w = [torch.randn(n, generator=generator, requires_grad=True) for n in (3, 7)]
    anchor = [torch.randn(n, generator=generator, requires_grad=True) for n in (3, 7)]
    pull = fedprox.proximal(w, anchor, 0.3)
    twin = averaging.proximal([a.tolist() for a in w], [a.tolist() for a in anchor], 0.3)
    assert pull.item() == pytest.approx(twin, rel=1e-6)
    pull.backward()
    for at, start in zip(w, anchor, strict=True):
        torch.testing.assert_close(at.grad, 0.3 * (at - start).detach())
        assert start.grad is None


def test_the_penalty_refuses_models_of_different_length():
    with pytest.raises(ValueError, match="longer"):
        fedprox.proximal([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)], 1.0)


def test_configuration():
    assert fedavg.Config().flat() == {"weighting": "examples"}
    assert fedprox.Config().flat() == {"weighting": "examples", "mu": 0.01}
    with pytest.raises(ConfigError, match="mu"):
        validate(fedprox.Config, {"mu": -1.0})
