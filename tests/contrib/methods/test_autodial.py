"""AutoDIAL: the layers, a step against the joint loss in one place, and what crosses."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedda import models
from fedda.config import ModelConfig
from fedda.contrib.methods.autodial import algorithm as autodial
from fedda.contrib.methods.autodial.algorithm import Aligned, layers, mixture
from fedda.contrib.methods.autodial.client import bounded
from fedda.contrib.methods.autodial.strategy import joined
from fedda.errors import ConfigError, QuorumError
from tests.contrib.methods.test_fact import batches_of
from tests.local_grid import CLASSES, EXAMPLES, SOURCES, Bench, Node, assert_close, never, sent_by
from tests.reference import autodial as twin

STEP: dict[str, Any] = {
    "train__batch_size": 1000,  # a round is one step
    "train__momentum": 0.0,
    "train__schedule": "constant",
    "train__weight_decay": 0.01,
    "rounds": 3,
}


def extended(name: str = "mlp", d: tuple[int, ...] = (5,)) -> models.Model:
    config = ModelConfig(name=name, hidden="6" if name == "mlp" else "")
    return models.build(config, d, 3, seed=0, extension=models.Extension("autodial", {}))


def test_the_mixture_by_hand() -> None:
    """Halves at 0 and 2, each with variance 1: mean 1, and the variance gains 1."""
    half, zero, one, two = (torch.tensor([v]) for v in (0.5, 0.0, 1.0, 2.0))
    assert [t.item() for t in mixture(zero, one, two, one, half)] == [1.0, 2.0]
    assert [t.item() for t in mixture(zero, one, two, one, one)] == [0.0, 1.0]


@pytest.mark.parametrize("shape", [(7, 3), (4, 3, 2, 2)])
def test_the_layer_is_that_of_plain_loops(shape: tuple[int, ...]) -> None:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=draws)
    like = nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)
    layer = Aligned(like).train()
    layer.alpha.data.fill_(0.7)
    layer.target_mean.copy_(torch.tensor([0.5, -1.0, 0.0]))
    layer.target_square.copy_(torch.tensor([2.0, 3.0, 0.5]))
    layer.mixes = True
    found = layer(x)
    for c in range(3):
        mean, square = float(layer.target_mean[c]), float(layer.target_square[c])
        wanted = twin.normalise(x[:, c].flatten().tolist(), mean, square, 0.7, layer.eps)
        assert found[:, c].flatten().tolist() == pytest.approx(wanted, abs=1e-5)


def test_without_the_other_side_it_is_batchnorm() -> None:
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(3))
    like = nn.BatchNorm1d(3)
    layer = Aligned(copy.deepcopy(like))
    assert torch.allclose(layer.train()(x), like.train()(x), atol=1e-6)
    like.running_mean, like.running_var = torch.ones(3), torch.full((3,), 4.0)
    layer.running_mean, layer.running_var = torch.ones(3), torch.full((3,), 4.0)
    assert torch.equal(layer.eval()(x), like.eval()(x))
    # a tenth of the way from mean 0 and second moment 1
    assert torch.allclose(layer.source_mean, 0.1 * x.mean(dim=0), atol=1e-6)
    assert torch.allclose(layer.source_square, 0.9 + 0.1 * (x**2).mean(dim=0), atol=1e-6)
    assert torch.equal(layer.target_square, torch.ones(3))


def test_the_entropy_is_that_of_plain_loops() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = autodial.entropy(logits).item()
    assert found == pytest.approx(twin.entropy(logits.tolist()))
    assert autodial.entropy(torch.zeros(2, 4)).item() == pytest.approx(1.386294)  # ln 4


def test_alpha_stays_within_its_bounds_and_never_decays() -> None:
    model = extended()
    (plain, apart) = model.groups(0.1)
    assert apart["weight_decay"] == 0 and "weight_decay" not in plain
    assert [id(p) for p in apart["params"]] == [id(layer.alpha) for layer in layers(model)]

    class Site:
        """A client as far as `bounded` knows it."""

        def __init__(self) -> None:
            self.model = model

    optimizer = bounded(Site(), torch.optim.SGD(model.groups(0.1), lr=1.0))  # type: ignore[arg-type]
    for grad, wanted in ((100.0, 0.5), (-100.0, 1.0)):
        layers(model)[0].alpha.grad = torch.tensor([grad])
        optimizer.step()
        assert layers(model)[0].alpha.item() == wanted


def test_a_network_without_batchnorm_is_refused() -> None:
    with pytest.raises(ConfigError, match="this network has none that learns"):
        extended("lenet", (1, 28, 28))


def in_one_place(
    model: models.Model, nodes: dict[str, Node], mixes: bool, weight: float
) -> dict[str, Tensor]:
    """One step of SGD on the joint loss, with the other side's moments as constants."""
    total = sum(EXAMPLES[name] for name in SOURCES)
    optimizer = torch.optim.SGD(model.groups(0.05), lr=0.05, weight_decay=0.01)
    for name in (*SOURCES, "town"):
        ((x, y),) = batches_of(nodes[name], 1000)
        for layer in layers(model):
            layer.side, layer.mixes = "target" if y is None else "source", mixes
        kept = {n: t.clone() for n, t in model.named_buffers()}
        logits = model.train()(x)
        if y is None:
            loss = weight * autodial.entropy(logits)
        else:
            loss = EXAMPLES[name] / total * F.cross_entropy(logits, y)
        loss.backward()  # the gradients add up
        model.load_state_dict(kept, strict=False)  # all sites begin with the same moments
    optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["late", "constant"])
def test_one_step_per_round_is_a_step_on_the_joint_loss(domains: list[Node], schedule: str) -> None:
    """The entropy counts from the second half on: a random network is not made sure."""
    growing = [0.0, 0.0, 0.1 * (2 * 2 / 3 - 1)]
    bench = Bench(domains, "autodial", **STEP, autodial__schedule=schedule)
    nodes = {str(node["name"]): node for node in domains}
    extension = models.Extension("autodial", {})
    alphas = []
    for server_round in (1, 2, 3):
        start = models.build(bench.task.model, bench.task.dims, CLASSES, 0, extension)
        models.load_arrays(start, bench.model)
        found, numbers = bench.round(server_round)
        weight = growing[server_round - 1] if schedule == "late" else 0.1
        wanted = in_one_place(start, nodes, server_round > 1, weight)
        parameters = {n: found[n] for n in wanted if not n.endswith("alpha")}
        expected = {n: t.numpy() for n, t in wanted.items() if not n.endswith("alpha")}
        assert_close(parameters, expected, 1e-5)
        alphas.append(next(float(a[0]) for n, a in found.items() if n.endswith("alpha")))
        assert numbers["loss"] > 0 and 0 < numbers["entropy"] < 3
    assert alphas[0] == 1.0 and 0.5 <= alphas[2] <= 1.0
    assert set(bench.strategy.weights) == {*SOURCES}


def test_the_next_model_has_each_sides_moments_and_the_targets_mixture(domains: list[Node]) -> None:
    bench = Bench(domains, "autodial", **STEP)
    found, _ = bench.round()
    name = next(n for n in found if n.endswith("alpha")).removesuffix("alpha")
    target, anna = (sent_by(bench, site) for site in ("town", "anna"))
    assert_close({"m": found[f"{name}target_mean"]}, {"m": target[f"{name}target_mean"]}, 1e-6)
    total = sum(EXAMPLES[site] for site in SOURCES)
    mean = sum(
        EXAMPLES[site] / total * sent_by(bench, site)[f"{name}source_square"] for site in SOURCES
    )
    assert_close({"m": found[f"{name}source_square"]}, {"m": mean}, 1e-6)
    # alpha is 1, so the target predicts with its own moments alone
    assert_close({"m": found[f"{name}running_mean"]}, {"m": target[f"{name}target_mean"]}, 1e-6)
    assert (anna[f"{name}target_mean"] == 0).all()


def test_real_sites_take_moments_that_data_has(domains: list[Node], tmp_path: Path) -> None:
    real = [n | {"state-dir": str(tmp_path), "audited": True} for n in domains]
    bench = Bench(real, "autodial")
    bench.round()
    for name in [n for n in bench.model if n.endswith(("_mean", "_square"))]:
        bench.model[name] = bench.model[name] + np.float32(50)
    bench.round(2)
    assert all(reply.has_content() for reply in bench.grid.replies)


def test_the_server_mixes_the_moments_by_alpha() -> None:
    arrays = {n: a.copy() for n, a in models.to_arrays(extended()).items()}
    layer = next(n for n in arrays if n.endswith("alpha")).removesuffix("alpha")
    target = {n: a.copy() for n, a in arrays.items()}
    sources = {n: a.copy() for n, a in arrays.items()}
    sources[f"{layer}alpha"][:] = 0.75
    sources[f"{layer}source_mean"][:], sources[f"{layer}source_square"][:] = 4.0, 17.0
    target[f"{layer}target_mean"][:], target[f"{layer}target_square"][:] = 0.0, 1.0
    model = joined(sources, arrays, target)
    # mean 4 / 4, second moment 3 / 4 + 17 / 4
    assert model[f"{layer}running_mean"].tolist() == pytest.approx([1.0] * 6)
    assert model[f"{layer}running_var"].tolist() == pytest.approx([4.0] * 6)


def test_a_round_needs_the_target(domains: list[Node]) -> None:
    bench = Bench(domains, "autodial", {"town": never}, wait__train=0.5)
    with pytest.raises(QuorumError, match=r"town \(target\) gave no usable reply"):
        bench.round()
