"""Grayscale image files of more than 8 bits: which of their values is white.

A file with 16 bits a pixel may hold fewer: many scanners store 12 bits, 0 to 4095, as they are. On
the scale of 16 bits such an image is almost black. Neither format says reliably how many bits are
used: PNG's sBIT belongs to values that already fill all 16 bits (PNG specification, 11.3.2.6), and
TIFF's MaxSampleValue describes one image and must not change how it looks (TIFF 6.0). So the site
says it (`Reading.gray_bits`); else the number of bits that the file stores per pixel counts, which
is 12 in a TIFF that packs two pixels into three bytes. An image's own maximum is never used: it
would give each image another scale.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedda.errors import DataError

DEEP = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})  # Pillow's modes of 16 bits of gray
BITS = 16
_BITS_PER_SAMPLE = 258  # TIFF's tag
_DARK = 16  # a set whose values all stay below such a part of white is probably read wrongly


class Light(NamedTuple):
    """An image's largest value and the value that counts as white, both before it had 8 bits."""

    brightest: int
    white: int


def stored(image: Image.Image) -> int:
    """How many bits of gray a file stores per pixel: 9 to 16, or 8 for any other image."""
    if image.mode not in DEEP:
        return 8
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS_PER_SAMPLE, (BITS,))[0] if image.format == "TIFF" else BITS
    return bits if 8 < bits < BITS else BITS


def shallow(image: Image.Image, name: object, bits: int) -> tuple[Image.Image, Light | None]:
    """Bring gray of 0 to 2**bits - 1 to 0 to 255, rounded; other images stay as they are.

    Args:
        image: as Pillow opens it.
        name: of the file, for messages.
        bits: how many are significant; 0: as many as the file stores.

    Raises:
        DataError: the image has a larger value.
    """
    if image.mode not in DEEP:
        return image, None
    white = 2 ** (bits or stored(image)) - 1
    deep = np.asarray(image).astype(np.uint32).clip(0, 2**BITS - 1)
    brightest = int(deep.max())
    if brightest > white:
        raise DataError(
            f"{name} has the value {brightest}, but {bits} bits of gray end at {white}: give "
            f"--gray-bits {brightest.bit_length()} or more, the same for all scans of a kind"
        )
    gray = ((deep * 255 + white // 2) // white).astype(np.uint8)
    return Image.fromarray(gray), Light(brightest, white)


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


def in_words(found: set[int], bits: int) -> str:
    """How the images that store these numbers of bits are read; empty if all have 8."""
    deep = sorted(found - {8})
    if not deep:
        return ""
    read = [bits] if bits else deep
    scales = " and ".join(f"0 to {2**each - 1} ({each} bits)" for each in read)
    return f"{scales} become 0 to 255" + ("; 8 bits stay as they are" if 8 in found else "")
