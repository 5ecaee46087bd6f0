"""f-WDGRL over four sites: a critic with extra steps estimates a Wasserstein distance."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import Discriminator
from fedda.train import generator
from tests.adversarial_runs import assert_as_in_one_place, cases
from tests.local_grid import Node


@cases((3, False))
def test_four_sites_compute_the_same_as_one_plain_loop(
    domains: list[Node], tmp_path: Path, p: int, pairs: bool
) -> None:
    assert_as_in_one_place(domains, tmp_path, "fwdgrl", p, pairs)


def test_a_bounded_critic_gives_what_one_plain_loop_gives(
    domains: list[Node], tmp_path: Path
) -> None:
    assert_as_in_one_place(domains, tmp_path, "fwdgrl", 3, False, loss="spectral")


def test_the_bound_divides_layers_that_are_too_long_and_no_others() -> None:
    """Singular values 3 and 2 become 1 and 2/3; 0.5 and 0.25 stay, and so do the biases."""
    DI = Discriminator(2, (2,))
    first, last = DI.layers[0], DI.layers[2]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    first.weight.data, last.weight.data = (
        torch.diag(torch.tensor([3.0, 2.0])),
        torch.tensor([[0.3, 0.4]]),
    )
    biases = [layer.bias.clone() for layer in (first, last)]
    discriminators.bound(DI)
    torch.testing.assert_close(first.weight.data, torch.diag(torch.tensor([1.0, 2 / 3])))
    torch.testing.assert_close(last.weight.data, torch.tensor([[0.3, 0.4]]))
    assert all(torch.equal(b, layer.bias) for b, layer in zip(biases, (first, last), strict=True))


@pytest.mark.parametrize("shape", [(1, 7), (100, 256), (256, 100)])
def test_the_spectral_norm_is_the_largest_singular_value(shape: tuple[int, int]) -> None:
    W = torch.randn(shape, generator=generator("W"))
    torch.testing.assert_close(discriminators.spectral_norm(W), torch.linalg.svdvals(W)[0])
