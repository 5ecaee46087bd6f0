"""Which files are images, samples of more than 8 bits as they lie in them, what is read wrongly.

Pillow opens gray of 16 bits and more as it is, though it does not turn round TIFF's WhiteIsZero. Of
16-bit colours, and of such gray beside transparency, it keeps the high byte alone (`is_cut`). It
takes signed bytes for unsigned ones, mixes up the planes of some TIFF files, passes over a
predictor where there should be none, and compares a clear colour of 16 bits to 8: `fault` finds it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

DICOM = (".dcm", ".dicom")  # endings of its files
EXTENSIONS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", *DICOM})
DEEP = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})  # Pillow's modes of 16 bits of gray
WIDE = frozenset({"I", "F"})  # of TIFF files: signed, or of 32 bits, whole or not
BITS = 16
NO_SCALE = 32  # bits of gray that has no scale of its own
CUT = 48  # bits of colours, or of gray with transparency, of which the high byte is read

_BITS_PER_SAMPLE, _COMPRESSION, _PHOTOMETRIC, _PLANAR, _PREDICTOR, _FORMAT = (
    *(258, 259, 262, 284, 317, 339),
)  # TIFF's tags
_SAMPLES, _EXTRA = 277, 338
_COLOURS = {0: 1, 1: 1, 3: 1, 5: 4}  # samples of a pixel's colour, by _PHOTOMETRIC; else 3
_ALPHA = {(1,), (2,)}  # the only extra sample is transparency
_UNPREDICTED = (1, 32773)  # compressions that take no predictor: none and PackBits


def is_image(file: Path) -> bool:
    """Whether a file is an image: by its ending, or DICOM by its content, as a PACS names it."""
    return file.suffix.lower() in EXTENSIONS or is_dicom(file)


def is_dicom(file: Path) -> bool:
    """Whether a regular file has DICOM's mark."""
    try:
        with file.open("rb") as content:
            return file.is_file() and content.read(132)[128:] == b"DICM"
    except (OSError, ValueError):  # a name with a null byte is none
        return False


_NO_IMAGES = {
    (".nii", ".nii.gz"): "NIfTI, a volume of many images, which is not read: save the slices to "
    "use as PNG or DICOM",
    (".csv", ".parquet"): "a table: give its own path, or in a simulation put it in this folder's "
    "place, under the site's name",
    (".npy", ".npz", ".h5", ".hdf5"): "of arrays: save all of a site as x_train, y_train, x_test "
    "and y_test of one .npz file, alone in the folder",
}


def volumes(files: Iterable[Path]) -> str:
    """A sentence if some of these files hold data that is no image; else empty."""
    names = [file.name for file in files]
    kinds = ((n, of) for end, of in _NO_IMAGES.items() for n in names if n.lower().endswith(end))
    return next((f" ({name} is {kind})" for name, kind in kinds), "")


class Deep(NamedTuple):
    """Gray (H, W) of more than 8 bits."""

    values: np.ndarray  # the samples
    alpha: np.ndarray | None  # uint8 (H, W), 0 where nothing is seen; None if all is
    bits: int  # how many a sample has: 9 to 16, or NO_SCALE
    inverted: bool  # whether 0 is white


def fault(image: Image.Image) -> str:
    """What of an image's format is read wrongly, as the rest of a sentence; empty if nothing is."""
    bits, odd = _sample_bits(image), ""
    colours = _COLOURS.get(_tag(image, _PHOTOMETRIC, 1), 3)
    bands = max(_tag(image, _SAMPLES, 1), len(bits))
    if image.format == "PNG" and is_cut(image) and "transparency" in image.info:
        odd = "one transparent colour of 16 bits"
    elif image.format != "TIFF":
        return ""
    elif bands > colours and _tag(image, _EXTRA, ()) not in _ALPHA:
        return (
            f"has {bands} bands, and those beyond the first {colours} would be left out: save an "
            "image of gray or of red, green and blue, or give the bands' values as vectors"
        )
    elif 2 in _tag(image, _FORMAT, (1,)) and max(bits) <= 8:
        odd = "signed samples of 8 bits"
    elif len(bits) > 1 and _tag(image, _PLANAR, 1) == 2 and (max(bits) > 8 or len(bits) == 2):
        odd = "planes of 16 bits, or of gray and transparency, one after the other"
    elif _tag(image, _PREDICTOR, 1) != 1 and _tag(image, _COMPRESSION, 1) in _UNPREDICTED:
        odd = "a predictor without a compression that has one"
    return f"has {odd}, which is not read: convert it to a PNG of 8 bits" if odd else ""


def is_veiled(image: Image.Image) -> bool:
    """Whether most of an image is half transparent, here more and there less, as by a band."""
    if image.mode not in ("LA", "RGBA"):
        return False
    counts = image.getchannel("A").histogram()
    return sum(counts[1:-1]) * 2 > sum(counts) > max(counts)


def is_wide(image: Image.Image) -> bool:
    """Whether an image is gray without a scale of its own."""
    return image.mode == "F" or (image.mode == "I" and image.format == "TIFF")


def is_cut(image: Image.Image) -> bool:
    """Whether an image has colours of 16 bits, or gray with transparency, read as their high byte.

    The image must not be loaded.
    """
    if image.format == "TIFF":
        return len(bits := _sample_bits(image)) > 1 and max(bits) > 8
    return _raw(image).endswith(";16B") and image.mode not in DEEP


def stored(image: Image.Image) -> int:
    """How many bits a file stores per sample: 9 to 16, NO_SCALE, CUT, or 8 for others."""
    if is_wide(image):
        return NO_SCALE
    if image.mode not in DEEP:
        return CUT if is_cut(image) else 8
    bits = _sample_bits(image)[0] if image.format == "TIFF" else BITS
    return bits if 8 < bits < BITS else BITS


def channels(image: Image.Image, gray: frozenset[str]) -> int:
    """1 or 3."""
    return 1 if image.mode in gray | WIDE or _raw(image).startswith("LA") else 3


def deep(image: Image.Image) -> Deep | None:
    """The samples of gray of more than 8 bits; None for other images."""
    bits = stored(image)
    if bits in (8, CUT):
        return None
    inverted = image.format == "TIFF" and _tag(image, _PHOTOMETRIC, 1) == 0
    values, alpha, clear = np.asarray(image), None, image.info.get("transparency")
    if isinstance(clear, int):
        alpha = np.where(values == clear, 0, 255).astype(np.uint8)
    return Deep(values, alpha, bits, inverted)


def clear_value(image: Image.Image) -> Any:
    """The transparent value of a PNG of gray of less than 8 bits, as its pixels are scaled."""
    clear, (_, _, bits) = image.info.get("transparency"), _raw(image).partition(";")
    if isinstance(clear, int) and image.mode == "L" and bits in ("2", "4"):
        return clear * 255 // (2 ** int(bits) - 1)
    return clear


def _raw(image: Image.Image) -> str:
    """How the samples of a PNG file lie in it, in Pillow's words; empty for other formats."""
    tile = getattr(image, "tile", None)
    return str(tile[0][3]) if image.format == "PNG" and tile else ""


def _tag(image: Image.Image, number: int, default: Any) -> Any:
    return getattr(image, "tag_v2", {}).get(number, default)


def _sample_bits(image: Image.Image) -> tuple[int, ...]:
    return tuple(_tag(image, _BITS_PER_SAMPLE, (1,)))
