"""Rare image files: read as a person sees them, or refused by name."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from fedda import data
from fedda.data.form import Form
from fedda.data.pixels import read_images, survey
from fedda.errors import DataError


def read(path: Path, channels: int = 0) -> torch.Tensor:
    """One file, checked against its header -> (channels, H, W)."""
    x = read_images([path], Form(channels), None)[0]
    assert survey([path]).shape[1:] == tuple(x.shape[1:])
    return x


@pytest.mark.parametrize("ending", ["png", "webp", "tif"])
def test_animations_and_pages_are_refused_by_name(tmp_path: Path, ending: str) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"1.{ending}"
    frames = [Image.new("RGB", (8, 8), (60 * i, 0, 0)) for i in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match=rf"a/1.{ending} holds 3 images, an animation or pages"):
        data.verify(tmp_path, "source")
