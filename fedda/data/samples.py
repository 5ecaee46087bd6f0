"""Which files are images, the samples in them, and which values of more than 8 bits are white.

Pillow opens gray of 16 bits and more as it is, though it does not turn round TIFF's WhiteIsZero. Of
16-bit colours, and of such gray beside transparency, it keeps the high byte alone (`is_cut`). It
takes signed bytes for unsigned ones, mixes up the planes of some TIFF files, passes over a
predictor where there should be none, and compares a clear colour of 16 bits to 8: `fault` finds it.

A file with 16 bits a pixel may hold fewer: many scanners store 12 bits, 0 to 4095, as they are. On
the scale of 16 bits such an image is almost black. Neither format says reliably how many bits are
used: PNG's sBIT belongs to values that already fill all 16 bits (PNG specification, 11.3.2.6), and
TIFF's MaxSampleValue describes one image and must not change how it looks (TIFF 6.0). So the site
says it (`Reading.gray_bits`); else the number of bits that the file stores per pixel counts, which
is 12 in a TIFF that packs two pixels into three bytes. An image's own maximum is never used: it
would give each image another scale.

A run can say instead which values become black and white, at all sites (`input.window`). Values
outside become black or white. Signed gray and gray of 32 bits have no scale of their own, so they
need it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from fedda.errors import DataError

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


VEILED = (  # what is wrong with such an image, without what to do
    "is half transparent almost everywhere, as where a band such as near infrared is stored as "
    "transparency"
)


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


Window = tuple[float, float]  # values that become black and white

NEEDS_WINDOW = (
    "has gray values that are signed or of 32 bits, so that only you know which are black and "
    "white: say it with input.window=low,high, the same at all sites, such as "
    "input.window=-160,240"
)
_STRIP = 1 << 20  # values that are computed at a time
_SMALL = 16  # a set that uses such a part of its range or less is probably read wrongly
_SPREAD = (
    "save them so that they use 0 to 255, or say with input.window=low,high which values of gray "
    "are black and white, the same at all sites and for what the model predicts"
)


class Gray(NamedTuple):
    """How gray of more than 8 bits becomes 8: by a window, or by the number of bits that count."""

    bits: int = 0
    window: Window | None = None

    def to_try(self, needs_window: bool) -> "Gray":
        """The same for files that are but tried: with some window, as only a run says which."""
        return self._replace(window=(0, 1)) if needs_window and self.window is None else self


AS_STORED = Gray()


class Light(NamedTuple):
    """An image's smallest and largest value and the one that counts as white, before resizing."""

    darkest: int
    brightest: int
    white: int


def shallow(deep: Deep, name: object, gray: Gray) -> tuple[Image.Image, Light | None]:
    """Bring gray of more than 8 bits to 0 to 255, rounded -> gray, perhaps with alpha.

    Args:
        deep: the samples.
        name: of the file, for messages.
        gray: the values that become black and white, or how many bits are significant; 0: as many
            as the file stores, which become 0 to 2**bits - 1.

    Raises:
        DataError: a sample is larger than these bits can hold, or the samples have no scale of
            their own and no window is given.
    """
    light = None
    if gray.window is not None:
        scaled = to_bytes(deep.values, gray.window, name)
    elif deep.bits == NO_SCALE:
        raise DataError(f"{name} {NEEDS_WINDOW}")
    else:
        scaled, light = _by_bits(deep, name, gray)
    image = Image.fromarray(255 - scaled if deep.inverted else scaled)
    if deep.alpha is not None:
        image.putalpha(Image.fromarray(deep.alpha))
    return image, light


def _by_bits(deep: Deep, name: object, gray: Gray) -> tuple[np.ndarray, Light]:
    white = 2 ** (gray.bits or deep.bits) - 1
    low, high = (min(max(int(v), 0), 2**BITS - 1) for v in (deep.values.min(), deep.values.max()))
    if high > white:
        raise DataError(
            f"{name} has the value {high}, but {gray.bits} bits of gray end at {white}: give "
            f"--gray-bits {high.bit_length()} or more, the same for all scans of a kind"
        )
    scaled = np.empty(deep.values.shape, np.uint8)
    for rows, into in _strips(deep.values, scaled):
        whole = rows.astype(np.uint32).clip(0, 2**BITS - 1)
        into[:] = (whole * 255 + white // 2) // white
    if deep.inverted:
        low, high = white - high, white - low
    return scaled, Light(low, high, white)


def to_bytes(
    values: np.ndarray,
    window: Window,
    name: object = "an image",
    slope: float = 1,
    intercept: float = 0,
) -> np.ndarray:
    """Bring gray v' = slope v + intercept to 0 to 255 -> uint8, same shape.

    It becomes 255 (v' - low) / (high - low), rounded half up and kept within 0 to 255.

    Args:
        values: v (H, W).
        window: low and high.
        name: of the file, for messages.
        slope: of DICOM files.
        intercept: of DICOM files.

    Raises:
        DataError: a value is not finite.
    """
    low, high = window
    found = np.empty(values.shape, np.uint8)
    for rows, into in _strips(values, found):
        if not np.isfinite(rows).all():
            raise DataError(f"{name} has values that are not finite: replace or remove it")
        share = (rows.astype(np.float64) * slope + intercept - low) / (high - low)
        into[:] = np.floor(255 * share.clip(0, 1) + 0.5)
    return found


def _strips(values: np.ndarray, into: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same rows of two arrays (H, ...), some at a time, so that copies of them stay small."""
    many = max(1, _STRIP // max(1, values[:1].size))
    for i in range(0, len(values), many):
        yield values[i : i + many], into[i : i + many]


class Brightness:
    """How much of their range a set's images use, of whatever kind they are."""

    def __init__(self) -> None:
        self._count = 0
        self._seen: dict[int, tuple[int, int]] = {}  # darkest and brightest, by what is white

    def add(self, light: Light, count: int = 1) -> None:
        """Count an image, or several that have these extremes together."""
        self._count += count
        low, high = self._seen.get(light.white, light[:2])
        self._seen[light.white] = min(low, light.darkest), max(high, light.brightest)

    def report(self, notice: Callable[[str], object]) -> None:
        """Give a sentence to `notice` if all images together use a small part of their range."""
        if not self._count:
            return
        low = min(low / (white + 1) for white, (low, _) in self._seen.items())
        high = max(high / (white + 1) for white, (_, high) in self._seen.items())
        if (high - low) * _SMALL > 1:
            return
        white = max(self._seen)
        darkest, brightest = self._seen[white]
        if low * _SMALL > 1:
            notice(
                f"all values of the {self._count} images are from {darkest} to {brightest}, a "
                f"small part of 0 to {white}, so they hardly differ: {_SPREAD}"
            )
        elif white == 255:
            notice(
                f"no value of the {self._count} images is above {brightest}, while white is 255, "
                f"so they are read as almost black: {_SPREAD}"
            )
        else:
            notice(
                f"no value of the {self._count} images with 16 bits of gray is above {brightest}, "
                f"while white is {white}, so they are read as almost black: if the "
                f"scanner gives fewer bits, such as 12, say so with --gray-bits 12, the same at "
                f"all sites with such scans"
            )


def in_words(
    found: Collection[int], gray: Gray, scales: Collection[Window] = (), own: bool = False
) -> str:
    """How the images are read that store these numbers of bits; empty if all have 8.

    Args:
        found: bits of gray, as `stored` gives them.
        gray: how they become 8.
        scales: of DICOM files: the values that are black and white where the run says nothing.
        own: whether DICOM files say these themselves.
    """
    deep = sorted({*found} - {8, NO_SCALE, CUT})
    if not deep and not scales and not {*found} & {NO_SCALE, CUT}:
        return ""
    if gray.window is not None:
        words = [f"{span(gray.window)} (the window) become 0 to 255"]
    else:
        read = ([gray.bits] if gray.bits else deep) if deep else []
        scale = " and ".join(f"0 to {2**each - 1} ({each} bits)" for each in read)
        words = [f"{scale} become 0 to 255"] if read else []
        words += [_of_dicom(scales, own)] if scales else []
        words += ["signed values and values of 32 bits need input.window"] * (NO_SCALE in found)
    cut = "of colours of 16 bits, and of gray beside transparency, the high byte is read"
    words += [cut] * (CUT in found)
    return "; ".join([*words, *(["8 bits stay as they are"] if 8 in found else [])])


def _of_dicom(scales: Collection[Window], own: bool) -> str:
    said = "each file's own window" if own else "all values that its bits can hold"
    several = f"{len(scales)} different ones, such as " if len(scales) > 1 else ""
    advice = "; input.window makes them one" if len(scales) > 1 else ""
    return f"of DICOM {said} ({several}{span(min(scales))}) becomes 0 to 255{advice}"


def span(window: Window) -> str:
    """A window in words."""
    return f"{window[0]:g} to {window[1]:g}"
