"""DICOM files: pixels, and what of the header says how they are to be seen; nothing else is read.

    stored value  ->  slope * value + intercept  (RescaleSlope, RescaleIntercept; 1 and 0 if none)
    low, high         black and white: the run's window, else the file's WindowCenter and
                      WindowWidth (the first of several), else all values of BitsStored bits
    MONOCHROME1       low is white, so the result is inverted

Names, dates and all other elements are passed over while the file is parsed, so they are in no
message, log, cache or model. For the same reason no message quotes pydicom's own errors. Tables for
display are not applied. Files whose values are those of a table, or whose window is a sigmoid where
the run has none, are refused.
"""

import io
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from PIL import Image

from fedda.data import decompression_limits
from fedda.data.optional import needed
from fedda.data.pixels import Header
from fedda.data.samples import DICOM, EXTENSIONS, Window, is_dicom, to_bytes
from fedda.errors import DataError, reason

_LOOK = (
    *("Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "PhotometricInterpretation"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PlanarConfiguration"),
    *("RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth"),
    *("VOILUTFunction", "ModalityLUTSequence"),
)
_GRAY = ("MONOCHROME1", "MONOCHROME2")
_PIXELS = 0x7FE00008  # tags from here on are pixels


class Content(Protocol):
    """A file's content, and by `str()` its name."""

    def read_bytes(self) -> bytes: ...


class Dicom(NamedTuple):
    """A DICOM file."""

    file: Content

    def header(self) -> Header:
        """As `header` says."""
        return header(self.file)

    def image(self, window: Window | None) -> Image.Image:
        """As `image` says."""
        return image(self.file, window)


def opened(file: Content) -> Dicom | None:
    """A file as DICOM, if it is to be read so."""
    return Dicom(file) if is_one(file) else None


def is_one(file: Content) -> bool:
    """Whether a file is to be read as DICOM: by its ending, else by its content."""
    if isinstance(file, Path):
        return file.name.lower().endswith(DICOM) or (
            file.suffix.lower() not in EXTENSIONS and is_dicom(file)
        )
    return file.read_bytes()[128:132] == b"DICM"


def header(file: Content) -> Header:
    """Read how large a file's image is, and how it is to be seen, without its pixels."""
    return _seen(_parsed(file, _LOOK), file)


def image(file: Content, window: Window | None) -> Image.Image:
    """Read a file -> an image of 8 bits, gray or RGB.

    Args:
        file: the file.
        window: the values that become black and white; None: as the file says.

    Raises:
        DataError: it is no DICOM file with one image, or needs a package that is not installed.
    """
    found = _parsed(file, (*_LOOK, "PixelData"))
    about = _seen(found, file)
    with decompression_limits.alone(about.width * about.height):
        pixels = _decoded(found, file)
        if about.scale is None:
            if pixels.dtype != np.uint8:
                raise _error(
                    file, "has colours of more than 8 bits: convert it to an 8-bit RGB image"
                )
            return Image.fromarray(pixels)
        slope, intercept = _number(found, "RescaleSlope", 1), _number(found, "RescaleIntercept", 0)
        if not window and about.own and found.get("VOILUTFunction") == "SIGMOID":
            raise _error(
                file, "has a sigmoid window, which is not read: say a window with input.window"
            )
        gray = to_bytes(pixels, window or about.scale, slope=slope, intercept=intercept)
    return Image.fromarray(255 - gray if _photometric(found) == "MONOCHROME1" else gray)


def _parsed(file: Content, names: tuple[str, ...]) -> Any:
    """Some elements of a file -> pydicom.Dataset."""
    pydicom = needed("pydicom", "dicom", f"{file} is a DICOM file, which")
    try:
        with (
            io.BytesIO(file.read_bytes())
            if not isinstance(file, Path)
            else file.open("rb") as content
        ):
            found = _inflated(pydicom, content, names, file)
            if found is not None:
                return found
            content.seek(0)
            return pydicom.dcmread(
                content, specific_tags=[*names], stop_before_pixels="PixelData" not in names
            )
    except DataError:
        raise
    except OSError as error:
        raise _error(file, f"cannot be opened ({reason(error)}): check it") from None
    except Exception:  # pydicom raises errors of many kinds, whose texts may quote the header
        raise _unreadable(file) from None


def _inflated(pydicom: Any, stream: BinaryIO, names: tuple[str, ...], file: Content) -> Any | None:
    """The same of a deflated file, of which no more is inflated than its image needs; else None.

    pydicom would inflate all of it to read its header.
    """
    reader = pydicom.filereader
    reader.read_preamble(stream, force=False)
    about = reader._read_file_meta_info(stream)
    if about.get("TransferSyntaxUID") != pydicom.uid.DeflatedExplicitVRLittleEndian:
        return None
    packed, tags = stream.read(), [pydicom.tag.Tag(name) for name in names]

    def read(most: int, pixels: bool) -> Any:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        part = inflate.decompress(packed, most)
        if pixels and inflate.unconsumed_tail:
            raise _unreadable(file)
        stop = None if pixels else lambda tag, *_: tag >= _PIXELS
        found = reader.read_dataset(
            io.BytesIO(part), False, True, stop_when=stop, specific_tags=tags
        )
        found.file_meta = about
        return found

    found = read(decompression_limits.SMALL, pixels=False)
    if "PixelData" not in names:
        return found
    seen = _seen(found, file)
    values = seen.width * seen.height * seen.channels
    return read(
        decompression_limits.SMALL + values * min(int(found.BitsAllocated), 32) // 8, pixels=True
    )


def _seen(found: Any, file: Content) -> Header:
    try:
        frames = int(found.get("NumberOfFrames") or 1)
        kind, channels = _photometric(found), int(found.SamplesPerPixel)
        width, height = int(found.Columns), int(found.Rows)
        scale, own = _scale(found) if kind in _GRAY else (None, False)
    except Exception:  # a value that is missing or no number
        raise _unreadable(file) from None
    decompression_limits.check_pixels(file, width, height, max(1, frames))
    bits = int(found.BitsStored)
    odd = ""
    if found.get("ModalityLUTSequence"):
        odd = "has a lookup table of its values, which is not read: save it with its values"
    elif int(found.get("HighBit") or bits - 1) != bits - 1:
        odd = "has values that do not end at their lowest bit, which is not read: save it again"
    elif channels == 3 and bits != 8:
        odd = "has colours of other than 8 bits: convert it to an 8-bit RGB image"
    elif frames > 1:
        odd = f"holds {frames} frames, but one image is needed: save that as a file of its own"
    elif channels == 3 and (kind == "RGB" or kind.startswith("YBR")):
        pass
    elif (channels, kind in _GRAY) != (1, True):
        odd = "has neither gray nor RGB pixels (it may have a palette): convert it to one"
    if odd:
        raise _error(file, odd)
    return Header(width, height, channels, 0, scale, own)


def _scale(found: Any) -> tuple[Window, bool]:
    """The values that are black and white, and whether the file says them (DICOM PS3.3, C.11.2)."""
    center, width = _number(found, "WindowCenter", None), _number(found, "WindowWidth", None)
    exact = found.get("VOILUTFunction") == "LINEAR_EXACT"
    if center is not None and width is not None and exact and width > 0:
        return (center - width / 2, center + width / 2), True
    if center is not None and width is not None and width > 1:
        return (center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2), True
    bits, signed = int(found.BitsStored), int(found.get("PixelRepresentation") or 0)
    ends = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    slope, intercept = _number(found, "RescaleSlope", 1), _number(found, "RescaleIntercept", 0)
    low, high = sorted(end * slope + intercept for end in ends)
    if not low < high:
        raise ValueError
    return (low, high), False


def _number(found: Any, name: str, default: Any) -> Any:
    """A number of a file, the first one of several."""
    value = found.get(name)
    if value is None or value == "":
        return default
    value = float(value if isinstance(value, int | float | str) else value[0])
    if not np.isfinite(value):
        raise ValueError
    return value


def _photometric(found: Any) -> str:
    return str(found.PhotometricInterpretation).strip()


def _decoded(found: Any, file: Content) -> np.ndarray:
    """A file's stored values, (H, W) or RGB (H, W, 3)."""
    uid = found.file_meta.get("TransferSyntaxUID")
    compressed = bool(getattr(uid, "is_compressed", False))
    if compressed and not _has_decoder(uid):
        raise _error(
            file,
            f"is compressed as {uid.name}, which needs the package python-gdcm, which is not "
            "installed: pip install python-gdcm",
        )
    try:
        return np.asarray(found.pixel_array)
    except Exception:  # as above
        if not compressed:
            raise _unreadable(file) from None
        raise _error(
            file,
            f"is compressed as {uid.name} and cannot be decoded: pip install python-gdcm may help; "
            "else replace or remove it, or pass over such files with --skip-broken",
        ) from None


def _has_decoder(uid: Any) -> bool:
    pixels = needed("pydicom.pixels", "dicom", "DICOM")
    try:
        return bool(pixels.get_decoder(uid).is_available)
    except NotImplementedError:
        return False


def _unreadable(file: Content) -> DataError:
    return _error(
        file,
        "cannot be read as a DICOM file: replace or remove it, or pass over such files with "
        "--skip-broken",
    )


def _error(file: Content, what: str) -> DataError:
    return DataError(f"{file} {what}")
