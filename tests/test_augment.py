"""Augmentation: each image as torchvision changes it, repeatable, and only where gradients are."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as T

from clients import fedavg
from fedda import plugins
from fedda.config import AUGMENTATIONS
from fedda.data import augment
from fedda.data.augment import augmentation
from fedda.errors import ConfigError
from fedda.settings import RunConfig
from fedda.train import balanced
from tests.local_grid import Bench, Node, make_domains, run

OWN = [name for name in AUGMENTATIONS if name != "none"]


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 6, channels: int = 3, side: int = 16) -> Tensor:
    return torch.rand(n, channels, side, side, generator=draws(9))


def test_shifting_is_torchvisions() -> None:
    x, top, left = images(), torch.tensor([0, 1, 2, 3, 4, 2]), torch.tensor([4, 0, 1, 2, 3, 2])
    flip = torch.tensor([True, False] * 3)
    for found, one, t, u, f in zip(
        augment.shifted(x, 2, top, left, flip), x, top, left, flip, strict=True
    ):
        cut = T.crop(T.pad(one, [2]), int(t), int(u), 16, 16)
        assert torch.equal(found, T.horizontal_flip(cut) if f else cut)


@pytest.mark.parametrize("shape", [(16, 16), (12, 20)])
def test_turning_is_torchvisions(shape: tuple[int, int]) -> None:
    x = torch.rand(5, 3, *shape, generator=draws(9))
    angle, scale = torch.tensor([0.0, 15, -7, 3, 90]), torch.tensor([1.0, 0.9, 1.1, 1, 1])
    right, down = torch.tensor([2.0, 0, 1, -1, 0]), torch.tensor([0.0, 1, -2, 1, 0])
    found = augment.turned(x, angle, right, down, scale)
    for mine, one, a, r, d, s in zip(found, x, angle, right, down, scale, strict=True):
        theirs = T.affine(
            one, float(a), [int(r), int(d)], float(s), [0.0, 0.0], InterpolationMode.BILINEAR
        )
        assert torch.allclose(mine, theirs, atol=1e-4)
    assert torch.allclose(found[0, :, :, 2:], x[0, :, :, :-2], atol=1e-5)  # two pixels right


def test_a_part_is_torchvisions() -> None:
    x = images(4)
    top, left = torch.tensor([0.0, 3, 5, 15]), torch.tensor([0.0, 2, 1, 15])
    height, width = torch.tensor([16.0, 7, 11, 1]), torch.tensor([16.0, 9, 4, 1])
    flip = torch.tensor([False, True, False, True])
    found = augment.part(x, top, left, height, width, flip)
    for i, one in enumerate(x):
        t, u, h, w = (int(each[i]) for each in (top, left, height, width))
        theirs = T.resized_crop(one, t, u, h, w, [16, 16], antialias=False)
        theirs = T.horizontal_flip(theirs) if flip[i] else theirs
        assert torch.allclose(found[i], theirs, atol=1e-5)
    assert torch.allclose(found[0], x[0], atol=1e-6)  # the whole image stays as it is


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_are_torchvisions(channels: int) -> None:
    x, factors = images(3, channels), torch.tensor([[0.7, 1, 1.3], [1.3, 1, 0.7], [0.7, 1, 1.2]])
    found = augment.recoloured(x, *factors)
    for i, one in enumerate(x):
        b, c, s = (float(f[i]) for f in factors)
        theirs = T.adjust_saturation(T.adjust_contrast(T.adjust_brightness(one, b), c), s)
        assert torch.allclose(found[i], theirs, atol=1e-5)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentations_repeat_and_change_every_image_in_its_own_way(
    name: str, channels: int
) -> None:
    x, change = images(8, channels)[:1].expand(8, -1, -1, -1), augmentation(name)
    before = torch.get_rng_state()
    found = change(x, draws(1))
    assert torch.equal(found, change(x, draws(1))) and not torch.equal(found, change(x, draws(2)))
    assert torch.equal(before, torch.get_rng_state())
    assert found.shape == x.shape and found.dtype == x.dtype
    assert found.min() >= 0 and found.max() <= 1 + 1e-6
    assert len(found.flatten(1).unique(dim=0)) > 5


def invert(x: Tensor, draws: torch.Generator) -> Tensor:
    """Invert the images."""
    return 1 - x


def enlarge(x: Tensor, draws: torch.Generator) -> Tensor:
    return x[:, :, :4]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two augmentations of another package."""
    points = [EntryPoint(n, f"{__name__}:{n}", "fedda.augment") for n in ("invert", "enlarge")]

    def of(group: str) -> list[EntryPoint]:
        return points if group == "fedda.augment" else []

    monkeypatch.setattr(plugins, "entry_points", of)
    plugins.forget()
    yield
    monkeypatch.undo()
    plugins.forget()


def test_an_augmentation_of_another_package(added: Any) -> None:
    RunConfig.parse({"train.augment": "flip-crop,invert"})
    change, x = augmentation("invert"), images()
    assert torch.equal(change(x, draws()), 1 - x)
    wrong = augmentation("enlarge")
    with pytest.raises(ConfigError, match=r"enlarge of .* changed images .*must keep shape"):
        wrong(x, draws())


@pytest.mark.parametrize("name", ["rain", "none,digits", "digits,", ""])
def test_unknown_augmentations_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.augment"):
        RunConfig.parse({"train.augment": name})
    if name == "rain":
        with pytest.raises(ConfigError, match=r"no augmentation 'rain'; choose from none, flip"):
            augmentation("rain")


METHODS = ("fedavg", "kd3a", "fdann", "dils")


@pytest.mark.parametrize("method", METHODS)
def test_runs_with_augmentation_repeat(method: str, tmp_path: Path) -> None:
    nodes = make_domains(tmp_path)
    settings = {"method": method, "rounds": 1}
    plain, one, two = (
        model(nodes, settings | more, tmp_path / str(i))
        for i, more in enumerate([{}, {"train.augment": "digits"}, {"train.augment": "digits"}])
    )
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], plain[key]) for key in one)


def model(nodes: list[Node], settings: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    results, _ = run(nodes, settings | {"run.dir": str(folder)})
    (trained,) = results["trainings"][settings["method"]]
    return load_file(trained["model"])


def test_only_inputs_with_gradients_are_augmented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def train(self: fedavg.Source) -> dict[str, Any]:
        indices = torch.arange(20)
        with torch.no_grad():
            plain = self.inputs(indices)
            a, b = self.views(indices)
        assert torch.equal(plain, self.data.x[:20].float() / 255)
        assert not torch.equal(a, b) and not torch.equal(a, plain)
        assert not torch.equal(self.inputs(indices), plain)
        checked.append(self.site.name)
        return {"loss": 0.0, "steps": 1}

    monkeypatch.setattr(fedavg.Source, "train", train)
    Bench(make_domains(tmp_path), "fedavg", train__augment="flip-crop").round()
    assert len(checked) == 3


def test_balanced_sources_train_on_equal_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make_domains(tmp_path)
    file = Path(nodes[0]["data"])
    arrays = dict(np.load(file))
    rare = np.flatnonzero(arrays["y_train"] == 0)[3:]  # three of class 0 are left
    arrays |= {key: np.delete(arrays[key], rare, axis=0) for key in ("x_train", "y_train")}
    np.savez(file, **arrays)
    counts = {}

    def train(self: fedavg.Source) -> dict[str, Any]:
        indices = torch.cat([*self.batches()])
        counts[self.site.name] = self.data.y[indices].bincount()
        assert set(indices.tolist()) == set(range(len(self.data)))
        return {"loss": 0.0, "steps": 1}

    monkeypatch.setattr(fedavg.Source, "train", train)
    Bench(nodes, "fedavg", train__sampler="balanced").round()
    assert len(counts[nodes[0]["name"]].unique()) == 1
    Bench(nodes, "fedavg", train__sampler="shuffle").round()
    assert counts[nodes[0]["name"]][0] == 3


def naive(share: list[int], y: list[int]) -> list[int]:
    """Repeat each class's images in their order until it has as many as the largest."""
    classes: dict[int, list[int]] = {}
    for i in sorted(share):
        classes.setdefault(y[i], []).append(i)
    most = max(map(len, classes.values()))
    return [mine[k % len(mine)] for mine in classes.values() for k in range(most)]


def test_balanced_by_hand_and_against_a_loop() -> None:
    y = torch.tensor([0, 0, 0, 1, 1, 2, 5])
    found = balanced(torch.tensor([6, 1, 0, 2, 4, 3]), y, draws())
    # Three of each class that is there: 0 1 2, 3 4 3, 6 6 6.
    assert sorted(found.tolist()) == [0, 1, 2, 3, 3, 4, 6, 6, 6]
    for seed in range(20):
        labels = torch.randint(0, 4, (50,), generator=draws(seed)) ** 2
        share = torch.randperm(50, generator=draws(seed))[: 5 + 2 * seed]
        found = balanced(share, labels, draws(seed))
        assert sorted(found.tolist()) == sorted(naive(share.tolist(), labels.tolist()))
