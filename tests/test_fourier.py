"""Random Fourier features: the kernel, MMD and its gradient, up to approximation errors."""

import math

import pytest
import torch
from torch import Tensor, nn

from fedda.adversarial import discriminators
from fedda.maths import fourier
from fedda.train import generator
from tests.reference import fourier as twin

SIGMAS = (0.5, 1.0, 2.0)


def spread(M: int) -> tuple[float, float, float]:
    """Return the errors (RMS) of kernel, MMD^2 and its gradient over ten draws of M frequencies."""
    S, T = domains()
    exact = torch.tensor([[twin.kernel(s, t, SIGMAS) for t in T.tolist()] for s in S.tolist()])
    mmd2 = twin.mmd2(S.tolist(), T.tolist(), SIGMAS)
    slopes = [
        torch.tensor(twin.mmd2_gradient(a.tolist(), b.tolist(), SIGMAS), dtype=torch.float64)
        for a, b in ((S, T), (T, S))
    ]
    errors = torch.zeros(3, dtype=torch.float64)
    for seed in range(10):
        W = frequencies(M, seed)
        w = exchanged(S, T, W)
        kernel = fourier.embed(S, W) @ fourier.embed(T, W).T
        errors[0] += ((kernel - exact) ** 2).mean()
        errors[1] += (w @ w - mmd2) ** 2
        for z, role, slope in zip((S, T), ("source", "target"), slopes, strict=True):
            x = z.clone().requires_grad_()
            (found,) = torch.autograd.grad(fourier.mapping_loss(x, W, w, role), x)  # type: ignore[arg-type]
            errors[2] += ((found - slope) ** 2).sum() / (slope**2).sum() / 2
    kernel, distance, gradient = (errors / 10).sqrt().tolist()
    return kernel, distance / mmd2, gradient


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


def test_no_witness_is_longer_than_two_mean_embeddings() -> None:
    g = torch.tensor([3.0, 4.0])
    assert torch.allclose(fourier.witness(g), torch.tensor([-1.2, -1.6]))
    assert torch.equal(fourier.witness(g / 5), -g / 5)


def test_features_by_hand() -> None:
    """With the frequencies (0, pi) and (pi / 2, 0), both angles of the point (1, .5) are pi / 2."""
    W = torch.tensor([[0.0, math.pi], [math.pi / 2, 0.0]])
    found = fourier.embed(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), W)
    half = 1 / math.sqrt(2)
    expected = torch.tensor([[0.0, 0.0, half, half], [-half, half, 0.0, 0.0]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_every_embedding_has_length_1() -> None:
    S, _ = domains()
    torch.testing.assert_close(
        fourier.embed(S, frequencies(7)).norm(dim=1), torch.ones(12, dtype=torch.float64)
    )


def test_bandwidths_share_the_frequencies() -> None:
    W = fourier.frequencies(40, 3000, 2.0, (0.5, 5.0), generator("W"))  # sigma 1 and 10
    assert W.shape == (3000, 40)
    assert float(W[0::2].std()) == pytest.approx(1.0, rel=0.02)
    assert float(W[1::2].std()) == pytest.approx(0.1, rel=0.02)
    assert fourier.frequencies(40, 3000, 2.0, (0.5, 5.0), generator("W")).equal(W)
    twice = fourier.frequencies(40, 3000, 4.0, (0.5, 5.0), generator("W"))
    torch.testing.assert_close(2 * twice, W)


def test_kernel_by_hand() -> None:
    # |x - y|^2 = 2: exp(-2 / (2 * 1)) = exp(-1), and exp(-2 / (2 * 4)) = exp(-1/4)
    x, y = [0.0, 0.0], [1.0, 1.0]
    wanted = (math.exp(-1) + math.exp(-0.25)) / 2
    assert twin.kernel(x, y, (1.0, 2.0)) == pytest.approx(wanted)
    W = fourier.frequencies(2, 200_000, 1.0, (1.0, 2.0), generator("kernel"))
    phi = fourier.embed(torch.tensor([x, y]), W)
    assert float(phi[0] @ phi[1]) == pytest.approx(wanted, abs=0.01)


def test_more_features_approximate_mmd_and_its_gradient_better() -> None:
    few, some, many = spread(30), spread(480), spread(7680)
    for a, b, c in zip(few, some, many, strict=True):
        # 16 times the frequencies give a quarter of the error, here within the noise of ten draws
        assert 2.2 < a / b < 7 and 2.2 < b / c < 7
    assert many[0] < 0.01 and many[1] < 0.05 and many[2] < 0.1


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


def test_the_gradient_of_the_reference_is_its_derivative() -> None:
    S, T = (z[:4].tolist() for z in domains())
    slope, h = twin.mmd2_gradient(S, T, SIGMAS), 1e-6
    for i in range(4):
        for j in range(3):
            up, down = ([row[:] for row in S] for _ in range(2))
            up[i][j] += h
            down[i][j] -= h
            change = twin.mmd2(up, T, SIGMAS) - twin.mmd2(down, T, SIGMAS)
            assert slope[i][j] == pytest.approx(change / (2 * h), abs=1e-7)


def test_mean_embeddings_are_the_gradients_of_a_linear_discriminator() -> None:
    """They are the gradients of the critic's halves at any w; the best w is the witness."""
    (S, T), W = domains(), frequencies(20)
    DI = nn.Linear(40, 1, bias=False).double()
    for z, role in ((S, "source"), (T, "target")):
        half = discriminators.HALVES["wassda", role]  # type: ignore[index]
        loss = half.discriminator(DI(fourier.embed(z, W)).squeeze(1))
        found = fourier.half_gradient(z, W, role)  # type: ignore[arg-type]
        torch.testing.assert_close(discriminators.flat_gradient(loss, DI), found)
    w = exchanged(S, T, W).requires_grad_()
    mu = [fourier.mean_embedding(z, W) for z in (S, T)]
    (at_best,) = torch.autograd.grad(-(w @ (mu[0] - mu[1])) + w @ w / 2, w)
    assert float(at_best.abs().max()) < 1e-12


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


def test_median_uses_only_the_first_of_many_features() -> None:
    z = torch.randn(fourier.PAIRED + 50, 2, generator=generator("many"))
    assert fourier.median_distance(z) == fourier.median_distance(z[: fourier.PAIRED])
