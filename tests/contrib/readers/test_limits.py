"""Small files of DICOM and HDF5 that would fill the memory are refused before they are decoded."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.uid import DeflatedExplicitVRLittleEndian, RLELossless

from fedda import data
from fedda.contrib.readers import dicom
from fedda.errors import DataError
from tests.dicom_files import dicom as written
from tests.fuzzing import peak

SIDE = 9_000  # pixels: 81 million of them are allowed with Pillow's own limit
BYTES = np.arange(64, dtype=np.uint8).reshape(8, 8)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 2 million pixels, so that files beyond it are made in moments."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)


def deflated(path: Path, pixel: int, rows: int, more: int = 0) -> Path:
    """A deflated DICOM file of `rows` x `rows` pixels, all alike, and `more` bytes of zeros."""
    plain = pydicom.dcmread(written(path, BYTES))
    plain.Rows = plain.Columns = rows
    plain.PixelData = bytes([pixel]) * (rows * rows + more)
    plain.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    plain.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.usefixtures("small")
def test_a_deflated_dicom_file_is_refused_by_its_header(tmp_path: Path) -> None:
    bomb = deflated(tmp_path / "a" / "1.dcm", 0, SIDE)
    assert bomb.stat().st_size < 200_000
    for read in (dicom.header, lambda file: dicom.image(file, None)):
        with peak(60), pytest.raises(DataError, match=r"1\.dcm has too many pixels"):
            read(bomb)


@pytest.mark.usefixtures("small")
def test_a_deflated_dicom_file_holds_no_more_than_its_header_says(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain.dcm", np.full((20, 20), 7, np.uint8))
    sound = deflated(tmp_path / "sound.dcm", 7, 20)
    assert dicom.header(sound) == dicom.header(plain)
    ours, theirs = (np.asarray(dicom.image(file, None)) for file in (sound, plain))
    assert np.array_equal(ours, theirs)
    bomb = deflated(tmp_path / "bomb.dcm", 0, 20, 3 * SIDE * SIDE)
    with peak(120), pytest.raises(DataError, match="cannot be read as a DICOM"):
        dicom.image(bomb, None)
    whole = sound.read_bytes()
    sound.write_bytes(whole[:-200])
    with pytest.raises(DataError, match="cannot be read as a DICOM"):
        dicom.image(sound, None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("more", [{"Rows": 30_000, "Columns": 15_000}, {"NumberOfFrames": 10**6}])
def test_a_dicom_file_of_many_runs_is_refused(tmp_path: Path, more: dict[str, int]) -> None:
    path = written(tmp_path / "1.dcm", BYTES, compress=RLELossless)
    found = pydicom.dcmread(path)
    for name, value in more.items():
        setattr(found, name, value)
    found.save_as(path)
    for role in ("source", "target"):
        with pytest.raises(DataError, match=r"too many pixels"):
            data.describe(tmp_path, "target") if role == "target" else dicom.image(path, None)


def test_gray_is_computed_in_strips(tmp_path: Path) -> None:
    """Of a large image of 16 bits no copies of eight bytes a pixel are made."""
    values = np.zeros((4000, 4000), np.uint16)
    path = written(tmp_path / "1.dcm", values, RescaleSlope="2", RescaleIntercept="-1")
    with peak(32 * 4 + 60):
        dicom.image(path, (0, 1))


def hdf5(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], **more: Any) -> Any:
    h5py = pytest.importorskip("h5py")
    file = h5py.File(path, "w")
    return file, file.create_dataset("x", shape, dtype="u1", chunks=chunks, **more)


LARGE, SMALL, ZEROS = (300, 1024, 1024), (4, 90, 90), "which only zeros can"
BEYOND = "has a chunk that is not of its size"


@pytest.mark.parametrize(
    ("shape", "chunks", "size", "more", "why"),
    [
        (LARGE, LARGE, 1000, {}, ZEROS),
        (SMALL, LARGE, 1000, {"maxshape": (None,) * 3}, ZEROS),  # the chunk counts
        *((SMALL, SMALL, 100 * 2**20, {"shuffle": shuffle}, BEYOND) for shuffle in (False, True)),
    ],
)
def test_chunks_of_nothing_but_zeros_or_beyond_their_size_are_refused(
    tmp_path: Path, shape: Any, chunks: Any, size: int, more: dict[str, Any], why: str
) -> None:
    file, x = hdf5(tmp_path / "a.h5", shape, chunks, compression="gzip", **more)
    x.id.write_direct_chunk((0, 0, 0), zlib.compress(bytes(size)))
    file.close()
    with peak(50), pytest.raises(DataError, match=why):
        data.verify(tmp_path / "a.h5", "target")


def test_other_ways_of_compression_are_refused_and_usual_ones_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    x = np.random.default_rng(0).integers(0, 256, (64, 40, 40), dtype=np.uint8)
    usual: dict[str, Any] = {
        "gzip": {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "lzf": {"compression": "lzf"},
        "none": {"chunks": (5, 40, 40)},
        "large": {"compression": "gzip", "chunks": (64, 40, 40)},
    }
    for name, how in usual.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=x, **how)
        assert np.array_equal(data.load_target(tmp_path / f"{name}.h5").x[:, 0], x)
    file, _ = hdf5(tmp_path / "odd.h5", (4, 9, 9), (4, 9, 9), scaleoffset=4)
    file.close()
    with pytest.raises(DataError, match="write it with gzip, lzf or without"):
        data.load_target(tmp_path / "odd.h5")


def test_class_names_that_are_one_long_text_many_times_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros((4, 9, 9), np.uint8), np.arange(4)
        names = file.create_dataset("classes", (5000,), dtype=h5py.string_dtype())
        names[:] = [f"{i}" * 10_000 for i in range(9)] * 555 + ["a"] * 5
    with peak(60), pytest.raises(DataError, match=r"classes in .* longer than"):
        data.load_source(tmp_path / "a.h5")
