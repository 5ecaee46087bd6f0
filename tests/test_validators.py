"""Infomax: against a naive twin, and by hand."""

import math

import pytest
import torch

from clients.site.output_privacy import infomax
from fedda.train import generator
from tests.reference import validators as twin


def test_sure_and_balanced_predictions_have_the_best_value_and_one_class_for_all_none() -> None:
    assert infomax(torch.eye(3)[[0, 1, 2] * 4]) == pytest.approx(math.log(3), abs=1e-5)
    assert infomax(torch.eye(3)[[1] * 12]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_infomax_equals_its_twin(seed: int) -> None:
    p = (3 * torch.randn(40, 4, generator=generator("validators", seed))).softmax(dim=1)
    assert infomax(p) == pytest.approx(twin.infomax(p.double().tolist()), abs=1e-5)
