"""FedDaDiL's formulas besides transport: against naive references, by hand, symmetries."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedda import models
from fedda.algorithms import feddadil
from fedda.config import ModelConfig
from fedda.errors import ConfigError
from fedda.maths import atom_heads
from fedda.maths.mixture import Mixture
from fedda.settings import RunConfig, Task
from fedda.wire import packing
from fedda.wire.packing import Kind
from tests.reference import feddadil as twin

SMALL = feddadil.Config(samples=12, atoms=2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def model(name: str, shape: tuple[int, ...], classes: int, **more: str) -> dict[str, np.ndarray]:
    return models.to_arrays(models.build(ModelConfig(name=name, **more), shape, classes, 0))  # type: ignore[arg-type]


def test_the_first_rounds_train_the_encoder():
    share = feddadil.Config(encoder_share=0.5)
    assert [share.encoder_rounds(rounds) for rounds in (1, 2, 5, 20)] == [0, 1, 2, 10]
    assert feddadil.Config(encoder_share=0.0).encoder_rounds(7) == 0


def test_a_task_does_not_contain_the_servers_paths():
    def task(**settings: str) -> Task:
        config = RunConfig.parse({"method": "feddadil", "feddadil.encoder-share": 0.3} | settings)
        return config.task("feddadil", 0, (1, 8, 8), ("a", "b"), 4)

    assert task().schedule == "encoder 12, dictionary 28"
    started = task(**{"run.start-from": "/home/operator/runs/digits"})
    assert started.schedule == "dictionary 40"  # with a finished encoder, FedAvg has no rounds
    assert not [value for value in started.flat().values() if "operator" in str(value)]


def test_the_number_of_points_that_cross():
    assert feddadil.Config(samples=50, batch_size=20).travelling == 50
    assert feddadil.Config(samples=50, batch_size=20, travel="batch").travelling == 20
    assert feddadil.Config(samples=50, batch_size=0, travel="batch").travelling == 50
    assert feddadil.Config(samples=50, batch_size=80).step_size == 50


def test_the_layout_follows_from_the_settings_and_the_models_width():
    manifest = packing.pack(model("identity", (7,), 4), Kind.MODEL).manifest
    options = feddadil.Config(samples=50, batch_size=20, atoms=3, travel="batch")
    part = feddadil.layout(options, manifest, whole=False)
    assert [(e.name, e.shape) for e in part.entries] == [("z", (3, 20, 7)), ("y", (3, 20, 4))]
    whole = feddadil.layout(options, manifest, whole=True)
    assert sum(e.size for e in whole.entries) == 3 * 50 * (7 + 4)  # eq. 13


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


def test_first_atoms_are_near_the_features_of_a_trained_batchnorm():
    """They are nearer to the features than noise of the same size is."""
    network = models.build(ModelConfig(name="mlp", hidden="32"), (10,), 3, 0)
    x = torch.randn(400, 10, generator=torch.Generator().manual_seed(1))
    for _ in range(50):  # let the running statistics settle
        network.features(x)
    with torch.no_grad():
        found = network.eval().features(x)
    features = atom_heads.scaling(found, "scalar")(found)
    z, _ = feddadil.initial_atoms(models.to_arrays(network), SMALL, seed=0)
    noise = np.random.default_rng(0).standard_normal(z.shape[1:]).astype(np.float32)
    noise /= math.sqrt((noise**2).sum(axis=1).mean())
    near, far = (torch.cdist(torch.from_numpy(a), features).min(dim=1)[0] for a in (z[0], noise))
    assert near.mean() < 0.9 * far.mean()


def test_atoms_need_a_point_of_each_class():
    with pytest.raises(ConfigError, match="samples is 12, but there are 13 classes"):
        feddadil.initial_atoms(model("identity", (7,), 13), SMALL, 0)


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


def test_logits_of_labels():
    y = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    v = feddadil.logits_of(y)
    assert v.isfinite().all()
    torch.testing.assert_close(v.softmax(dim=1), y, atol=2e-6, rtol=0)
    assert twin.softmax(v[0].tolist()) == pytest.approx([0.25, 0.75])


# Labels and coordinates


def test_the_gradient_for_logits_matches_autograd():
    v = draw(2, 5, 3).requires_grad_()
    g = draw(2, 5, 3, seed=1)
    (wanted,) = torch.autograd.grad((v.softmax(dim=2) * g).sum(), v)
    torch.testing.assert_close(feddadil.logit_gradient(v.softmax(dim=2).detach(), g), wanted)


def test_first_coordinates_lie_around_the_middle():
    g = torch.Generator().manual_seed(0)
    found = torch.stack([feddadil.first_coordinates(3, g) for _ in range(2000)])
    torch.testing.assert_close(found.sum(dim=1), torch.ones(2000))
    torch.testing.assert_close(found.mean(dim=0), torch.full((3,), 1 / 3), atol=0.02, rtol=0)
    # A part of a uniform draw has the variance (K - 1) / (K^2 (K + 1)) = 1 / 18. First coordinates
    # deviate from the middle by three tenths of such a draw.
    wanted = torch.full((3,), 0.09 / 18)
    torch.testing.assert_close(found.var(dim=0), wanted, atol=5e-4, rtol=0)
    assert found.min() > 0.2


# Scaling


def test_scaling_by_hand():
    x = torch.tensor([[3.0, 4.0], [5.0, 12.0]])  # |x|^2 is 25 and 169: mean 97
    scalar = atom_heads.scaling(x, "scalar")
    torch.testing.assert_close(scalar(x), x / math.sqrt(97))
    each = atom_heads.scaling(x, "dimension")
    torch.testing.assert_close(each(x), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) / math.sqrt(2))
    torch.testing.assert_close(atom_heads.scaling(x, "none")(x), x)
    constant = torch.tensor([[1.0, 7.0], [3.0, 7.0]])
    assert atom_heads.scaling(constant, "dimension")(constant).isfinite().all()


@pytest.mark.parametrize("form", ["scalar", "dimension"])
def test_scaled_points_have_a_mean_square_of_one(form):
    x = draw(50, 6) * 7 + 3
    found = atom_heads.scaling(x, form)(x)
    assert float(found.square().sum(dim=1).mean()) == pytest.approx(1)


@pytest.mark.parametrize("form", ["scalar", "dimension", "none"])
def test_heads_give_the_same_for_features_as_for_scaled_points(form):
    x, W, b = draw(9, 6) * 3 + 1, draw(2, 4, 6, seed=1), draw(2, 4, seed=2)
    scale, alpha = atom_heads.scaling(x, form), torch.tensor([0.3, 0.7], dtype=torch.float64)
    raw = atom_heads.unscaled(W, b, scale)
    torch.testing.assert_close(
        atom_heads.ensemble(x, *raw, alpha), atom_heads.ensemble(scale(x), W, b, alpha)
    )


# Heads


def test_the_ensemble_matches_the_reference():
    x, W, b = draw(5, 3), draw(2, 4, 3, seed=1), draw(2, 4, seed=2)
    alpha = torch.tensor([0.25, 0.75], dtype=torch.float64)
    found = atom_heads.ensemble(x, W, b, alpha)
    for point, p in zip(x.tolist(), found.tolist(), strict=True):
        wanted = twin.ensemble(point, W.tolist(), b.tolist(), alpha.tolist())
        assert p == pytest.approx(wanted)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(5, dtype=torch.float64))


def test_the_gradient_is_zero_at_fitted_heads():
    z, y = draw(2, 40, 3), draw(2, 40, 4, seed=1).softmax(dim=2)
    W, b = atom_heads.fit_heads(z, y, decay=0.01, steps=200)
    size = float(z.square().sum(dim=2).mean().sqrt())
    for k in range(2):  # each head is fitted separately, so its residuals balance its own decay
        p = (z[k] @ W[k].T + b[k]).softmax(dim=1)
        slope = (p - y[k]).T @ (z[k] / size) / 40 + 0.01 * W[k] * size
        torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            (p - y[k]).mean(dim=0), torch.zeros(4, dtype=torch.float64), atol=1e-5, rtol=0
        )


def test_anchored_heads_balance_their_distance_from_the_anchor():
    z, y = draw(2, 40, 3), draw(2, 40, 4, seed=1).softmax(dim=2)
    anchor = draw(4, 3, seed=2), draw(4, seed=3)
    W, b = atom_heads.fit_heads(z, y, decay=0.01, steps=200, anchor=anchor)
    size = float(z.square().sum(dim=2).mean().sqrt())
    wanted = twin.head_gradient(z[1].tolist(), y[1].tolist(), W[1].tolist(), b[1].tolist())
    slope = torch.tensor(wanted) / size + 0.01 * (W[1] - anchor[0]) * size
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-5, rtol=0)
    stiff = atom_heads.fit_heads(z, y, decay=1e6, steps=200, anchor=anchor)[0]
    torch.testing.assert_close(stiff, anchor[0].expand(2, 4, 3), atol=1e-4, rtol=0)


def test_an_anchor_that_explains_all_points_stays_by_hand():
    """At W = (ln 3, 0) and z = 1 the probabilities are 3 / 4 and 1 / 4, as the labels say."""
    z, y = torch.ones(1, 1, 1), torch.tensor([[[0.75, 0.25]]])
    anchor = torch.tensor([[math.log(3)], [0.0]]), torch.zeros(2)
    W, b = atom_heads.fit_heads(z, y, decay=0.1, anchor=anchor)
    torch.testing.assert_close(W[0], anchor[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(b[0], anchor[1], atol=1e-5, rtol=0)
    from_zero, _ = atom_heads.fit_heads(z, y, decay=0.1)
    assert float(from_zero[0, 0, 0]) < 0.7  # the decay pulls the other way


@pytest.mark.parametrize("form", ["scalar", "dimension", "none"])
def test_a_head_for_features_is_the_same_for_points(form):
    x, W, b = draw(9, 6) * 3 + 1, draw(4, 6, seed=1), draw(4, seed=2)
    scale = atom_heads.scaling(x, form)
    W_z, b_z = atom_heads.scaled(W, b, scale)
    torch.testing.assert_close(scale(x) @ W_z.T + b_z, x @ W.T + b)
    back = atom_heads.unscaled(W_z[None], b_z[None], scale)
    torch.testing.assert_close(back[0][0], W)
    torch.testing.assert_close(back[1][0], b)


def test_a_mixture_head_matches_the_ensemble():
    x, W, b = draw(5, 3).float(), draw(2, 4, 3, seed=1).float(), draw(2, 4, seed=2).float()
    for alpha in (torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0])):
        head = Mixture(2, 3, 4)
        head.load_state_dict({"weight": W, "bias": b, "alpha": alpha})
        torch.testing.assert_close(head(x).softmax(dim=1), atom_heads.ensemble(x, W, b, alpha))


# Distillation


@pytest.mark.parametrize("spc", [1, 3, 20])
def test_the_distilled_set_has_so_many_points_of_each_class(spc: int):
    z, y = feddadil.initial_atoms(model("identity", (5,), 4), SMALL, seed=0)
    alpha = torch.tensor([0.4, 0.6])
    found, labels = feddadil.distilled(torch.from_numpy(z), torch.from_numpy(y), alpha, spc)
    assert found.shape == (4 * spc, 5) and labels.shape == (4 * spc, 4)
    assert labels.argmax(dim=1).bincount().tolist() == [spc] * 4
    torch.testing.assert_close(labels.sum(dim=1), torch.ones(4 * spc))


def test_with_one_sample_per_class_each_is_the_mean_of_its_class():
    """Each sample takes a quarter of the atom's mass, which is exactly its class."""
    z, y = feddadil.initial_atoms(model("identity", (5,), 4), SMALL, seed=0)
    alpha = torch.tensor([1.0, 0.0])
    found, _ = feddadil.distilled(torch.from_numpy(z), torch.from_numpy(y), alpha, 1)
    wanted = torch.from_numpy(z[0]).reshape(3, 4, 5).mean(dim=0)
    torch.testing.assert_close(found, wanted)
