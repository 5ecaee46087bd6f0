"""Small files that would fill the memory are refused before they are decoded."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedda import data
from fedda.data import columns, decompression_limits, pixels
from fedda.data.form import Form
from fedda.errors import DataError
from tests.fuzzing import peak


def test_gray_is_computed_in_strips(tmp_path: Path) -> None:
    """Of a large image of 16 bits no copies of eight bytes a pixel are made."""
    Image.fromarray(np.zeros((4000, 4000), np.uint16)).save(tmp_path / "1.png")
    with peak(32 * 3 + 60):
        pixels.read_images([tmp_path / "1.png"], Form(channels=1, size=8), None)


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
    # The column takes 4 GB. How much of it is there at once depends on Arrow's allocator and on
    # what the process has read before: 60 to 130 MB were seen.
    with peak(300), pytest.raises(DataError, match="grows to more than 500 times its size"):
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
