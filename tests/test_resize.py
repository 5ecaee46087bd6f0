"""Images come to one size by stretching or cropping; cropping is torchvision's to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from fedda import data, models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.data.form import conform_images, middle, scaled
from fedda.errors import ConfigError
from fedda.settings import RunConfig, Task

SIZES = [(40, 31), (31, 40), (28, 28), (12, 60), (256, 256), (7, 5)]


def test_an_image_of_512_by_256_keeps_the_middle_224() -> None:
    """By hand: its shorter side is 256 already, so 144 pixels go left and 16 at the top."""
    assert scaled(512, 256, 224) == (512, 256)
    assert (middle(512, 224), middle(256, 224)) == (144, 16)
    x = torch.zeros(1, 1, 256, 512, dtype=torch.uint8)
    x[0, 0, 16, 144], x[0, 0, 239, 367] = 10, 20
    cropped = conform_images(x, 0, 224, "crop")
    assert cropped.shape == (1, 1, 224, 224)
    assert (cropped[0, 0, 0, 0], cropped[0, 0, -1, -1]) == (10, 20)


@pytest.mark.parametrize("size", [28, 7, 224])
@pytest.mark.parametrize("shape", SIZES)
def test_cropping_is_torchvisions(tmp_path: Path, shape: tuple[int, int], size: int) -> None:
    draw = np.random.default_rng(0)
    image = Image.fromarray(draw.integers(0, 256, (shape[1], shape[0], 3), dtype=np.uint8))
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "1.png")
    theirs = v2.Compose(
        [
            v2.Resize(int(size * 256 / 224), InterpolationMode.BILINEAR, antialias=True),
            v2.CenterCrop(size),
        ]
    )
    ours = data.load_source(tmp_path, size=size, resize="crop").x
    assert torch.equal(ours[0], v2.functional.pil_to_tensor(theirs(image)))
    array = v2.functional.pil_to_tensor(image)[None]
    assert torch.equal(conform_images(array, 3, size, "crop"), theirs(array))


def test_all_ways_to_read_images_crop_alike(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (5, 30, 20), dtype=np.uint8)
    (tmp_path / "folder").mkdir()
    for i, image in enumerate(x):
        Image.fromarray(image).save(tmp_path / "folder" / f"{i}.png")
    np.savez(tmp_path / "a.npz", x=x)
    wanted = conform_images(torch.from_numpy(x)[:, None], 1, 14, "crop")
    assert torch.equal(data.load_target(tmp_path / "a.npz", size=14, resize="crop").x, wanted)
    for path in (tmp_path / "a.npz", tmp_path / "folder"):
        found = [e.x for _, e, _ in data.batches(path, (1, 14, 14), 2, "crop")]
        # Files are resized by Pillow and arrays by torch, which round differently.
        assert (torch.cat(found).int() - wanted.int()).abs().max() <= 1
    assert torch.equal(
        torch.cat([e.x for _, e, _ in data.batches(tmp_path / "a.npz", (1, 14, 14), 2)]),
        data.load_target(tmp_path / "a.npz", size=14).x,
    )


def test_the_rule_reaches_the_sites_and_needs_a_size() -> None:
    config = RunConfig.parse({"input.resize": "crop", "input.size": 224})
    task = config.task("kd3a", 0, (3, 224, 224), ["a", "b"], 3)
    assert task.resize == "crop" and Task.parse(task.flat()).resize == "crop"
    with pytest.raises(ConfigError, match=r"needs a size to crop to; set input\.size"):
        RunConfig.parse({"input.resize": "crop"})


def test_a_model_says_how_its_images_were_resized(tmp_path: Path) -> None:
    made = models.blank(ModelConfig(name="mlp", hidden="4"), (1, 6, 6), 2)
    about: Any = {"config": ModelConfig(name="mlp", hidden="4"), "classes": "ab"}
    for resize in ("stretch", "crop"):
        models.save(tmp_path / "m", made, **about, inputs=Inputs((1, 6, 6), resize))
        assert models.describe(tmp_path / "m").inputs.resize == resize
