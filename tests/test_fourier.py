"""Random Fourier features: the kernel, MMD and its gradient, up to approximation errors."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedda.maths import fourier
from fedda.train import generator
from tests.reference import fourier as twin

SIGMAS = (0.5, 1.0, 2.0)


def domains() -> tuple[Tensor, Tensor]:
    """Draw two clouds of points that overlap."""
    g = generator("domains")
    S = torch.randn(12, 3, generator=g, dtype=torch.float64)
    T = torch.randn(9, 3, generator=g, dtype=torch.float64) * 0.7 + 0.8
    return S, T


def frequencies(M: int, seed: int = 0) -> Tensor:
    return fourier.frequencies(3, M, 1.0, SIGMAS, generator(seed)).double()


def exchanged(S: Tensor, T: Tensor, W: Tensor) -> Tensor:
    """Return the witness that both sides know after a sync."""
    parts = [fourier.half_gradient(S, W, "source"), fourier.half_gradient(T, W, "target")]
    return fourier.witness(parts[0] + parts[1])


# ---- features ----------------------------------------------------------------------------------


def test_features_by_hand() -> None:
    """With the frequencies (0, pi) and (pi / 2, 0), both angles of the point (1, .5) are pi / 2."""
    W = torch.tensor([[0.0, math.pi], [math.pi / 2, 0.0]])
    found = fourier.embed(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), W)
    half = 1 / math.sqrt(2)
    expected = torch.tensor([[0.0, 0.0, half, half], [-half, half, 0.0, 0.0]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_kernel_by_hand() -> None:
    # |x - y|^2 = 2: exp(-2 / (2 * 1)) = exp(-1), and exp(-2 / (2 * 4)) = exp(-1/4)
    x, y = [0.0, 0.0], [1.0, 1.0]
    wanted = (math.exp(-1) + math.exp(-0.25)) / 2
    assert twin.kernel(x, y, (1.0, 2.0)) == pytest.approx(wanted)
    W = fourier.frequencies(2, 200_000, 1.0, (1.0, 2.0), generator("kernel"))
    phi = fourier.embed(torch.tensor([x, y]), W)
    assert float(phi[0] @ phi[1]) == pytest.approx(wanted, abs=0.01)


def test_the_gradient_of_the_features_mmd_is_exact() -> None:
    """For any W: twice the gradient with w held fixed is the gradient of |mu_S - mu_T|^2."""
    S, T = (z.requires_grad_() for z in domains())
    W = frequencies(40)
    difference = fourier.mean_embedding(S, W) - fourier.mean_embedding(T, W)
    wanted = torch.autograd.grad(difference @ difference, [S, T])
    w = exchanged(S, T, W)
    torch.testing.assert_close(w, difference.detach())
    parts = fourier.mapping_loss(S, W, w, "source") + fourier.mapping_loss(T, W, w, "target")
    found = torch.autograd.grad(parts, [S, T])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
        assert b.norm() > 0.01


def test_mmd_by_hand() -> None:
    """For points 0 and 1 and sigma 1, k(s, s) + k(t, t) - 2 k(s, t) = 2 - 2 exp(-1/2)."""
    wanted = 2 - 2 * math.exp(-0.5)
    assert twin.mmd2([[0.0]], [[1.0]], (1.0,)) == pytest.approx(wanted)
    # d/ds = -2 k'(s, t) = -2 exp(-1/2) (t - s): it pulls s towards t
    assert twin.mmd2_gradient([[0.0]], [[1.0]], (1.0,)) == [
        [pytest.approx(-2 * math.exp(-0.5) * 1.0)]
    ]


# ---- as a discriminator ------------------------------------------------------------------------


def test_the_mean_and_the_witness_pass_no_gradient_to_the_encoder() -> None:
    E = nn.Linear(3, 3).double()
    (S, T), W = domains(), frequencies(20)
    assert not fourier.half_gradient(E(S), W, "source").requires_grad
    w = fourier.witness(fourier.mean_embedding(E(S), W))
    fourier.mapping_loss(T, W, w, "target")  # w depends on E, but the loss must not reach E
    loss = fourier.mapping_loss(T.requires_grad_(), W, w, "target")
    assert torch.autograd.grad(loss, list(E.parameters()), allow_unused=True) == (None, None)


# ---- the scale ---------------------------------------------------------------------------------


def test_median_by_hand() -> None:
    # points 0, 3, 4 and 10 of a line: distances 3, 4, 10, 1, 7, 6, the lower median is 4
    z = torch.tensor([[0.0], [3.0], [4.0], [10.0]])
    assert fourier.median_distance(z) == 4.0


@pytest.mark.parametrize("n", [2, 7, 30])
def test_median_matches_the_reference(n: int) -> None:
    z = torch.randn(n, 4, generator=generator("median", n))
    assert fourier.median_distance(z) == pytest.approx(twin.median_distance(z.tolist()), rel=1e-5)
