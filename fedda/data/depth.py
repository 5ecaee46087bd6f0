"""Image files of more than 8 bits: which of their values is white.

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

from fedda.data.samples import BITS, CUT, NO_SCALE, Deep
from fedda.errors import DataError

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
