"""Methods that add layers to the model: built, sent, trained, saved, loaded, exported, refused."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from clients import fedavg as clients
from clients.site.request import Numbers
from fedda import data, models, plugins, records
from fedda.algorithms import fedavg
from fedda.cli.predict import rows as predicted
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import Code, ConfigError, ModelError
from fedda.methods import Method, Phase
from fedda.models import BatchNorm, Extension, Model, batchnorms, predict
from fedda.models.answers import answers
from tests import test_plugins
from tests.local_grid import Bench, Node, ScriptedGrid, run, stop_after

pytestmark = pytest.mark.usefixtures("fresh_sites")

Install = test_plugins.Install
install = test_plugins.install

MLP, SHAPE, CLASSES = ModelConfig(name="mlp", hidden="16"), (1, 8, 8), 4
WIDTH = 6


class Narrow(fedavg.Config):
    """How many features the bottleneck leaves."""

    width: int = WIDTH


def add_bottleneck(model: Model, settings: Mapping[str, Any]) -> None:
    """Add a linear layer and BatchNorm between encoder and head."""
    d, classes = settings["width"], model.head.out_features
    narrow = nn.Linear(model.width, d, bias=False)  # BatchNorm would cancel a bias
    model.encoder = nn.Sequential(model.encoder, narrow, nn.BatchNorm1d(d))
    model.head = nn.Linear(d, classes)


class Mixed(nn.Module):
    """BatchNorm with a learnt mixture of batch statistics and running statistics."""

    def __init__(self, norm: BatchNorm) -> None:
        super().__init__()
        self.norm = norm
        self.share = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        n, share = self.norm, self.share.sigmoid()
        fixed = F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, False, 0.0, n.eps)
        return share * n(x) + (1 - share) * fixed


def mix_statistics(model: Model, settings: Mapping[str, Any]) -> None:
    """Replace every BatchNorm with a mixture."""
    for name, norm in batchnorms(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Mixed(norm))


def add_head(model: Model, settings: Mapping[str, Any]) -> None:
    """Add a second head on the same features."""
    model.second = nn.Linear(model.width, model.head.out_features)


class TwoHeaded(clients.Source):
    """Trains both heads."""

    def train(self) -> Numbers:
        optimizer, total, steps = self.optimizer(), 0.0, 0
        for indices in self.batches():
            z, y = self.features(indices), self.labels(indices)
            second = cast(nn.Linear, self.model.second)
            loss = F.cross_entropy(self.model.head(z), y) + F.cross_entropy(second(z), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        return {"loss": total / steps, "steps": steps}


PHASES = (Phase("train", {"train": fedavg.TRAIN}),)
PLAIN: Any = (fedavg.Config, PHASES)
NONE: Any = lambda options: {}  # noqa: E731
OF_WIDTH: Any = lambda options: {"width": options.width}  # noqa: E731
NARROW: Any = ("bottleneck", "Bottleneck", Narrow, PHASES)
BOTTLENECK = Method(*NARROW, extend=add_bottleneck, extension=OF_WIDTH)
MIXING = Method("mixing", "Mixing", *PLAIN, extend=mix_statistics, extension=NONE)
TWO_HEADS = Method("two-heads", "Two heads", *PLAIN, extend=add_head, extension=NONE)
METHODS = {m.name: m for m in (BOTTLENECK, MIXING, TWO_HEADS)}

# The entries that each method adds to the model.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
ADDED = {
    "bottleneck": {
        "encoder.1.weight",
        *(f"encoder.2.{name}" for name in ("weight", "bias", *STATISTICS)),
    },
    "mixing": {"encoder.2.share"},
    "two-heads": {"second.weight", "second.bias"},
}


@pytest.fixture
def add(install: Install) -> Install:
    """Install the methods above as other packages would provide them."""

    def package(name: str, method: str, **modules: str) -> None:
        here = f"from tests.test_extensions import {method} as METHOD"
        entries = {"methods": f"{name} = {package_of(name)}"}
        install(package_of(name), entries, {"__init__": "", "algorithm": here, **modules})

    package("bottleneck", "BOTTLENECK")
    package("mixing", "MIXING")
    source = "from tests.test_extensions import TwoHeaded as Source"
    package("two-heads", "TWO_HEADS", client=f"from clients.fedavg import Target\n{source}")
    return package


def package_of(name: str) -> str:
    return f"{name.replace('-', '_')}_package"


def extension(name: str) -> Extension:
    method = METHODS[name]
    found = Extension.of(method, method.config())
    assert found is not None
    return found


def plain_name(name: str, entry: str) -> str:
    """Return the name of an extended model's entry in a model without the extension."""
    if name == "bottleneck":
        return entry.replace("encoder.0.", "encoder.", 1)
    return entry.replace(".norm.", ".") if name == "mixing" else entry


every = pytest.mark.parametrize("name", METHODS)


@every
def test_the_same_seed_gives_the_same_weights(add: Install, name: str) -> None:
    def weights(seed: int) -> dict[str, np.ndarray]:
        state = torch.random.get_rng_state()
        made = models.to_arrays(models.build(MLP, SHAPE, CLASSES, seed, extension(name)))
        assert torch.random.get_rng_state().equal(state)  # torch's own generator is not used
        return {n: a.copy() for n, a in made.items()}

    first, again, other = weights(3), weights(3), weights(4)
    assert {n: a.tobytes() for n, a in first.items()} == {n: a.tobytes() for n, a in again.items()}
    drawn = [n for n in ADDED[name] if n.endswith("weight") and first[n].ndim > 1]
    assert all(first[n].tobytes() != other[n].tobytes() for n in [*drawn, "head.weight"])

    # Entries that the method does not add are the same as without the method.
    plain = models.to_arrays(models.build(MLP, SHAPE, CLASSES, 3))
    replaced = {"head.weight", "head.bias"} if name == "bottleneck" else set()
    kept = [n for n in first if n not in ADDED[name] | replaced]
    assert {plain_name(name, n) for n in kept} == set(plain) - replaced
    for entry in kept:
        np.testing.assert_array_equal(first[entry], plain[plain_name(name, entry)])


@every
def test_only_the_pretrained_layers_learn_slowly(add: Install, name: str) -> None:
    config = ModelConfig(name="resnet18", weights="somewhere.pth")
    model = models.blank(config, (3, 32, 32), CLASSES, extension(name))
    slow, fast = model.groups(0.1)
    assert (slow["lr"], fast["lr"]) == (0.1, 1.0)
    names = {id(p): n for n, p in model.named_parameters()}
    found = {names[id(p)] for p in fast["params"]}
    wanted = {"head.weight", "head.bias"}
    if name == "mixing":
        wanted |= {n for n in names.values() if n.endswith(".share")}
        assert len(wanted) == 2 + 20
    else:
        wanted |= {n for n in ADDED[name] if n in names.values()}
        assert len(wanted) > 2
    assert found == wanted
    assert len(slow["params"]) + len(fast["params"]) == len(names)


def test_settings_that_cannot_be_saved_are_refused() -> None:
    with pytest.raises(ModelError, match=r"bottleneck extends a model with .*; use plain"):
        Extension("bottleneck", {"width": {1, 2}})
    with pytest.raises(ModelError, match="plain numbers"):
        Extension("bottleneck", {"width": float("nan")})
    assert Extension("a", {"sizes": (1, 2)}) == Extension("a", {"sizes": [1, 2]})


@pytest.fixture
def settings(tmp_path: Path, name: str) -> dict[str, Any]:
    return {"run.dir": str(tmp_path / "runs"), "method": name, "run.name": name}


@every
def test_a_run_trains_saves_loads_and_predicts(
    add: Install, domains: list[Node], name: str, settings: dict[str, Any]
) -> None:
    results, _ = run(domains, settings)
    assert results["events"] == []
    (training,) = results["trainings"][name]
    model, about = models.load(training["model"])
    assert about.extension == model.extension == extension(name) and not model.training
    assert models.describe(training["model"]) == about
    start = models.to_arrays(models.build(MLP, SHAPE, CLASSES, 0, extension(name)))
    found = load_file(training["model"])
    assert set(found) == set(start)
    assert all(found[entry].tobytes() != start[entry].tobytes() for entry in ADDED[name])

    # The saved model gives the same answers as the run's last model, bit for bit.
    ended = models.build(MLP, SHAPE, CLASSES, 5, extension(name)).eval()
    models.load_arrays(ended, found)
    tests = data.load_evaluation(domains[-1]["data"], classes=tuple("0123"))
    assert tests is not None
    p = predict(model, tests.x)
    assert p.numpy().tobytes() == predict(ended, tests.x).numpy().tobytes()
    assert training["final_accuracy"] == float((p.argmax(dim=1) == tests.y).double().mean())

    # So does `fedda predict`, up to the digits that it prints.
    model, data_at = Path(training["model"]), Path(domains[-1]["data"])
    said = answers(model, data_at, 16, torch.device("cpu"), data.Reading())
    rows = list(predicted(*said))
    shown = {tuple(f"{value:.6g}" for value in each) for each in p.tolist()}
    assert len(shown) > 1 and {tuple(row[3:]) for row in rows} >= shown


@every
def test_a_stopped_run_goes_on_bit_for_bit(
    add: Install, domains: list[Node], name: str, settings: dict[str, Any]
) -> None:
    whole, _ = run(domains, settings | {"run.name": "whole"})
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, stop_after(1))
    again, events = run(domains, settings | {"run.resume": True})
    assert [e["round"] for e in events if e["event"] == "round"] == [2]
    files = [Path(r["trainings"][name][0]["model"]).read_bytes() for r in (whole, again)]
    assert files[0] == files[1]


@every
def test_the_next_run_can_start_from_an_extended_model(
    add: Install, domains: list[Node], name: str, settings: dict[str, Any]
) -> None:
    first, _ = run(domains, settings)
    start = {"run.start-from": str(Path(settings["run.dir"]) / name)}
    grid = ScriptedGrid(domains)
    run(domains, settings | start | {"run.name": "second", "rounds": 1}, grid=grid)
    sent = (records.read(request.content)[0] for request in grid.requests)
    arrays = next(arrays["model"] for arrays in sent if "model" in arrays).unpack()
    ended = load_file(first["trainings"][name][0]["model"])
    assert {n: a.tobytes() for n, a in arrays.items()} == {n: a.tobytes() for n, a in ended.items()}

    for other in ("fedavg", next(m for m in METHODS if m != name)):
        wrong = settings | start | {"method": other, "run.name": other}
        with pytest.raises(
            ConfigError, match=f"has the layers of {name} .*, but {other} trains one"
        ):
            run(domains, wrong)
        assert not list(Path(settings["run.dir"], other).glob("*/checkpoint.json"))
    run(domains, settings | {"method": "fedavg", "run.name": "plain"})
    with pytest.raises(ConfigError, match=f"has no layers of a method's own, but {name} trains"):
        plain = {"run.start-from": str(Path(settings["run.dir"]) / "plain")}
        run(domains, settings | plain | {"run.name": "third"})


def test_a_model_with_other_settings_of_the_extension_is_refused(
    add: Install, domains: list[Node], tmp_path: Path
) -> None:
    settings = {"run.dir": str(tmp_path), "method": "bottleneck", "run.name": "first"}
    run(domains, settings)
    other = {"bottleneck.width": 5, "run.name": "second", "run.start-from": str(tmp_path / "first")}
    with pytest.raises(ConfigError, match=r'layers of bottleneck \{"width": 6\}.*\{"width": 5\}'):
        run(domains, settings | other)


def test_a_site_whose_method_adds_other_layers_refuses(
    add: Install,
    domains: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(domains, "two-heads")
    request = bench.begin()[0]
    other = replace(TWO_HEADS, extend=mix_statistics)
    real = plugins.method
    monkeypatch.setattr(plugins, "method", lambda m: other if m == "two-heads" else real(m))
    with caplog.at_level(logging.ERROR, "fedda.site"):
        reply = bench.call(request)
    assert reply.has_error() and reply.error.code == Code.WIRE
    assert "not this run's model: it differs at encoder.2" in caplog.text


@every
def test_loading_a_model_without_its_method_says_what_to_install(
    add: Install, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    model = models.build(MLP, SHAPE, CLASSES, 0, extension(name))
    models.save(path, model, config=MLP, inputs=Inputs(SHAPE), classes="abcd")
    test_plugins.uninstall(tmp_path, package_of(name))
    with pytest.raises(ModelError, match=f"layers of the method {name}, which is not installed"):
        models.load(path)
    assert models.describe(path).extension == extension(name)
