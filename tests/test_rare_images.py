"""Rare image files: read as a person sees them, or refused by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fedda import data
from fedda.data.form import Form
from fedda.data.pixels import read_images, survey
from fedda.errors import DataError


def _tiff(path: Path, deep: np.ndarray) -> None:
    """Write an uncompressed TIFF whose numbers are big-endian, by hand."""
    entries = [(256, deep.shape[1]), (257, deep.shape[0]), (258, 16), (259, 1), (262, 1)]
    entries += [(273, 8 + 2 + 12 * 8 + 4), (278, deep.shape[0]), (279, deep.nbytes)]
    ifd = len(entries).to_bytes(2, "big")
    for tag, value in entries:
        ifd += b"".join(n.to_bytes(k, "big") for n, k in ((tag, 2), (4, 2), (1, 4), (value, 4)))
    path.write_bytes(b"MM\0*\0\0\0\x08" + ifd + bytes(4) + deep.astype(">u2").tobytes())


def read(path: Path, channels: int = 0) -> torch.Tensor:
    """One file, checked against its header -> (channels, H, W)."""
    x = read_images([path], Form(channels), None)[0]
    assert survey([path]).shape[1:] == tuple(x.shape[1:])
    return x


@pytest.mark.parametrize("name", ["a.png", "a.tif", "big.tif"])
def test_16_bits_of_gray_become_8(tmp_path: Path, name: str) -> None:
    deep = np.array([[0, 128, 129, 257], [32767, 32768, 65406, 65535]], np.uint16)
    if name == "big.tif":
        _tiff(tmp_path / name, deep)
    else:
        Image.fromarray(deep).save(tmp_path / name)
    # 257 steps of 16 bits are one of 8: 128 is below half a step and 129 above.
    assert read(tmp_path / name).tolist() == [[[0, 0, 1, 1], [127, 128, 254, 255]]]
    assert read(tmp_path / name, 3).shape == (3, 2, 4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_upright(tmp_path: Path, ending: str, orientation: int) -> None:
    corner = Image.new("RGB", (48, 32))
    corner.paste((255, 0, 0), (0, 0, 24, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{ending}"
    corner.save(path, exif=exif)
    upright = corner.copy()
    upright.getexif()[0x0112] = orientation
    wanted = np.asarray(ImageOps.exif_transpose(upright)).transpose(2, 0, 1)
    found = read(path).numpy().astype(int)
    assert found.shape == wanted.shape and abs(found - wanted).mean() < 3
    if orientation == 6:  # by hand: a quarter to the right brings the corner to the top right
        assert found.shape == (3, 48, 32) and found[0, 4, 28] > 250 and found[0, 4, 4] < 5


def test_inks_become_colours(tmp_path: Path) -> None:
    inks = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    inks.paste((255, 0, 0, 0), (8, 0, 16, 16))
    for ending in ("tif", "jpg"):
        inks.save(tmp_path / f"a.{ending}")
        x = read(tmp_path / f"a.{ending}").int()
        assert (x[:, 4, 2] - 255).abs().max() < 5
        assert (x[:, 4, 13] - torch.tensor([0, 255, 255])).abs().max() < 5


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "RGB", "L"])
def test_what_is_transparent_becomes_white(tmp_path: Path, mode: str) -> None:
    """Left black and seen, right black and transparent; in RGBA and LA also half of both."""
    path, image = tmp_path / "a.png", Image.new("RGBA", (3, 1), (0, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 127))
    image.putpixel((2, 0), (0, 0, 0, 0))
    wanted = [0, 128, 255]
    if mode in ("RGBA", "LA"):
        image.convert(mode).save(path)
    elif mode in ("P", "PA"):
        image = Image.new("P", (3, 1), 0)
        image.putpalette([0, 0, 0, 9, 9, 9])
        image.putpixel((2, 0), 1)
        image.save(path, transparency=b"\xff\x00")
        wanted = [0, 0, 255]
    else:
        image = Image.new(mode, (3, 1), 0)
        image.putpixel((2, 0), 7 if mode == "L" else (7, 7, 7))
        image.save(path, transparency=7 if mode == "L" else (7, 7, 7))
        wanted = [0, 0, 255]
    assert read(path, 1)[0, 0].tolist() == wanted
    assert read(path, 3)[:, 0].tolist() == [wanted] * 3


def test_opaque_images_with_an_alpha_channel_keep_every_bit(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(read(tmp_path / "a.png"), pixels[..., :3].transpose(2, 0, 1))


@pytest.mark.parametrize("ending", ["png", "webp", "tif"])
def test_animations_and_pages_are_refused_by_name(tmp_path: Path, ending: str) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"1.{ending}"
    frames = [Image.new("RGB", (8, 8), (60 * i, 0, 0)) for i in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match=rf"a/1.{ending} holds 3 images, an animation or pages"):
        data.verify(tmp_path, "source")


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tif", "bmp"])
def test_truncated_files_are_refused_by_name(tmp_path: Path, ending: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"1.{ending}"
    Image.fromarray(pixels).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"a/1.{ending} cannot be read as an image"):
        data.verify(tmp_path, "source")
