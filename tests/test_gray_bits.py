"""Scans with fewer significant bits than their files have: the site says how many count."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

import fedda
from fedda import data, models
from fedda.data.samples import DEEP
from fedda.errors import ConfigError, DataError
from tests.field.written import tiff

TWELVE = data.Reading(gray_bits=12)
SCAN = np.array([[0, 8, 9, 2047], [2048, 3000, 4086, 4095]], np.uint16)


def scans(root: Path, *images: np.ndarray, ending: str = "png") -> Path:
    for i, image in enumerate(images):
        (root / "train" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / "train" / "ab"[i % 2] / f"{i}.{ending}")
    return root


def naive(deep: np.ndarray, bits: int) -> list[list[int]]:
    """Each value's share of white, in 255 parts, rounded half up, by fractions of integers."""
    white = 2**bits - 1
    return [[(2 * 255 * int(v) + white) // (2 * white) for v in row] for row in deep]


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_12_bits_become_8(tmp_path: Path, ending: str) -> None:
    site = scans(tmp_path, SCAN, SCAN // 2, ending=ending)
    # By hand: 4095 / 255 = 16.06 of 12 bits are one of 8, so 8 is just below half a step.
    assert data.load_source(site, reading=TWELVE).x[0, 0].tolist() == [
        [0, 0, 1, 127],
        [128, 187, 254, 255],
    ]
    for bits in (12, 13, 15, 16):
        found = data.load_source(site, reading=data.Reading(gray_bits=bits)).x
        assert found[0, 0].tolist() == naive(SCAN, bits)
    assert torch.equal(found, data.load_source(site).x)  # auto: what the file stores
    assert data.load_target(site, reading=TWELVE).x.max() == 255


def test_a_packed_file_says_how_many_bits_it_stores(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.tif").write_bytes(tiff(SCAN, 12, 1))  # two pixels in three bytes
    with Image.open(tmp_path / "a" / "1.tif") as image:
        assert image.mode in DEEP and np.asarray(image).tolist() == SCAN.tolist()
    found = data.load_source(tmp_path)
    assert found.x[0, 0].tolist() == naive(SCAN, 12)
    described = data.verify(tmp_path, "source")
    assert described.gray == "0 to 4095 (12 bits) become 0 to 255"
    assert "almost black" not in " ".join(described.warnings)


def test_hints_that_do_not_define_the_scale_are_not_used(tmp_path: Path) -> None:
    """A PNG with sBIT 12 fills all 16 bits, and MaxSampleValue is of one image."""
    full = (SCAN.astype(np.uint32) * 65535 // 4095).astype(np.uint16)
    (tmp_path / "a").mkdir()
    about = PngImagePlugin.PngInfo()
    about.add(b"sBIT", bytes([12]))
    Image.fromarray(full).save(tmp_path / "a" / "1.png", pnginfo=about)
    Image.fromarray(full // 2).save(tmp_path / "a" / "2.tif", tiffinfo={281: int(full.max()) // 2})
    assert b"sBIT" in (tmp_path / "a" / "1.png").read_bytes()
    found = data.load_source(tmp_path).x[:, 0].tolist()
    assert found == [naive(full, 16), naive(full // 2, 16)]


def test_a_value_above_white_is_refused_by_name(tmp_path: Path) -> None:
    site = scans(tmp_path, SCAN, SCAN + 1)
    with pytest.raises(DataError, match=r"b/1.png has the value 4096.*end at 4095.*--gray-bits 13"):
        data.verify(site, "source", reading=TWELVE)
    assert data.load_source(site, reading=data.Reading(gray_bits=13)).x.max() == 128


@pytest.mark.parametrize("bits", ["7", "17", "twelve", "-1", "1.5", ""])
def test_other_numbers_of_bits_are_refused(bits: str) -> None:
    with pytest.raises(ConfigError, match=r"--gray-bits is .*8 to 16, or auto"):
        data.Reading.of(gray_bits=bits)
    assert data.Reading.of() == data.Reading.of("", "auto") == data.Reading()


def test_a_set_that_is_almost_black_is_doubted(tmp_path: Path) -> None:
    dark, known = scans(tmp_path / "dark", SCAN, SCAN // 2), tmp_path / "known"
    for _ in range(2):  # at each start, not at the first only
        described = data.verify(dark, "source", known=known)
        assert "of the 2 images with 16 bits of gray is above 4095" in described.warnings[-1]
    assert not data.verify(dark, "source", known=known, reading=TWELVE).warnings
    # One bright image is enough: a single dark image says nothing.
    bright = scans(tmp_path / "bright", SCAN, 2 * SCAN)
    assert not data.verify(bright, "target").warnings
    assert not data.verify(scans(tmp_path / "flat", SCAN.astype(np.uint8)), "target").warnings


def test_a_simulated_run_s_model_reads_as_its_sites_did(tmp_path: Path) -> None:
    """`--gray-bits` of a simulation is in the model's file, so `predict` needs nothing more."""
    draws = np.random.default_rng(0)
    for name in ("a", "b", "t"):
        images = [
            (draws.integers(0, 400, (8, 8)) + (i % 2) * 3000).astype(np.uint16) for i in range(70)
        ]
        scans(tmp_path / "sites" / name, *images)
    about = {"rounds": 1, "model_name": "mlp", "model_hidden": "8", "run_refine": "none"}
    about |= {"baseline": "none", "quiet": True, "gray_bits": 12, "dir": tmp_path / "run"}
    run = fedda.simulate(tmp_path / "sites", "t", "fedavg", **about)
    _, meta = models.load(tmp_path / "run" / "model.safetensors")
    assert meta.inputs.window == "12 bits"
    told = run.model.predict(tmp_path / "sites" / "t")
    x = data.load_target(tmp_path / "sites" / "t", reading=TWELVE).x
    network, _ = models.load(tmp_path / "run" / "model.safetensors")
    expected = [meta.classes[i] for i in models.predict(network, x).argmax(dim=1)]
    assert sorted(told) == sorted(expected) and len({*told}) == 2  # read as 16 bits all are dark
