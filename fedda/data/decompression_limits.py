"""How much memory a file of other people may ask for; more is refused before it is decoded."""

import zlib
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from PIL import Image

from fedda.errors import DataError
from fedda.ops import system

SMALL = 1 << 24  # bytes that any file may grow to
GROWTH = 500  # bytes from one compressed byte; only an array of nothing but zeros has more
_LARGE = Lock()
_PIECE = 1 << 20  # bytes inflated at a time


def most_pixels() -> float:
    """How many pixels one image may have: twice `PIL.Image.MAX_IMAGE_PIXELS`, as Pillow has it."""
    return 2 * Image.MAX_IMAGE_PIXELS if Image.MAX_IMAGE_PIXELS else float("inf")


def check_pixels(name: object, width: int, height: int, frames: int = 1) -> None:
    """Refuse a file whose header tells of more pixels than Pillow decodes of any image.

    Args:
        name: of the file, for messages.
        width: in pixels.
        height: in pixels.
        frames: how many images of this size it holds.

    Raises:
        DataError: it does.
    """
    if width * height * frames > most_pixels():
        raise DataError(
            f"{name} has too many pixels ({width} x {height}, {most_pixels():.0f} at most): "
            f"replace it with a smaller version"
        )


def alone(pixels: int) -> AbstractContextManager[Any]:
    """Let one thread at a time decode a large image, as its copies take gigabytes."""
    return _LARGE if pixels > SMALL else nullcontext()


def grows(size: int, stored: int) -> bool:
    """Whether `stored` bytes become more bytes than real data do."""
    return size > max(SMALL, GROWTH * stored)


def inflated(content: bytes, wbits: int, most: float) -> int:
    """How many bytes a zlib stream becomes, counted in little memory; it stops above `most`.

    Args:
        content: the stream.
        wbits: of zlib: 15, or -15 for a stream without a header.
        most: bytes after which counting ends.

    Raises:
        zlib.error: it is no such stream.
    """
    stream, count, rest = zlib.decompressobj(wbits), 0, content
    while rest and count <= most and not stream.eof:
        count += len(stream.decompress(rest, _PIECE))
        rest = stream.unconsumed_tail
    return count


def check_memory(what: str, size: int) -> None:
    """Refuse to keep `size` bytes in memory, if that is more than there is.

    Raises:
        DataError: it is.
    """
    has = system.memory()
    if size > has:
        raise DataError(
            f"{what} needs {size / 2**30:.0f} GiB and this machine has {has / 2**30:.0f}: keep "
            f"fewer examples or columns, or keep them on disk (--cache disk)"
        )
