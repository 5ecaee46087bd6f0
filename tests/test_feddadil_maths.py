"""FedDaDiL's formulas besides transport: against naive references, by hand, symmetries."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedda import models
from fedda.algorithms import feddadil
from fedda.config import ModelConfig
from tests.reference import feddadil as twin

SMALL = feddadil.Config(samples=12, atoms=2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def model(name: str, shape: tuple[int, ...], classes: int, **more: str) -> dict[str, np.ndarray]:
    return models.to_arrays(models.build(ModelConfig(name=name, **more), shape, classes, 0))  # type: ignore[arg-type]


# Rounds and settings


# Atoms


def test_first_atoms_lie_where_the_head_predicts_their_class():
    arrays = model("identity", (40,), 4)
    z, y = feddadil.initial_atoms(arrays, SMALL, seed=0)
    assert z.shape == (2, 12, 40) and y.shape == (2, 12, 4)
    assert z.dtype == y.dtype == np.float32
    assert (z**2).sum(axis=2).mean() == pytest.approx(1, rel=1e-5)
    assert y.sum(axis=2) == pytest.approx(1) and y.max(axis=2) == pytest.approx(0.925)
    label = np.arange(12) % 4
    assert (y.argmax(axis=2) == label).all()
    w = arrays["head.weight"] - arrays["head.weight"].mean(axis=0)
    assert ((z @ w.T).argmax(axis=2) == label).mean() > 0.9
    # Points with the same index are near each other, so the atoms start aligned.
    apart = np.linalg.norm(z[0][:, None] - z[1][None], axis=2)
    assert (apart.argmin(axis=1) == np.arange(12)).all()
    again, _ = feddadil.initial_atoms(arrays, SMALL, seed=0)
    other, _ = feddadil.initial_atoms(arrays, SMALL, seed=1)
    assert np.array_equal(z, again) and not np.array_equal(z, other)


@pytest.mark.parametrize(("delta", "gamma"), [(0.0, 1.0), (1.5, 0.5), (-0.7, -1.2)])
def test_moments_behind_a_batchnorm_and_a_relu(delta: float, gamma: float):
    arrays = {
        "encoder.1.running_mean": np.zeros(2),
        "encoder.1.bias": np.array([delta, 0.0]),
        "encoder.1.weight": np.array([gamma, 2.0]),
    }
    mean, std = feddadil._feature_moments(arrays, 6)
    wanted = twin.rectified(delta, abs(gamma))
    assert (mean[0], std[0]) == pytest.approx(wanted, abs=1e-5)
    assert np.ptp(mean[:3]) == np.ptp(mean[3:]) == 0  # three features of each channel, in order
    assert mean[3] == pytest.approx(2 / math.sqrt(2 * math.pi))


def test_the_mean_of_versions_matches_the_reference():
    versions = [
        {"z": draw(2, 3, 4, seed=s).numpy(), "y": draw(2, 3, 2, seed=9 + s).softmax(2).numpy()}
        for s in range(3)
    ]
    found = feddadil.mean_atoms(versions, [1.0] * 3)
    twice = feddadil.mean_atoms(versions, [2, 1, 1])
    for name in "zy":
        each = [v[name].ravel().tolist() for v in versions]
        wanted = twin.mean([each[0], *each])
        assert twice[name].ravel().tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        wanted = twin.mean(each)
        assert found[name].ravel().tolist() == pytest.approx(wanted, rel=1e-6)
        assert found[name].dtype == np.float32
    assert found["y"].sum(axis=2) == pytest.approx(1)


def test_a_random_sites_atoms_keep_their_variance_and_their_mean_does_not():
    """Two sites have moved points -1 and 1 crosswise: the mean of the versions is 0, variance 0."""
    z, y = np.array([[[-1.0], [1.0]]]), np.array([[[0.5, 0.5], [0.5, 0.5]]])
    versions = [{"z": z, "y": y}, {"z": -z, "y": y}]
    assert (feddadil.mean_atoms(versions, [1, 1])["z"] == 0).all()
    counts = [0, 0]
    for seed in range(40):
        found = feddadil.drawn_atoms(versions, torch.Generator().manual_seed(seed))
        place = int(found["z"][0, 0, 0] > 0)
        assert np.array_equal(found["z"], versions[place]["z"])
        assert found["z"].var() == 1 and found["z"].dtype == np.float32
        counts[place] += 1
    assert sum(counts) == 40 and min(counts) > 8


# Labels and coordinates


def test_the_gradient_for_logits_matches_autograd():
    v = draw(2, 5, 3).requires_grad_()
    g = draw(2, 5, 3, seed=1)
    (wanted,) = torch.autograd.grad((v.softmax(dim=2) * g).sum(), v)
    torch.testing.assert_close(feddadil.logit_gradient(v.softmax(dim=2).detach(), g), wanted)


# Scaling


def test_scaling_by_hand():
    x = torch.tensor([[3.0, 4.0], [5.0, 12.0]])  # |x|^2 is 25 and 169: mean 97
    scalar = feddadil.scaling(x, "scalar")
    torch.testing.assert_close(scalar(x), x / math.sqrt(97))
    each = feddadil.scaling(x, "dimension")
    torch.testing.assert_close(each(x), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) / math.sqrt(2))
    torch.testing.assert_close(feddadil.scaling(x, "none")(x), x)
    constant = torch.tensor([[1.0, 7.0], [3.0, 7.0]])
    assert feddadil.scaling(constant, "dimension")(constant).isfinite().all()


@pytest.mark.parametrize("form", ["scalar", "dimension"])
def test_scaled_points_have_a_mean_square_of_one(form):
    x = draw(50, 6) * 7 + 3
    found = feddadil.scaling(x, form)(x)
    assert float(found.square().sum(dim=1).mean()) == pytest.approx(1)


@pytest.mark.parametrize("form", ["scalar", "dimension", "none"])
def test_heads_give_the_same_for_features_as_for_scaled_points(form):
    x, W, b = draw(9, 6) * 3 + 1, draw(2, 4, 6, seed=1), draw(2, 4, seed=2)
    scale, alpha = feddadil.scaling(x, form), torch.tensor([0.3, 0.7], dtype=torch.float64)
    raw = feddadil.unscaled(W, b, scale)
    torch.testing.assert_close(
        feddadil.ensemble(x, *raw, alpha), feddadil.ensemble(scale(x), W, b, alpha)
    )


# Heads


def test_the_ensemble_matches_the_reference():
    x, W, b = draw(5, 3), draw(2, 4, 3, seed=1), draw(2, 4, seed=2)
    alpha = torch.tensor([0.25, 0.75], dtype=torch.float64)
    found = feddadil.ensemble(x, W, b, alpha)
    for point, p in zip(x.tolist(), found.tolist(), strict=True):
        wanted = twin.ensemble(point, W.tolist(), b.tolist(), alpha.tolist())
        assert p == pytest.approx(wanted)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(5, dtype=torch.float64))


def test_the_gradient_is_zero_at_fitted_heads():
    z, y = draw(2, 40, 3), draw(2, 40, 4, seed=1).softmax(dim=2)
    W, b = feddadil.fit_heads(z, y, decay=0.01, steps=200)
    size = float(z.square().sum(dim=2).mean().sqrt())
    for k in range(2):  # each head is fitted separately, so its residuals balance its own decay
        p = (z[k] @ W[k].T + b[k]).softmax(dim=1)
        slope = (p - y[k]).T @ (z[k] / size) / 40 + 0.01 * W[k] * size
        torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            (p - y[k]).mean(dim=0), torch.zeros(4, dtype=torch.float64), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("form", ["scalar", "dimension", "none"])
def test_a_head_for_features_is_the_same_for_points(form):
    x, W, b = draw(9, 6) * 3 + 1, draw(4, 6, seed=1), draw(4, seed=2)
    scale = feddadil.scaling(x, form)
    W_z, b_z = feddadil.scaled(W, b, scale)
    torch.testing.assert_close(scale(x) @ W_z.T + b_z, x @ W.T + b)
    back = feddadil.unscaled(W_z[None], b_z[None], scale)
    torch.testing.assert_close(back[0][0], W)
    torch.testing.assert_close(back[1][0], b)


# Distillation


@pytest.mark.parametrize("spc", [1, 3, 20])
def test_the_distilled_set_has_so_many_points_of_each_class(spc: int):
    z, y = feddadil.initial_atoms(model("identity", (5,), 4), SMALL, seed=0)
    alpha = torch.tensor([0.4, 0.6])
    found, labels = feddadil.distilled(torch.from_numpy(z), torch.from_numpy(y), alpha, spc)
    assert found.shape == (4 * spc, 5) and labels.shape == (4 * spc, 4)
    assert labels.argmax(dim=1).bincount().tolist() == [spc] * 4
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(4 * spc))
