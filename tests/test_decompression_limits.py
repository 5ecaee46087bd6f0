"""Small files that would fill the memory are refused before they are decoded."""

import struct
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
from fedda.data import columns, decompression_limits, pixels
from fedda.data.form import Form
from fedda.errors import DataError
from tests.contrib.readers.test_radiographs import dicom as written
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
    Image.fromarray(values).save(tmp_path / "1.png")
    with peak(32 * 3 + 60):
        pixels.read_images([tmp_path / "1.png"], Form(channels=1, size=8), None)


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


@pytest.mark.parametrize(
    ("ending", "coded"), [("parquet", False), ("parquet", True), ("arrow", False)]
)
def test_a_table_of_one_text_many_times_is_refused(
    tmp_path: Path, ending: str, coded: bool
) -> None:
    arrow, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    rows = 20_000
    label = arrow.DictionaryArray.from_arrays(
        arrow.array(np.zeros(rows, np.int32)), arrow.array(["c" * 200_000])
    )
    table = arrow.table({"path": [f"{i}.png" for i in range(rows)], "label": label})
    file = tmp_path / f"a.{ending}"
    if ending == "parquet":
        parquet.write_table(table, file, store_schema=coded)
    else:
        blank = arrow.table({"image": [bytes(10**6)] * 100})
        options = arrow.ipc.IpcWriteOptions(compression="zstd")
        with arrow.ipc.new_stream(str(file), blank.schema, options=options) as out:
            out.write_table(blank, max_chunksize=10)
    assert file.stat().st_size < 400_000
    wanted = ("path", "label", "image")
    with peak(120), pytest.raises(DataError, match="grows to more than 500 times its size"):
        columns.read(file, wanted)


@pytest.mark.parametrize("coded", [False, True])
def test_a_table_of_one_image_many_times_is_refused(tmp_path: Path, coded: bool) -> None:
    """20,000,000 of them take 390 kB, and more than a minute until the last is decoded."""
    arrow, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    rows = columns.FEW + 1000
    numbers = arrow.array(np.zeros(rows, np.int32))
    image = arrow.DictionaryArray.from_arrays(numbers, arrow.array([bytes(67)]))
    label = arrow.array((np.arange(rows) % 2).tolist())
    table = arrow.table({"image": image, "label": label})
    parquet.write_table(table, tmp_path / "a.parquet", store_schema=coded)
    with pytest.raises(DataError, match=r"images in [\d,]+ bytes, so most are copies of a few"):
        columns.read(tmp_path / "a.parquet")
    parquet.write_table(table[: columns.FEW], tmp_path / "few.parquet", store_schema=coded)
    assert len(columns.read(tmp_path / "few.parquet")["image"]) == columns.FEW


def test_a_parquet_file_that_claims_much_is_not_read(tmp_path: Path) -> None:
    arrow, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    zeros = arrow.table({"path": [" " * 10**6] * 100})
    parquet.write_table(zeros, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with peak(30), pytest.raises(DataError, match="grows to more than 500 times its size"):
        columns.read(tmp_path / "a.parquet")


def test_pages_of_a_tiff_file_and_its_size_are_told_by_its_header(tmp_path: Path) -> None:
    """Its strips are never read."""
    image = Image.new("L", (8, 8))
    image.save(tmp_path / "1.tif", compression="tiff_deflate")
    whole = (tmp_path / "1.tif").read_bytes()
    for tag in (256, 257):
        for kind in (3, 4):
            small = struct.pack("<HHII", tag, kind, 1, 8)
            whole = whole.replace(small, struct.pack("<HHII", tag, 4, 1, 2**20))
    (tmp_path / "1.tif").write_bytes(whole)
    with peak(30), pytest.raises(DataError, match="too many pixels"):
        data.describe(tmp_path, "target")


def test_a_stream_is_measured_in_little_memory() -> None:
    packed = zlib.compress(bytes(64 * 2**20))
    with peak(20):
        assert decompression_limits.inflated(packed, zlib.MAX_WBITS, float("inf")) == 64 * 2**20
        assert decompression_limits.inflated(packed, zlib.MAX_WBITS, 10) < 3 * 2**20
