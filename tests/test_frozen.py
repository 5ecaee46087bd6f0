"""Networks whose pretrained part stays as it is: what learns, what crosses, what sites compute."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from flwr.app import Message
from torch import Tensor

from clients import fedavg
from clients.app import make_app
from clients.policy.gate import Gate
from clients.policy.rules import Limits, Policy
from clients.policy.sizes import check_parameters
from clients.site.frozen import Frozen
from clients.site.memory import resident
from clients.site.request import Request
from fedda import data, models, plugins, records
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import Code, ModelError, PolicyError, RosterError
from fedda.models import export
from fedda.models.ready import ready
from fedda.settings import RunConfig, Task
from server.simulation import LocalGrid
from tests.local_grid import Bench, Node, run

LITE: dict[str, Any] = {"name": "efficientnet-lite0", "weights": "package"}
VIT = "timm:test_vit.r160_in1k"
RESNET = "timm:test_resnet.r160_in1k"
IMAGES = (3, 32, 32)
# Four sites over images of 32 pixels, of which a network gives 1,280 features.
ON_FEATURES: dict[str, Any] = {
    "model.name": LITE["name"],
    "model.weights": "package",
    "model.hidden": "",
    "model.train": "bottleneck",
    "model.bottleneck": 8,
    "input.size": 32,
    "rounds": 2,
}


def config(**given: Any) -> ModelConfig:
    return ModelConfig.model_validate(LITE | given)


def images(n: int = 4, shape: tuple[int, ...] = IMAGES) -> Tensor:
    return torch.rand((n, *shape), generator=torch.Generator().manual_seed(7))


def save_weights(name: str, folder: Path) -> Path:
    """Write a file of a network's random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name.startswith("timm:"):
            path = folder / f"{name.removeprefix('timm:')}.safetensors"
            network = ready(name, (160, 160)).network
            safetensors.torch.save_file(network.state_dict(), path)
        else:
            path = folder / f"{name}.pth"
            torch.save(getattr(torchvision.models, name)(weights=None).state_dict(), path)
    return path


NIGHTLY = pytest.mark.nightly("clients", "strategies", "fedda/algorithms", "fedda/models")


# ---- networks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("efficientnet-lite0", (3, 40, 33), marks=pytest.mark.slow),
        ("efficientnet-lite0", (1, 32, 32)),
        pytest.param("resnet18", IMAGES, marks=NIGHTLY),
        pytest.param("alexnet", (3, 64, 64), marks=NIGHTLY),
        pytest.param(VIT, (3, 160, 160), marks=pytest.mark.slow),
        (RESNET, (1, 40, 40)),
    ],
)
def test_a_cut_network_gives_the_whole_ones_features(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weights = "package" if name == LITE["name"] else str(save_weights(name, tmp_path))
    whole = models.build(config(name=name, weights=weights), shape, 5, seed=0).eval()
    assert whole.backbone is None
    x = images(3, shape)
    with torch.no_grad():
        wanted = whole.features(x)
        for train in ("last-block", "bottleneck"):
            kept = config(name=name, weights=weights, train=train)
            model = models.build(kept, shape, 5, seed=0).eval()
            part = models.backbone(kept, shape)
            made = part(x)
            torch.testing.assert_close(model.features(made), wanted, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(model.attach(part).features(x), wanted, rtol=1e-5, atol=1e-6)
            blank = models.blank(kept, shape, 5, device="meta")
            assert models.parameter_count(blank) == models.parameter_count(model)
            assert (
                models.parameter_count(model) < models.parameter_count(whole) or name == "alexnet"
            )
    assert model.width == whole.width == wanted.shape[1]
    assert set(model.state_dict()) == {"head.weight", "head.bias"}


def test_the_bottleneck_by_hand() -> None:
    """BatchNorm(W f + b), and dropout in training."""
    model = models.build(config(train="bottleneck", bottleneck=2, dropout=0.5), IMAGES, 3, seed=0)
    assert list(dict(model.encoder.named_children())) == ["network", "bottleneck"]
    f = images(4, (1280,))
    linear = model.encoder.get_submodule("bottleneck.linear")
    assert isinstance(linear, torch.nn.Linear)
    z = linear(f)
    torch.testing.assert_close(
        model.eval().features(f), z / (1 + 1e-5) ** 0.5
    )  # running mean 0, running variance 1
    dropped = model.train().features(f).detach()
    normed = (z - z.mean(dim=0)) / (z.var(dim=0, correction=0) + 1e-5) ** 0.5
    alive = dropped != 0
    assert 0 < alive.sum() < dropped.numel()
    torch.testing.assert_close(dropped[alive], 2 * normed[alive])  # dropout scales by 1 / (1 - .5)


def test_the_frozen_part_never_changes() -> None:
    kept = config(train="last-block")
    part = models.backbone(kept, IMAGES)
    model = models.build(kept, IMAGES, 3, seed=0).attach(part).train()
    before = part.digest()
    assert not part.training and not any(m.training for m in part.modules())
    model(images()).sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in part.parameters())
    assert part.digest() == before == models.digest(kept, IMAGES)
    assert not any(name.startswith("backbone") for name in model.state_dict())
    next(part.buffers()).add_(1)
    part.front.get_submodule("bn").get_buffer("running_mean").add_(1e-3)
    assert part.digest() != before


@pytest.mark.slow
def test_a_model_file_stands_alone(tmp_path: Path) -> None:
    weights = save_weights(RESNET, tmp_path)
    kept = ModelConfig(name=RESNET, weights=str(weights), train="bottleneck", bottleneck=4)
    model = models.build(kept, IMAGES, 3, seed=0).attach(models.backbone(kept, IMAGES)).eval()
    path = tmp_path / "model.safetensors"
    models.save(path, model, config=kept, inputs=Inputs(IMAGES), classes=("a", "b", "c"))
    weights.unlink()
    loaded, _ = models.load(path)
    assert torch.equal(models.predict(loaded, images()), models.predict(model, images()))
    done = export.export(path, tmp_path / "model.onnx")
    assert done.difference < 1e-6


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"weights": "none", "train": "bottleneck"},
            "would keep random weights; set model.weights",
        ),
        ({"weights": "best"}, "'best', which efficientnet-lite0 does not have; set it to package"),
        ({"name": "timm:resnetty18"}, "timm has no network 'resnetty18'; choose one of"),
        ({"name": "timm:test_resnet.r160_in1k", "weights": "package"}, "set it to default, none"),
        ({"name": "mlp"}, "mlp has no pretrained weights"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence.replace("(", r"\(")):
        models.build(config(**given), IMAGES, 3, seed=0)


# ---- at a site ---------------------------------------------------------------------------------


def task_of(kept: ModelConfig, frozen: str | None = None, shape: str = "3,32,32") -> Task:
    flat = RunConfig.parse({}).task("fedavg", 0, IMAGES, ["a", "b"], 4).flat()
    task = Task.parse(flat | {"shape": shape})
    digest = models.digest(kept, task.dims) if frozen is None else frozen
    return task.model_copy(update={"model": kept, "frozen": digest})


def unlabelled(n: int = 6) -> data.Unlabelled:
    return data.Unlabelled((images(n) * 255).to(torch.uint8))


def test_outputs_are_computed_once_and_kept(tmp_path: Path, monkeypatch: Any) -> None:
    task, device = task_of(config(train="bottleneck")), torch.device("cpu")
    site = Frozen(device, tmp_path, "")
    part = site.part(task)
    assert part is not None
    with torch.no_grad():
        wanted = part(unlabelled().x.float() / 255).flatten(1)
    found = site.outputs("train", task, unlabelled())
    torch.testing.assert_close(found.x, wanted)
    assert site.outputs("train", task, unlabelled()) is found

    def computed(*_: Any) -> Tensor:
        raise AssertionError("it is computed again")

    with monkeypatch.context() as patch:
        patch.setattr(models.Backbone, "forward", computed)
        assert torch.equal(
            Frozen(device, tmp_path, "").outputs("train", task, unlabelled()).x, found.x
        )
        with pytest.raises(AssertionError, match="again"):
            Frozen(device, tmp_path, "").outputs("train", task, unlabelled(5))
        with pytest.raises(AssertionError, match="again"):
            Frozen(device, None, "").outputs("train", task, unlabelled())
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])
    assert torch.equal(Frozen(device, tmp_path, "").outputs("train", task, unlabelled()).x, found.x)


@pytest.mark.nightly("fedda/models")
def test_augmented_views_are_computed_once_and_drawn_from(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def train(self: fedavg.Source) -> dict[str, Any]:
        i = torch.arange(20)
        with torch.no_grad():
            assert torch.equal(self.inputs(i), self.data.x[i])
        views = self.site.views(self.task)
        assert views is not None and views.shape == (3, len(self.data), 1280)
        one, other = self.views(i)
        for x in (self.inputs(i), one, other):
            drawn = (x == views[:, i]).all(dim=2)  # (V, n)
            assert drawn.any(dim=0).all() and drawn.any(dim=1).sum() > 1
        assert not torch.equal(one, other)
        seen.append(views)
        return {"loss": 0.0, "steps": 1}

    monkeypatch.setattr(fedavg.Source, "train", train)
    given = ON_FEATURES | {"train.augment": "flip-crop", "train.views": 3}
    nodes = [{**node, "features-dir": str(tmp_path)} for node in domains]
    for _ in range(2):  # the second time from the disk
        resident.cache_clear()
        Bench(nodes, "fedavg", **{k.replace(".", "__"): v for k, v in given.items()}).round()
        monkeypatch.setattr(models.Backbone, "forward", lambda *_: pytest.fail("computed again"))
    assert len(seen) == 6 and torch.equal(seen[0], seen[3])
    assert not torch.equal(seen[0][0], seen[0][1])


@pytest.mark.nightly("fedda/models")
def test_a_site_uses_only_its_own_weights(tmp_path: Path) -> None:
    """The server's word can neither open a file at a site nor make it use other weights."""
    here, device = save_weights("resnet18", tmp_path), torch.device("cpu")
    kept = ModelConfig(name="resnet18", weights=str(here), train="bottleneck")
    task = task_of(kept)
    with pytest.raises(ModelError, match="start this site with --weights and its own copy"):
        Frozen(device, None, "").part(task)
    copy = tmp_path / "copy.pth"
    copy.write_bytes(here.read_bytes())
    here.unlink()
    part = Frozen(device, None, str(copy)).part(task)
    assert part is not None and part.digest() == task.frozen
    state = torch.load(copy, weights_only=True)
    state["conv1.weight"][0, 0, 0, 0] += 1e-3
    torch.save(state, copy)
    with pytest.raises(
        ModelError, match=f"hash [0-9a-f]{{32}}, but the server's have {task.frozen}"
    ):
        Frozen(device, None, str(copy)).part(task)


@pytest.mark.parametrize(
    ("name", "weights"), [("resnet18", "IMAGENET1K_V1"), ("timm:vit_tiny_patch16_224", "default")]
)
def test_a_site_downloads_nothing(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it connects"))
    task = task_of(config(name=name, weights=weights, train="bottleneck"), "0" * 32, "3,224,224")
    with pytest.raises(ModelError, match=f"fetch them once by: fedda weights {name} {weights}"):
        Frozen(torch.device("cpu"), None, "").part(task)


# ---- over a federation -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=[NIGHTLY] * (m not in ("kd3a", "feddadil")))
        for m in plugins.own_methods()
    ],
)
def test_every_method_runs_on_features(method: str, domains: list[Node], tmp_path: Path) -> None:
    given = ON_FEATURES | {"method": method, "rounds": 4, "run.dir": str(tmp_path)}
    nodes = [{**node, "state-dir": str(tmp_path / "state")} for node in domains]
    results, _ = run(nodes, given)
    (training,) = results["trainings"][method]
    assert training["rounds"][-1]["accuracy"] > 0 and not results["events"]
    files = list(tmp_path.glob("state/*/models/**/*.safetensors"))
    assert bool(files) == (method == "feddadil")  # its heads, which the target keeps
    for kept in files:
        model, about = models.load(kept)
        assert models.predict(model, torch.rand(2, *about.shape)).shape == (2, 4)


def test_only_what_learns_crosses(domains: list[Node]) -> None:
    bench = Bench(domains, "fedavg", **{k.replace(".", "__"): v for k, v in ON_FEATURES.items()})
    before = bench.model
    after, _ = bench.round()
    assert {name.rpartition(".")[0] for name in after} == {
        "encoder.bottleneck.linear",
        "encoder.bottleneck.norm",
        "head",
    }
    assert not np.array_equal(after["head.weight"], before["head.weight"])
    whole = models.parameter_count(models.blank(config(), (1, 32, 32), 4))
    assert sum(array.size for array in after.values()) < 0.01 * whole


@pytest.mark.slow
def test_sites_without_the_weights_are_named_before_the_run_begins(
    domains: list[Node], tmp_path: Path
) -> None:
    other, weights = tmp_path / "other.pth", save_weights("resnet18", tmp_path)
    state = torch.load(weights, weights_only=True)
    state["conv1.weight"][0, 0, 0, 0] += 1e-3
    torch.save(state, other)
    here = str(weights)
    own = {"anna": here, "bert": str(other), "carl": "", "town": here}
    nodes = [{**node, "weights": own[node["name"]]} for node in domains]
    given = ON_FEATURES | {"method": "fedavg", "rounds": 1, "run.dir": str(tmp_path / "runs")}
    given |= {"model.name": "resnet18", "model.weights": here}
    sentence = f"^bert, carl do not have the weights .* start each with --weights and a .*{here}"
    with pytest.raises(RosterError, match=sentence):
        run(nodes, given)
    results, _ = run([{**node, "weights": here} for node in nodes], given | {"run.name": "all"})
    assert results["events"] == []


def test_a_question_about_weights_is_bound_by_the_policy(domains: list[Node]) -> None:
    bench = Bench(domains, "fedavg", **{k.replace(".", "__"): v for k, v in ON_FEATURES.items()})
    for forbids, code in (
        ('{"limits": {"parameters": 3000000}}', Code.POLICY),
        ('{"allow": {"networks": ["mlp"]}}', Code.POLICY),
        ("", None),
    ):
        app = make_app([{**domains[0], "policy": forbids}])
        grid = LocalGrid(app, [{"partition-id": 0}])
        question = Message(records.write(task=bench.task.flat()), 1, "query", ttl=60)
        (reply,) = grid.send_and_receive([question])
        assert (reply.error.code if reply.has_error() else None) == code
    (reply,) = grid.send_and_receive([Message(records.write(step={"round": 1}), 1, "query")])
    assert reply.error.code == Code.WIRE


def test_a_policy_bounds_the_views_of_a_frozen_network(domains: list[Node]) -> None:
    views = {"train.augment": "flip-crop", "train.views": 5}
    given = {k.replace(".", "__"): v for k, v in (ON_FEATURES | views).items()}
    bench = Bench(domains, "fedavg", **given)
    arrays, tables = records.read(bench.begin()[0].content)
    request = Request.make(tables["task"], tables["step"], arrays)
    Gate(Policy(limits=Limits(views=5))).admit(request)
    with pytest.raises(PolicyError, match=r"asks for 5 augmented views .* 4 at most"):
        Gate(Policy(limits=Limits(views=4))).admit(request)
    plain = Request.make({**tables["task"], "train.augment": "none"}, tables["step"], arrays)
    Gate(Policy(limits=Limits(views=1))).admit(plain)


def test_a_policy_counts_the_frozen_part(domains: list[Node]) -> None:
    bench = Bench(domains, "fedavg", **{k.replace(".", "__"): v for k, v in ON_FEATURES.items()})
    arrays, tables = records.read(bench.begin()[0].content)
    request = Request.make(tables["task"], tables["step"], arrays)
    check_parameters(request, 4_000_000)
    with pytest.raises(PolicyError, match=r"3,4\d\d,\d\d\d values .* takes 3,000,000 at most"):
        check_parameters(request, 3_000_000)
