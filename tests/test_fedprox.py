"""FedProx: FedAvg whose sources are pulled towards the model that the server sent."""

from typing import Any

import pytest
import torch
from torch import nn

from fedda.algorithms.fedprox import proximal
from tests.local_grid import Bench, Node


def test_the_penalty_by_hand() -> None:
    """mu/2 (1 + 4 + 9) with mu = 3; the gradient is mu times the difference to the anchor."""
    w, b = nn.Parameter(torch.tensor([2.0, 4.0])), nn.Parameter(torch.tensor(-1.0))
    anchor = [torch.tensor([1.0, 2.0]), torch.tensor(2.0)]
    penalty = proximal([w, b], anchor, 3.0)
    assert penalty.item() == pytest.approx(3 / 2 * (1 + 4 + 9))
    penalty.backward()
    assert w.grad is not None and w.grad.tolist() == [3.0, 6.0]
    assert b.grad is not None and b.grad.item() == -9.0


def test_without_the_penalty_it_is_fedavg(domains: list[Node]) -> None:
    plain, _ = Bench(domains, "fedavg").round()
    model, _ = Bench(domains, "fedprox", fedprox__mu=0.0).round()
    assert all(model[n].tobytes() == plain[n].tobytes() for n in plain)


def test_sources_stay_nearer_to_the_model_that_was_sent(domains: list[Node]) -> None:
    def moved(**settings: Any) -> float:
        bench = Bench(domains, "fedprox", **settings)
        start = bench.model
        model, _ = bench.round()
        weights = [n for n in model if n.endswith(("weight", "bias"))]
        return float(sum(((model[n] - start[n]) ** 2).sum() for n in weights))

    assert moved(fedprox__mu=2.0) < 0.9 * moved(fedprox__mu=0.0)
