"""Training in bfloat16, channels last, compiled, with accumulated and clipped gradients."""

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedda
from fedda import models, plugins
from fedda.config import ModelConfig, TrainConfig
from fedda.errors import ModelError
from fedda.models import Arithmetic, inputs_of
from fedda.train import Paced, make_optimizer, paced
from tests.asking import make_source, task_of
from tests.local_grid import SETTINGS, Node, run

SHAPE = (1, 8, 8)
FAST: dict[str, Any] = {"train.precision": "bfloat16", "train.layout": "channels-last"}
FEW: dict[str, Any] = {"train.accumulate": 2, "train.clip": 1.0, "rounds": 2}


def network(arithmetic: Arithmetic | None = None) -> models.Model:
    made = models.build(ModelConfig(name="digit-cnn"), SHAPE, 4, seed=0)
    made.compute(arithmetic or Arithmetic())
    return made.train()


def images(n: int = 12) -> Tensor:
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(1))


def gradient(model: models.Model) -> Tensor:
    torch.manual_seed(0)
    F.cross_entropy(model(images()), torch.arange(12) % 4).backward()
    return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])


def test_bfloat16_changes_products_and_nothing_else() -> None:
    model, exact = network(Arithmetic("bfloat16")), network()
    with inputs_of([*models.batchnorms(model).values()]) as seen:
        z = model.features(images())
    assert {x.dtype for x in seen.values()} == {torch.bfloat16}
    assert z.dtype == torch.float32
    assert not torch.equal(z, exact.features(images()))
    torch.testing.assert_close(z, network().features(images()), rtol=0.05, atol=0.05)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    optimizer = make_optimizer(model.parameters(), TrainConfig(), 0.1)
    gradient(model)
    optimizer.step()
    assert {w.grad.dtype for w in model.parameters() if w.grad is not None} == {torch.float32}
    held = [s["momentum_buffer"].dtype for s in optimizer.state.values()]
    assert set(held) == {torch.float32}


def test_gradients_in_bfloat16_point_where_those_in_float32_do() -> None:
    exact, coarse = gradient(network()), gradient(network(Arithmetic("bfloat16")))
    assert F.cosine_similarity(exact, coarse, dim=0) > 0.99
    assert not torch.equal(exact, coarse)


def test_what_is_not_differentiated_is_in_float32() -> None:
    with torch.no_grad():
        torch.testing.assert_close(
            network(Arithmetic("bfloat16"))(images()), network()(images()), rtol=0, atol=0
        )
    coarse = models.predict(network(Arithmetic("bfloat16")), images())
    assert torch.equal(coarse, models.predict(network(), images()))


def test_channels_last_keeps_values_and_names() -> None:
    last, usual = network(Arithmetic(layout="channels-last")), network()
    weight = next(last.encoder.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    for (name, a), (other, b) in zip(
        models.to_arrays(last).items(), models.to_arrays(usual).items(), strict=True
    ):
        assert name == other and (a == b).all()
    torch.testing.assert_close(gradient(last), gradient(usual), rtol=1e-3, atol=1e-4)


def test_predictions_have_the_same_values_in_either_layout() -> None:
    first, last = network(), network(Arithmetic(layout="channels-last"))
    p, q = models.predict(first, images()), models.predict(last, images())
    assert not torch.equal(p, torch.full_like(p, 0.25))
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_site_lays_images_out_as_is_faster_on_its_device() -> None:
    names = ("lenet", "resnet18", "timm:resnet18", "of-another-package")
    found = [models.layout_of(ModelConfig(name=name)) for name in names]
    assert found == ["channels-last", "channels-last", "auto", "channels-first"]
    for layout in ("channels-first", "channels-last"):
        assert {models.layout_of(ModelConfig(name=name), layout, 10**9) for name in names} == {
            layout
        }
    assert models.layout_of(ModelConfig(name="lenet"), pixels=64 * 224 * 224) == "channels-first"
    seen: list[bool] = []

    def encoder(x: Tensor) -> Tensor:
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return x

    x = torch.rand(2, 3, 4, 4)
    for device in ("cpu", "meta"):  # meta stands for a GPU
        Arithmetic(layout="auto")(cast(nn.Module, encoder), x.to(device))
    with torch.no_grad():
        Arithmetic(layout="auto")(cast(nn.Module, encoder), x)
    assert seen == [True, False, True]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_gradient_that_would_write_past_its_memory_is_taken_channels_first(
    stride: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of oneDNN, for strided 1 x 1 convolutions of a few channels; such as a RepVGG's first."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 1, stride), nn.Conv2d(16, 4, 1, 2))
    given = Arithmetic(layout="channels-last").suit(layers)
    assert given.layout == ("channels-first" if stride > 1 else "channels-last")
    assert ("has no effect: the network has a strided" in caplog.text) == (stride > 1)
    made = models.build(ModelConfig(name="timm:repvgg_a0"), (3, 64, 64), 4, seed=0)
    assert made.arithmetic.layout == "channels-first"


def test_weights_of_more_dimensions_stay_as_they_are() -> None:
    volume, image = nn.Conv3d(1, 2, 3), nn.Conv2d(20, 4, 3)
    Arithmetic(layout="channels-last").prepare(nn.Sequential(volume, image))
    assert volume.weight.is_contiguous()
    assert image.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("batch", "layout"), [(64, "channels-last"), (65_536, "channels-first")])
def test_a_step_that_batchnorm_would_add_up_too_coarsely_is_channels_first(
    batch: int, layout: str, tmp_path: Path
) -> None:
    site = make_source(tmp_path, 64)  # of 8 x 8 pixels
    asked = {"method": "fedavg", "model.name": "digit-cnn", "train.batch-size": batch}
    assert site.workspace(task_of(site, asked)).model.arithmetic.layout == layout


class Viewing(nn.Module):
    """A network whose `view` fails where channels are last, as networks of users often have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return z.view(len(z), -1)


def test_a_network_of_a_user_that_needs_channels_first_trains(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"set train\.layout to channels-first"):
        Arithmetic(layout="channels-last")(Viewing(), torch.rand(2, 3, 8, 8))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (12, 3, 8, 8), dtype=np.uint8), np.arange(12) % 2
    run = fedda.simulate(
        {"a": (x, y), "b": (x, None)},
        target="b",
        network=lambda shape: Viewing(),
        rounds=1,
        dir=tmp_path / "run",
        quiet=True,
    )
    assert len(run.model.predict(x)) == 12


class Uncompiled(RuntimeError):
    """What torch.compile raises in these tests."""


def test_without_a_compiler_there_is_a_warning_and_the_same_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> Any:
        raise Uncompiled("no C++ compiler")

    monkeypatch.setattr(torch, "compile", fail)
    model = network(Arithmetic(compiled=True))
    with caplog.at_level(logging.WARNING, "fedda.site"):
        assert torch.equal(gradient(model), gradient(network()))
        model.zero_grad()
        gradient(model)
    assert caplog.text.count("--compile has no effect") == 1 and "no C++ compiler" in caplog.text


def test_a_compiled_encoder_runs_where_nothing_looks_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Tensor] = []

    def compiled(run: Any) -> Any:
        return lambda x: calls.append(x) or run(x)

    monkeypatch.setattr(torch, "compile", compiled)
    model = network(Arithmetic(compiled=True))
    model(images())
    assert len(calls) == 1
    with torch.no_grad():
        model(images())
    with inputs_of([*models.batchnorms(model).values()]) as seen:
        model(images())
    assert len(calls) == 1 and len(seen) == 3
    assert list(model.state_dict()) == list(network().state_dict())


@pytest.mark.nightly("fedda/models")
@pytest.mark.filterwarnings("ignore")
def test_a_really_compiled_encoder_computes_the_same() -> None:
    model = network(Arithmetic(compiled=True))
    torch.testing.assert_close(gradient(model), gradient(network()), rtol=1e-3, atol=1e-4)


# ---- accumulation and clipping -----------------------------------------------------------------


def weight(value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def steps(w: nn.Parameter, optimizer: torch.optim.Optimizer, slopes: list[float]) -> list[float]:
    """Steps whose losses have these slopes -> the weight after each."""
    values = []
    for slope in slopes:
        optimizer.zero_grad()
        (slope * w).sum().backward()
        optimizer.step()
        values.append(float(w.detach()))
    return values


def test_the_weight_moves_by_the_mean_of_accumulated_gradients_by_hand() -> None:
    w = weight()
    optimizer = paced(torch.optim.SGD([w], lr=1.0), TrainConfig(accumulate=2))
    assert isinstance(optimizer, Paced)
    assert steps(w, optimizer, [1.0, 3.0, 6.0, 2.0, 5.0]) == [0, -2, -2, -6, -6]
    optimizer.settle()
    assert float(w.detach()) == -11
    optimizer.settle()
    assert float(w.detach()) == -11


def test_a_gradient_is_clipped_after_it_was_averaged_by_hand() -> None:
    w = weight()
    optimizer = paced(torch.optim.SGD([w], lr=1.0), TrainConfig(accumulate=2, clip=1.5))
    assert steps(w, optimizer, [1.0, 3.0, 0.5, 0.5]) == pytest.approx([0, -1.5, -1.5, -2.0])


def test_the_norm_is_that_of_all_parameters() -> None:
    a, b = weight(), weight()
    optimizer = paced(torch.optim.SGD([{"params": [a]}, {"params": [b]}], 1.0), TrainConfig(clip=1))
    (3 * a + 4 * b).sum().backward()
    optimizer.step()
    assert [float(a.detach()), float(b.detach())] == pytest.approx([-0.6, -0.8])


def test_accumulation_equals_a_larger_batch_without_batchnorm() -> None:
    x, y = torch.rand(8, 3), torch.arange(8) % 2
    small, large = (nn.Linear(3, 2) for _ in range(2))
    small.load_state_dict(large.state_dict())
    config = TrainConfig(accumulate=2)
    one = make_optimizer(large.parameters(), config, 0.1)
    two = paced(make_optimizer(small.parameters(), config, 0.1), config)
    for _ in range(3):
        one.zero_grad()
        F.cross_entropy(large(x), y).backward()
        one.step()
        for part in (slice(0, 4), slice(4, 8)):
            two.zero_grad()
            F.cross_entropy(small(x[part]), y[part]).backward()
            two.step()
    torch.testing.assert_close(small.weight, large.weight)


def test_the_defaults_leave_the_optimizer_as_it_is() -> None:
    optimizer = torch.optim.SGD([weight()], lr=1.0)
    assert paced(optimizer, TrainConfig()) is optimizer


def test_its_state_is_that_of_the_optimizer_inside() -> None:
    w, config = weight(), TrainConfig(accumulate=2)
    before = paced(make_optimizer([w], config, 0.1), config)
    steps(w, before, [1.0, 2.0])
    after = paced(make_optimizer([w], config, 0.5), config)
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["lr"] == 0.1
    assert after.state[w]["momentum_buffer"] == before.state[w]["momentum_buffer"]


# ---- every method ------------------------------------------------------------------------------


def about(method: str) -> Any:
    """Three methods in the gate; each other one once its files change."""
    own = (f"clients/{method}.py", f"fedda/contrib/methods/{method}")
    files = ("fedda/models", "clients/base.py", "clients/site/trainer.py", *own)
    inside = method in ("kd3a", "fdann", "feddadil")
    return method if inside else pytest.param(method, marks=pytest.mark.nightly(*files))


@pytest.mark.parametrize("method", [about(method) for method in plugins.own_methods()])
def test_every_method_trains_so(method: str, domains: list[Node], tmp_path: Path) -> None:
    settings = {"method": method, "run.dir": str(tmp_path)} | SETTINGS.get(method, {}) | FAST | FEW
    if method != "centring":  # for which a mean of images would be a picture of them
        settings |= {"model.name": "digit-cnn", "model.hidden": ""}
    results, _ = run(domains, settings)
    assert not results["events"], results["events"]
    (training,) = results["trainings"][method]
    model, _ = models.load(training["model"])
    values = [t for t in model.state_dict().values() if t.is_floating_point()]
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in values)


@pytest.mark.parametrize("change", [{"train.precision": "bfloat16"}, {"train.accumulate": 2}])
def test_a_setting_reaches_the_sites(
    change: dict[str, Any], domains: list[Node], tmp_path: Path
) -> None:
    losses, found = [], []
    for place, more in enumerate(({}, change)):
        settings = {"method": "fedavg", "run.dir": str(tmp_path / str(place)), "rounds": 2} | more
        results, _ = run(domains, settings)
        (training,) = results["trainings"]["fedavg"]
        losses.append(training["rounds"][-1]["loss"])
        found.append(models.to_arrays(models.load(training["model"])[0])["head.weight"])
    assert (found[0] != found[1]).any()
    assert losses[0] == pytest.approx(losses[1], rel=0.6)
