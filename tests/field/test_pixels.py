"""Every pixel that is read is the pixel that was written, or the file is refused in a sentence.

Files are written byte by byte (`tests.field.written`), so the right values are known without a
reader: readers x bits x photometric x alpha x palette x byte order x compression x orientation.
"""

import io
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
from pydicom.uid import ExplicitVRBigEndian

from fedda import data
from fedda.errors import DataError
from tests.dicom_files import dicom
from tests.field.written import (
    DEFLATE,
    GRAY,
    GRAY_ALPHA,
    LZW,
    NONE,
    PACKBITS,
    PALETTE,
    RGB,
    RGB_ALPHA,
    png,
    tiff,
)

RNG = np.random.default_rng(0)
SHAPE = (6, 10)
ORDERS, PACKINGS = ("<", ">"), (NONE, LZW, DEFLATE, PACKBITS)
WINDOW = data.Reading(window="-100,100")


class Trial(NamedTuple):
    """A file, and how it should be seen: (H, W[, 3]) of 0 to 255; None: only refused is right."""

    name: str
    content: bytes
    right: np.ndarray | None
    reading: data.Reading = data.Reading()
    tolerance: float = 1.0  # of rounding


def drawn(bits: int, channels: int = 0) -> np.ndarray:
    """Random samples."""
    kind = np.uint8 if bits <= 8 else np.uint16
    return RNG.integers(0, 2**bits, (*SHAPE, *([channels] * bool(channels)))).astype(kind)


def seen(samples: np.ndarray, bits: int) -> np.ndarray:
    """Samples as parts of 255."""
    return samples.astype(float) * 255 / (2**bits - 1)


def on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return colour * alpha / 255 + 255 - alpha


def pngs() -> Iterator[Trial]:
    for bits in (1, 2, 4, 8, 16):
        v = drawn(bits)
        yield Trial(f"gray {bits}", png(v, bits, GRAY), seen(v, bits))
        clear = int(v[0, 0]).to_bytes(2, "big")
        right = np.where(v == v[0, 0], 255, seen(v, bits))
        yield Trial(f"gray {bits}, one clear", png(v, bits, GRAY, transparent=clear), right)
    for bits in (8, 16):
        v = drawn(bits, 3)
        yield Trial(f"rgb {bits}", png(v, bits, RGB), seen(v, bits))
        clear, right = b"".join(int(c).to_bytes(2, "big") for c in v[0, 0]), seen(v, bits)
        right[0, 0] = 255
        yield Trial(f"rgb {bits}, one clear", png(v, bits, RGB, transparent=clear), right)
        for kind, channels in ((GRAY_ALPHA, 1), (RGB_ALPHA, 3)):
            v = drawn(bits, channels + 1)
            full = seen(v, bits)
            right = on_white(full[..., :-1], full[..., -1:])
            right = right[..., 0] if channels == 1 else right
            yield Trial(f"alpha {bits}, {channels}", png(v, bits, kind), right, tolerance=3)
    for bits in (1, 2, 4, 8):
        v, colours = drawn(bits), RNG.integers(0, 256, (2**bits, 3))
        alpha = RNG.integers(0, 256, 2**bits)
        made = png(v, bits, PALETTE, colours.tolist())
        yield Trial(f"palette {bits}", made, colours[v])
        made = png(v, bits, PALETTE, colours.tolist(), bytes(alpha.tolist()))
        yield Trial(f"palette {bits}, alpha", made, on_white(colours[v], alpha[v][..., None]))


def tiffs() -> Iterator[Trial]:
    for order, packing, photometric, bits in product(
        ORDERS, PACKINGS, (0, 1), (1, 2, 4, 8, 12, 16)
    ):
        v = drawn(bits)
        right = seen(v, bits) if photometric else 255 - seen(v, bits)
        about = f"gray {bits} {order} packed {packing} photometric {photometric}"
        yield Trial(about, tiff(v, bits, photometric, order, packing), right)
        if bits in (8, 16):
            made = tiff(v, bits, photometric, order, packing, predictor=2)
            yield Trial(f"{about} predicted", made, right if packing in (LZW, DEFLATE) else None)
    for order, packing, bits, planar in product(ORDERS, PACKINGS[:3], (8, 16), (1, 2)):
        about = f"{bits} {order} packed {packing} planar {planar}"
        v = drawn(bits, 3)
        yield Trial(f"rgb {about}", tiff(v, bits, 2, order, packing, planar=planar), seen(v, bits))
        for extra, colours in product((0, 1, 2), (1, 3)):
            yield with_extra(about, bits, order, packing, planar, extra, colours)
    for order, bits in product(ORDERS, (1, 2, 4, 8)):
        v, palette = drawn(bits), RNG.integers(0, 65536, (3, 2**bits)).astype(np.uint16)
        yield Trial(
            f"palette {bits} {order}", tiff(v, bits, 3, order, palette=palette), palette.T[v] / 257
        )
    for order, bits in product(ORDERS, (8, 16)):
        v = drawn(bits, 4)
        c = 255 - seen(v, bits)
        right = c[..., :3] * c[..., 3:] / 255
        yield Trial(f"cmyk {bits} {order}", tiff(v, bits, 5, order), right, tolerance=2)


def with_extra(
    about: str, bits: int, order: str, packing: int, planar: int, extra: int, colours: int
) -> Trial:
    """A TIFF with a sample beside its colours: unspecified, or transparency of both kinds."""
    v = drawn(bits, colours + 1)
    if extra == 1:  # premultiplied
        v[..., :-1] = v[..., :-1].astype(float) * v[..., -1:] / (2**bits - 1)
    c, a = seen(v, bits)[..., :-1], seen(v, bits)[..., -1:]
    right = (c, c + 255 - a, on_white(c, a))[extra]
    right = right[..., 0] if colours == 1 else right
    made = tiff(v, bits, 2 if colours == 3 else 1, order, packing, extra=extra, planar=planar)
    return Trial(f"{colours} and extra {extra}, {about}", made, right, tolerance=3)


def windowed() -> Iterator[Trial]:
    """Signed, wide and float gray, whose black and white the run says."""
    kinds = [np.dtype(k) for k in ("i1", "i2", "i4", "u4", "u8", "f2", "f4", "f8")]
    for kind, order, photometric in product(kinds, ORDERS, (0, 1)):
        low = 0 if kind.kind == "u" else -120
        v = np.linspace(low, 120, 60).reshape(SHAPE).astype(kind)
        right = np.clip((v.astype(float) + 100) / 200, 0, 1) * 255
        right = right if photometric else 255 - right
        made = tiff(
            v, kind.itemsize * 8, photometric, order, kind={"u": 1, "i": 2, "f": 3}[kind.kind]
        )
        about = f"{kind.name} {order} photometric {photometric}"
        yield Trial(about, made, right, WINDOW)
        yield Trial(f"{about}, no window", made, None)


def turned() -> Iterator[Trial]:
    for number, bits in product(range(1, 9), (8, 16)):
        v = drawn(bits)
        up = {1: v, 2: v[:, ::-1], 3: v[::-1, ::-1], 4: v[::-1]}
        up |= {5: v.T, 6: np.rot90(v, -1), 7: v[::-1, ::-1].T, 8: np.rot90(v)}
        made = tiff(v, bits, 1, orientation=number)
        yield Trial(f"orientation {number}, {bits}", made, seen(up[number], bits))


def twelve_bits() -> Iterator[Trial]:
    """12 of 16 bits: the bits or a window bring them to 255, or are refused, in every mode."""
    for reading in (data.Reading(gray_bits=12), data.Reading(window="0,4095")):
        about = f"{reading.gray}"
        v = drawn(12)
        yield Trial(f"png gray {about}", png(v, 16, GRAY), seen(v, 12), reading)
        both = np.dstack([v, np.full_like(v, 65535)])
        yield Trial(f"png gray alpha {about}", png(both, 16, GRAY_ALPHA), None, reading)
        v = drawn(12, 3)
        yield Trial(f"png rgb {about}", png(v, 16, RGB), None, reading)
        yield Trial(f"tiff rgb {about}", tiff(v, 16, 2), None, reading)
        v = drawn(12)
        yield Trial(f"tiff gray {about}", tiff(v, 16, 1), seen(v, 12), reading)
        yield Trial(f"tiff white {about}", tiff(4095 - v, 16, 0), seen(v, 12), reading)


def read(folder: Path, ending: str, trial: Trial) -> np.ndarray | str:
    """The only image of a folder, (H, W[, 3]); or why it is refused."""
    (folder / f"x.{ending}").write_bytes(trial.content)
    try:
        data.verify(folder, "target", reading=trial.reading)
        x = data.load_target(folder, reading=trial.reading).x[0].numpy()
    except DataError as error:
        return str(error)
    return x[0] if len(x) == 1 else x.transpose(1, 2, 0)


TRIALS = [("png", pngs), ("tif", tiffs), ("tif", windowed), ("tif", turned), ("", twelve_bits)]


@pytest.mark.parametrize(("ending", "trials"), TRIALS)
def test_each_pixel_is_right_or_refused(tmp_path: Path, ending: str, trials: Any) -> None:
    wrong, right = [], 0
    for i, trial in enumerate(trials()):
        (tmp_path / f"{i}").mkdir()
        found = read(tmp_path / f"{i}", ending or trial.name.partition(" ")[0], trial)
        if isinstance(found, str):
            assert "\n" not in found and len(found) < 400
        elif trial.right is None or found.shape != trial.right.shape:
            wrong.append(f"{trial.name}: {found.shape} instead of a refusal or another shape")
        elif (off := float(np.abs(found - trial.right).max())) > trial.tolerance:
            wrong.append(f"{trial.name}: off by {off:.1f}")
        else:
            right += 1
    assert not wrong
    assert right > 5  # not all are refused


@pytest.mark.contrib
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(("stored", "high"), [(8, 7), (10, 9), (12, 11), (12, 15), (16, 15)])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_dicom_is_seen_as_its_bits_say(
    tmp_path: Path, photometric: str, stored: int, high: int, signed: bool, order: str
) -> None:
    """Values of `stored` bits in 16, at the top or the bottom; other bits hold other things."""
    low = -(2 ** (stored - 1)) if signed else 0
    values = RNG.integers(low, low + 2**stored, SHAPE)
    held = (values & (2**stored - 1)) << (high + 1 - stored)
    if high + 1 < 16:
        held |= RNG.integers(0, 2, SHAPE) << 15  # an overlay, or nothing that is known
    about: dict[str, Any] = {"BitsStored": stored, "HighBit": high}
    about |= {"PixelRepresentation": int(signed), "PhotometricInterpretation": photometric}
    dicom(tmp_path / "x.dcm", held.astype(np.uint16), **about)
    if order == ">":
        turn_round(tmp_path / "x.dcm")
    right = (values - low) * 255 / (2**stored - 1)
    if high + 1 > stored:  # as the standard allowed until 2007
        with pytest.raises(DataError, match="do not end at their lowest bit"):
            data.load_target(tmp_path)
        return
    found = data.load_target(tmp_path).x[0, 0].numpy()
    assert np.abs(found - (255 - right if photometric == "MONOCHROME1" else right)).max() <= 1


def turn_round(path: Path) -> None:
    """Write a file again, with the bytes of each number in the other order."""
    found, made = pydicom.dcmread(path), pydicom.Dataset()
    for element in found:
        made.add(element)
    made.file_meta = found.file_meta
    made.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    made.PixelData = np.frombuffer(found.PixelData, "<u2").astype(">u2").tobytes()
    made.save_as(path, enforce_file_format=True)


@pytest.mark.contrib
@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID", None])
@pytest.mark.parametrize("table", [False, True])
def test_dicom_windows_and_tables_are_pydicoms_or_refused(
    tmp_path: Path, function: str | None, table: bool
) -> None:
    values = RNG.integers(0, 4096, SHAPE).astype(np.uint16)
    more: dict[str, Any] = {"BitsStored": 12, "WindowCenter": 1000, "WindowWidth": 500}
    if function:
        more["VOILUTFunction"] = function
    if table:
        lut = pydicom.Dataset()
        lut.LUTDescriptor = [4096, 0, 16]
        lut.LUTData = (np.arange(4096) ** 2 // 256).astype(np.uint16).tobytes()
        lut.ModalityLUTType = "US"
        more["ModalityLUTSequence"] = [lut]
    else:
        more |= {"RescaleSlope": 2, "RescaleIntercept": -1024}
    path = dicom(tmp_path / "x.dcm", values, **more)
    if table or function == "SIGMOID":
        with pytest.raises(DataError, match=r"lookup table|sigmoid"):
            data.load_target(tmp_path)
        return
    found = pydicom.dcmread(path)
    theirs = apply_voi_lut(apply_modality_lut(found.pixel_array, found), found).astype(float)
    ours = data.load_target(tmp_path).x[0, 0].numpy()
    assert np.abs(ours - (theirs - theirs.min()) * 255 / np.ptp(theirs)).max() <= 1


def written(place: Path, values: np.ndarray, form: str) -> Path:
    """The same gray images in one of the forms that sites bring."""
    place.mkdir()
    if form == "npz":
        np.savez(place / "a.npz", x=values)
        return place / "a.npz"
    if form == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(place / "a.h5", "w") as file:
            file["x"] = values
        return place / "a.h5"
    for i, image in enumerate(values):
        if form == "dcm":
            dicom(place / f"{i}.dcm", image.astype(np.uint16), BitsStored=8)
        elif form == "png16":
            (place / f"{i}.png").write_bytes(png(image.astype(np.uint16) * 257, 16, GRAY))
        elif form in ("rgb16", "tif16"):
            colours = np.dstack([image.astype(np.uint16) * 257] * 3)
            made = png(colours, 16, RGB) if form == "rgb16" else tiff(colours, 16, 2)
            (place / f"{i}.{'png' if form == 'rgb16' else 'tif'}").write_bytes(made)
        else:
            Image.fromarray(image).save(place / f"{i}.{form}")
    return place


@pytest.mark.parametrize(
    "form", ["npz", "h5", "png", "bmp", "tif", "dcm", "png16", "rgb16", "tif16"]
)
@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0, 1, "above"), (0, 15, "above"), (120, 130, "small part"), (0, 255, ""), (0, 60, "")],
)
def test_a_set_that_uses_little_of_its_range_is_doubted(
    tmp_path: Path, form: str, low: int, high: int, words: str
) -> None:
    values = RNG.integers(low, high + 1, (4, 16, 16)).astype(np.uint8)
    values[0, 0, :2] = low, high
    said = " ".join(data.verify(written(tmp_path / "x", values, form), "target").warnings)
    assert (words in said) if words else not said


@pytest.mark.parametrize("form", ["npz", "h5", "png", "bmp"])
@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (data.Reading(gray_bits=12), "--gray-bits 12 does not apply"),
        (data.Reading(window="0,4095"), "the window 0,4095 does not apply"),
    ],
)
def test_an_option_that_does_not_apply_says_so(
    tmp_path: Path, form: str, reading: data.Reading, words: str
) -> None:
    values = RNG.integers(0, 256, (4, 16, 16)).astype(np.uint8)
    found = data.describe(written(tmp_path / "x", values, form), "target", reading)
    assert words in " ".join(found.warnings)


def test_an_encoded_image_is_read_as_its_file(tmp_path: Path) -> None:
    """In a table the same bytes give the same pixels, for each kind of file."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    v, out = drawn(16, 3), io.BytesIO()
    Image.fromarray(drawn(8, 3)).save(out, "JPEG")
    made = [png(v, 16, RGB), tiff(drawn(8, 3), 8, 2), out.getvalue()]
    parquet.write_table(arrow.table({"image": made}), tmp_path / "a.parquet")
    (tmp_path / "files").mkdir()
    for i, content in enumerate(made):
        (tmp_path / "files" / f"{i}.{('png', 'tif', 'jpg')[i]}").write_bytes(content)
    model = (3, *SHAPE)
    found = [next(data.batches(tmp_path / name, model, 8)) for name in ("files", "a.parquet")]
    assert np.array_equal(found[0][1].x.numpy(), found[1][1].x.numpy())


@pytest.mark.parametrize(
    ("bands", "extra", "refused"),
    [(3, None, ""), (4, 0, "4 bands"), (4, 2, "half transparent"), (5, 0, "bands|cannot be read")],
)
def test_bands_beyond_colours_are_named(
    tmp_path: Path, bands: int, extra: int | None, refused: str
) -> None:
    values = RNG.integers(60, 200, (*SHAPE, bands)).astype(np.uint8)
    (tmp_path / "a.tif").write_bytes(tiff(values, 8, 2, extra=extra))
    with pytest.raises(DataError, match=refused) if refused else nullcontext():
        data.load_target(tmp_path)
