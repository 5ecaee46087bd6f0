"""Models: shapes and names of each network, weights from files, BatchNorm modes, files on disk."""

import json
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from fedda.config import NETWORKS, ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import ModelError
from fedda.models import (
    Arithmetic,
    Meta,
    Model,
    batch_statistics,
    build,
    evaluating,
    load,
    parameter_count,
    predict,
    save,
)


def net(name: str = "digit-cnn", **leaves: str | float) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, **leaves})


GRAY, RGB = (1, 28, 28), (3, 32, 32)
DIGIT = net()
LENET = net("lenet")
MLP = net("mlp", hidden="6,5,4")
RESNET = net("resnet18")

CASES = [
    (DIGIT, (1, 8, 8), 128 * 2 * 2),
    (DIGIT, (3, 9, 14), 128 * 2 * 3),
    (DIGIT, (1, 32, 35), 128 * 8 * 8),
    (DIGIT, (1, 64, 40), 128 * 8 * 8),  # pooled: not 128 * 16 * 10
    (net(hidden="9,5"), GRAY, 5),
    (net("lenet", hidden="9", bottleneck=4), GRAY, 4),
    (net("identity", hidden="9"), (7,), 9),
    (net("resnet18", hidden="6"), RGB, 6),
    (LENET, (1, 16, 16), 500),
    (LENET, (3, 20, 18), 500),
    (MLP, (7,), 4),
    (MLP, (1, 2, 3), 4),
    (net("identity"), (7,), 7),
    (net("identity"), (1, 2, 3), 6),
    (RESNET, (1, 32, 32), 512),
    (net("resnet50"), RGB, 2048),
    (net("resnet101"), RGB, 2048),
    (net("alexnet"), (1, 63, 63), 4096),
    (net("efficientnet-lite0"), (1, 40, 40), 1280),
]


def images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def resnet_state() -> dict[str, Tensor]:
    """A torchvision state_dict for 5 classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        return torchvision.models.resnet18(weights=None, num_classes=5).state_dict()


@pytest.fixture
def weights(tmp_path: Path, resnet_state: dict[str, Tensor]) -> ModelConfig:
    path = tmp_path / "resnet18.pth"
    torch.save(resnet_state, path)
    return net("resnet18", weights=str(path))


@pytest.mark.parametrize(
    ("config", "shape", "width"),
    [pytest.param(*c, marks=pytest.mark.slow) if c[2] > 1000 else c for c in CASES],
    ids=lambda v: getattr(v, "name", ""),
)
def test_every_network_has_the_expected_shapes(
    config: ModelConfig, shape: tuple[int, ...], width: int
) -> None:
    model = build(config, shape, classes=5, seed=0).eval()
    x = images(2, *shape)
    with torch.no_grad():
        z = model.features(x)
        assert torch.equal(model(x), model.head(z))
    assert z.shape == (2, width) and model.width == width
    assert model(x).shape == (2, 5)
    plain = config.name == "identity" and not config.hidden
    learnt = {"head"} if plain else {"encoder", "head"}
    assert {name.split(".")[0] for name in model.state_dict()} == learnt


def test_every_name_has_a_case() -> None:
    assert {c.name for c, *_ in CASES} == set(NETWORKS)


def test_counts_by_hand() -> None:
    table4 = [
        64 * 1 * 25 + 64 + 2 * 64,  # convolution and BatchNorm, then 28 -> 14
        64 * 64 * 25 + 64 + 2 * 64,  # 14 -> 7
        128 * 64 * 25 + 128 + 2 * 128,
        128 * 7 * 7 * 10 + 10,
    ]
    assert parameter_count(build(DIGIT, GRAY, 10, 0)) == sum(table4) == 372_298
    # The original LeNet of Caffe, 28 -> 24 -> 12 -> 8 -> 4.
    assert parameter_count(build(LENET, GRAY, 10, 0)) == 520 + 25_050 + 400_500 + 5_010
    # 7 -> 6 -> 5 -> 4 -> 2 with a BatchNorm after each hidden layer.
    assert parameter_count(build(MLP, (7,), 2, 0)) == (48 + 12) + (35 + 10) + (24 + 8) + 10


def test_the_seed_decides_the_first_weights() -> None:
    one, other = (build(DIGIT, GRAY, 10, seed).state_dict() for seed in (3, 4))
    torch.rand(1)
    same = build(DIGIT, GRAY, 10, 3).state_dict()
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["encoder.0.weight"], other["encoder.0.weight"])
    assert not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.parametrize(
    ("config", "shape", "says"),
    [
        (net("alexnet"), (3, 62, 80), "input.size to 63"),
        (LENET, (1, 15, 28), "input.size to 16"),
        (DIGIT, (1, 3, 8), "input.size to 4"),
        (DIGIT, (400,), r"\(400,\); set model.name to mlp"),
        (RESNET, (4, 32, 32), "these have 4"),
        (net("mlp"), (7,), "set it to, for example, 1000,500,100"),
        (net(weights="DEFAULT"), GRAY, "digit-cnn has no pretrained weights"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    config: ModelConfig, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        build(config, shape, 10, 0)


def test_hidden_layers_by_hand() -> None:
    """Linear, BatchNorm, ReLU; dropout between two, and none behind the last."""
    made = build(net(hidden="5, 4", dropout=0.5), (1, 8, 8), 3, 0)
    layers = [m for n, m in made.named_modules() if n.startswith("encoder.hidden.")]
    kinds = [type(layer).__name__ for layer in layers]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Dropout", *("Linear", "BatchNorm1d", "ReLU")]
    x, w = images(6, 1, 8, 8), made.eval().state_dict()
    z = dict(made.named_modules())["encoder.network"](x)
    for linear, norm in (("0", "1"), ("4", "5")):
        a, b = (f"encoder.hidden.{layer}." for layer in (linear, norm))
        z = (w[a + "weight"] @ z.T).T + w[a + "bias"]
        z = (z - w[b + "running_mean"]) / (w[b + "running_var"] + 1e-5).sqrt()
        z = (z * w[b + "weight"] + w[b + "bias"]).clamp(min=0)
    assert torch.allclose(made.features(x), z, atol=1e-5)
    assert {n for n in made.fresh if "hidden" in n}, "a pretrained network's hidden layers are new"


def test_one_class_is_refused() -> None:
    with pytest.raises(ModelError, match="2 classes or more, not 1"):
        build(DIGIT, GRAY, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_from_a_file(tmp_path: Path, resnet_state: dict[str, Tensor], suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".pth":
        torch.save(resnet_state, path)
    else:
        safetensors.torch.save_file(resnet_state, path)
    config = net("resnet18", weights=str(path))

    own = torchvision.models.resnet18(weights=None, num_classes=5)
    own.load_state_dict(resnet_state)
    x = images(2, *RGB)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    expected = own.eval()((x - mean) / std)
    built = build(config, RGB, 5, 0).eval()
    built.compute(Arithmetic())  # in the layout of `own`, to the last bit
    assert torch.equal(built(x), expected)

    # Another number of classes: the encoder comes from the file, the head from the seed.
    seven = build(config, RGB, 7, seed=1).state_dict()
    assert torch.equal(seven["encoder.conv1.weight"], resnet_state["conv1.weight"])
    assert torch.equal(seven["head.weight"], build(RESNET, RGB, 7, 1).head.weight)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Tensor]], list[str]]:
    """Put weights where torchvision downloads them from; returns the addresses asked for."""

    def publish(state: dict[str, Tensor]) -> list[str]:
        asked = []

        def fetch(url: str, **_: object) -> dict[str, Tensor]:
            asked.append(url)
            return state

        monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
        return asked

    return publish


@pytest.mark.slow
def test_weights_that_do_not_fit_are_refused(
    published: Callable, resnet_state: dict[str, Tensor]
) -> None:
    def refuses(state: dict[str, Tensor], says: str) -> None:
        published(state)
        with pytest.raises(ModelError, match=says):
            build(net("resnet18", weights="DEFAULT"), RGB, 5, 0)

    refuses({k: t for k, t in resnet_state.items() if k != "bn1.weight"}, "missing: bn1.weight")
    refuses(resnet_state | {"extra": torch.ones(1)}, "unexpected: extra")
    refuses(resnet_state | {"bn1.bias": torch.ones(3)}, "of another shape: bn1.bias")
    refuses({}, r"missing: conv1.weight, bn1.weight, bn1.bias and \d+ more")


@pytest.mark.slow
def test_files_without_weights_are_refused(tmp_path: Path) -> None:
    def refuses(content: object, says: str, name: str = "w.pth") -> None:
        path = tmp_path / name
        torch.save(content, path) if not isinstance(content, bytes) else path.write_bytes(content)
        with pytest.raises(ModelError, match=says):
            build(net("resnet18", weights=str(path)), RGB, 5, 0)

    refuses({"model": {}, "epoch": 3}, "holds model, epoch, not a plain state_dict")
    refuses(torch.ones(3), "holds Tensor")
    refuses(Path("x"), "Cannot read weights")  # needs code to run, which no weights file may
    for garbage in (b"not a pickle", b"", b"PK\x03\x04 cut off", bytes(range(256))):
        refuses(garbage, "Cannot read weights")
        refuses(garbage, "Cannot read weights", "w.safetensors")


def test_weights_that_cannot_be_downloaded_are_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", unreachable)
    with pytest.raises(ModelError, match=r"no route to host.*set model.weights to the path"):
        build(net("resnet18", weights="DEFAULT"), RGB, 5, 0)


def test_normalises_only_when_pretrained(weights: ModelConfig) -> None:
    pretrained, fresh = build(weights, (1, 32, 32), 5, 0).eval(), build(RESNET, (1, 32, 32), 5, 0)
    fresh.load_state_dict(pretrained.state_dict())
    fresh.eval()
    gray = torch.full((1, 1, 32, 32), 0.5)
    by_hand = torch.stack(
        [
            torch.full((32, 32), (0.5 - m) / s)
            for m, s in [(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]
        ]
    )[None]
    assert torch.allclose(pretrained.features(gray), fresh.encoder(by_hand), atol=1e-5)
    fresh.compute(Arithmetic())  # in the layout of its encoder alone
    assert torch.equal(fresh.features(gray), fresh.encoder(gray.repeat(1, 3, 1, 1)))
    assert not torch.allclose(pretrained.features(gray), fresh.features(gray), atol=1e-3)


def tiny() -> Model:
    """One BatchNorm with statistics far from any batch's, and a dropout that must stay quiet."""
    norm = nn.BatchNorm1d(2)
    norm.running_mean, norm.running_var = torch.tensor([50.0, -50.0]), torch.tensor([9.0, 4.0])
    head = nn.Linear(2, 2)
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    return Model(nn.Sequential(norm, nn.Dropout(0.9)), head)


@pytest.mark.parametrize("inside", ["as is", "train", "eval"])
def test_batch_statistics(inside: str) -> None:
    model = tiny().train()
    model.encoder[1].eval()  # type: ignore[index]  # a layer frozen by hand stays so
    modes = [m.training for m in model.modules()]
    before = {k: t.clone() for k, t in model.state_dict().items()}
    x = torch.tensor([[0.0, 1.0], [2.0, 5.0]])
    with batch_statistics(model):
        assert not model.training
        if inside != "as is":
            model.encoder[0].train(inside == "train")  # type: ignore[index]
        z = model.features(x)
    # Means 1 and 3, biased variances 1 and 4: every value is one standard deviation away.
    assert torch.allclose(z, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), atol=1e-4)
    assert [m.training for m in model.modules()] == modes
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in before)
    # Afterwards the running statistics count again.
    model.eval()
    assert torch.allclose(model.features(x)[0], torch.tensor([-50 / 3, 51 / 2]), atol=1e-3)


def test_batch_statistics_ends_after_an_error() -> None:
    model = tiny()
    with pytest.raises(KeyError), batch_statistics(model):
        raise KeyError
    assert model.training and len(model.state_dict()) == 7


def test_batch_statistics_equals_training_mode() -> None:
    model = build(DIGIT, (1, 8, 8), 3, 0)
    x = images(6, 1, 8, 8)
    with torch.no_grad():
        with batch_statistics(model):
            z = model(x)
        running = model.eval()(x)
        assert torch.equal(z, model.train()(x))
        assert not torch.allclose(z, running, atol=1e-3)


def test_evaluating_restores_each_layer() -> None:
    model = tiny().train()
    model.head.eval()
    with evaluating(model):
        assert not any(m.training for m in model.modules())
    assert model.encoder.training and not model.head.training


def test_predict_gives_probabilities_in_evaluation_mode() -> None:
    model = build(DIGIT, (1, 8, 8), 3, 0).train()
    pixels = torch.randint(256, (5, 1, 8, 8), generator=torch.Generator().manual_seed(1)).byte()
    p = predict(model, pixels, batch=2)
    assert model.training and not p.requires_grad
    with torch.no_grad():
        expected = model.eval()(pixels / 255).softmax(dim=1)
    assert torch.allclose(p, expected, atol=1e-6)
    assert torch.allclose(predict(model, pixels / 255), p, atol=1e-6)
    assert predict(model, pixels[:0]).shape == (0, 3)
    with batch_statistics(model):
        assert not torch.allclose(predict(model, pixels), p, atol=1e-3)


def test_a_saved_model_is_loaded_unchanged(tmp_path: Path) -> None:
    model = build(MLP, (7,), 3, seed=5)
    model(images(9, 7))  # so that BatchNorm's buffers are not the initial ones
    path = tmp_path / "deep" / "model.safetensors"
    for _ in range(2):
        save(path, model, config=MLP, inputs=Inputs((7,)), classes=["cat", "dog", "Ünïcode"])
    again, meta = load(path)
    assert meta == Meta(MLP, Inputs((7,)), ("cat", "dog", "Ünïcode"), meta.version) and meta.version
    assert not again.training
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[k], expected[k]) for k in state)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
def test_a_saved_pretrained_model_stands_alone(tmp_path: Path, weights: ModelConfig) -> None:
    model = build(weights, (1, 32, 32), 2, 0)
    save(
        tmp_path / "m.safetensors", model, config=weights, inputs=Inputs((1, 32, 32)), classes="ab"
    )
    Path(weights.weights).unlink()
    again, _ = load(tmp_path / "m.safetensors")
    x = images(2, 1, 32, 32)
    assert torch.equal(predict(again, x), predict(model, x))


def test_files_that_fedda_did_not_save_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(ModelError, match="Cannot read"):
        load(path)
    path.write_bytes(b"something else")
    with pytest.raises(ModelError, match="Cannot read"):
        load(path)
    safetensors.torch.save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ModelError, match="not a model saved by fedda"):
        load(path)
    about = {"config": {"name": "mlp", "sizes": "4"}, "shape": [7], "classes": ["a", "b"]}
    for text in (
        "no json",
        "[]",
        json.dumps(about),
        json.dumps(about | {"version": "1"}),
        json.dumps(about | {"version": "1", "config": {"name": "v g g"}}),
    ):
        safetensors.torch.save_file({"a": torch.ones(1)}, path, metadata={"fedda": text})
        with pytest.raises(ModelError, match="is damaged or from another version"):
            load(path)
    text = json.dumps(about | {"version": "1", "config": {"name": "vgg"}})
    safetensors.torch.save_file({"a": torch.ones(1)}, path, metadata={"fedda": text})
    with pytest.raises(ModelError, match=r"'vgg' is not installed.*model\.name"):
        load(path)


def test_a_model_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    model = build(MLP, (7,), 3, 0)
    with pytest.raises(ModelError, match="2 class names for a model of 3"):
        save(tmp_path / "m.safetensors", model, config=MLP, inputs=Inputs((7,)), classes="ab")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"Cannot write .* a folder is needed\); make room"):
        save(
            tmp_path / "file" / "m.safetensors",
            model,
            config=MLP,
            inputs=Inputs((7,)),
            classes="abc",
        )
