"""Grayscale image files of more than 8 bits: which of their values is white.

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

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedda.errors import DataError

Window = tuple[float, float]  # values that become black and white

DEEP = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})  # Pillow's modes of 16 bits of gray
WIDE = frozenset({"I", "F"})  # of TIFF files: signed, or of 32 bits, whole or not
BITS = 16
NO_SCALE = 32  # bits of gray that has no scale of its own
NEEDS_WINDOW = (
    "has gray values that are signed or of 32 bits, so that only you know which are black and "
    "white: say it with input.window=low,high, the same at all sites, such as "
    "input.window=-160,240"
)
_BITS_PER_SAMPLE = 258  # TIFF's tag
_STRIP = 1 << 20  # values that are computed at a time
_DARK = 16  # a set whose values all stay below such a part of white is probably read wrongly


class Gray(NamedTuple):
    """How gray of more than 8 bits becomes 8: by a window, or by the number of bits that count."""

    bits: int = 0
    window: Window | None = None


AS_STORED = Gray()


class Light(NamedTuple):
    """An image's largest value and the value that counts as white, both before it had 8 bits."""

    brightest: int
    white: int


def is_wide(image: Image.Image) -> bool:
    """Whether an image is gray without a scale of its own."""
    return image.mode == "F" or (image.mode == "I" and image.format == "TIFF")


def stored(image: Image.Image) -> int:
    """How many bits of gray a file stores per pixel: 9 to 16, 32 without a scale, or 8 for others.

    32 stands for all gray that `is_wide`.
    """
    if is_wide(image):
        return NO_SCALE
    if image.mode not in DEEP:
        return 8
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS_PER_SAMPLE, (BITS,))[0] if image.format == "TIFF" else BITS
    return bits if 8 < bits < BITS else BITS


def shallow(image: Image.Image, name: object, gray: Gray) -> tuple[Image.Image, Light | None]:
    """Bring gray of more than 8 bits to 0 to 255, rounded; other images stay as they are.

    Args:
        image: as Pillow opens it.
        name: of the file, for messages.
        gray: the values that become black and white, or how many bits are significant; 0: as many
            as the file stores, which become 0 to 2**bits - 1.

    Raises:
        DataError: the image has a larger value than these bits can hold, or has no scale of its
            own and no window is given.
    """
    if is_wide(image) and gray.window is None:
        raise DataError(f"{name} {NEEDS_WINDOW}")
    if image.mode not in DEEP | WIDE:
        return image, None
    if gray.window is not None:
        return Image.fromarray(to_bytes(np.asarray(image), gray.window, name)), None
    white = 2 ** (gray.bits or stored(image)) - 1
    deep = np.asarray(image)
    brightest = min(max(int(deep.max()), 0), 2**BITS - 1)
    if brightest > white:
        raise DataError(
            f"{name} has the value {brightest}, but {gray.bits} bits of gray end at {white}: give "
            f"--gray-bits {brightest.bit_length()} or more, the same for all scans of a kind"
        )
    scaled = np.empty(deep.shape, np.uint8)
    for rows, into in _strips(deep, scaled):
        whole = rows.astype(np.uint32).clip(0, 2**BITS - 1)
        into[:] = (whole * 255 + white // 2) // white
    return Image.fromarray(scaled), Light(brightest, white)


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
    """How bright a set's images with 16 bits of gray are."""

    def __init__(self) -> None:
        self._count, self._lightest = 0, Light(-1, 1)

    def add(self, light: Light | None) -> None:
        """Count an image; None for one of 8 bits."""
        if light is not None:
            self._count += 1
            self._lightest = max(self._lightest, light, key=lambda one: one.brightest / one.white)

    def report(self, notice: Callable[[str], object]) -> None:
        """Give a sentence to `notice` if every image is far darker than it could be."""
        brightest, white = self._lightest
        if self._count and brightest * _DARK <= white:
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
    deep = sorted({*found} - {8, NO_SCALE})
    if not deep and not scales and NO_SCALE not in found:
        return ""
    if gray.window is not None:
        words = [f"{span(gray.window)} (the window) become 0 to 255"]
    else:
        read = ([gray.bits] if gray.bits else deep) if deep else []
        scale = " and ".join(f"0 to {2**each - 1} ({each} bits)" for each in read)
        words = [f"{scale} become 0 to 255"] if read else []
        words += [_of_dicom(scales, own)] if scales else []
        words += ["signed values and values of 32 bits need input.window"] * (NO_SCALE in found)
    return "; ".join([*words, *(["8 bits stay as they are"] if 8 in found else [])])


def _of_dicom(scales: Collection[Window], own: bool) -> str:
    said = "each file's own window" if own else "all values that its bits can hold"
    several = f"{len(scales)} different ones, such as " if len(scales) > 1 else ""
    advice = "; input.window makes them one" if len(scales) > 1 else ""
    return f"of DICOM {said} ({several}{span(min(scales))}) becomes 0 to 255{advice}"


def span(window: Window) -> str:
    """A window in words."""
    return f"{window[0]:g} to {window[1]:g}"
