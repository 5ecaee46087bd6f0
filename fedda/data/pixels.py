"""Image files to tensors: first the headers, then the pixels, on a few threads."""

import hashlib
import io
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from os import cpu_count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedda import plugins
from fedda.data import decompression_limits, samples
from fedda.data.cache import DIGEST, key_of
from fedda.data.form import Form, Resize, middle, scaled
from fedda.data.naming import listed
from fedda.data.sets import Labelled, Progress
from fedda.errors import DataError, reason

logger = logging.getLogger("fedda.data")

_GRAY = frozenset({"1", "L", "LA", "La"}) | (samples.DEEP - {"I"})
_COLOUR = frozenset({"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"})
_PAGED = frozenset({"PNG", "WEBP", "TIFF"})  # formats that may hold several images
_ORIENTATION = 0x0112
_UPRIGHT = {  # what turns an image of each EXIF orientation upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = frozenset({5, 6, 7, 8})  # orientations that swap width and height

_CHUNK = 256  # files handed to the threads at a time: a bad file ends the reading soon
_Result = TypeVar("_Result")
OR_SKIP = "or pass over such files with --skip-broken"


class Encoded(NamedTuple):
    """An image file that lies in another file: where it is, for messages, and its bytes."""

    name: str
    content: bytes

    def __str__(self) -> str:
        return self.name

    def read_bytes(self) -> bytes:
        return self.content


class Header(NamedTuple):
    """What of an image file's header is used."""

    width: int  # in pixels
    height: int  # in pixels
    channels: int  # 1 or 3
    bits: int  # of gray: 8 to 16, or 32 without a scale; 0 in DICOM
    # of DICOM: the values that are black and white where the run says nothing; None in colour
    scale: samples.Window | None = None
    own: bool = False  # whether the file says them itself


class ImageFile(Protocol):
    """An image file that Pillow does not read, of a reader of the entry points `fedda.images`."""

    def header(self) -> Header:
        """Its size and how it is to be seen, without its pixels."""
        ...

    def image(self, window: samples.Window | None) -> Image.Image:
        """The image, of 8 bits, gray or RGB; the window's ends become black and white."""
        ...


class Decoded(NamedTuple):
    """Pixels uint8 (channels, H, W), and how bright they were before they were resized."""

    pixels: np.ndarray
    light: samples.Light


class Survey(NamedTuple):
    """Sizes, channel counts and depths that occur in many files, each with one as example."""

    sizes: dict[tuple[int, int], Path | Encoded]
    channels: dict[int, Path | Encoded]
    bits: dict[int, Path | Encoded]
    scales: dict[tuple[samples.Window, bool], Path | Encoded]

    def gray(self, gray: samples.Gray) -> str:
        """How gray of more than 8 bits is read, in words."""
        own = any(said for _, said in self.scales)
        scales = [scale for scale, said in self.scales if said == own]
        return samples.in_words({*self.bits} - {0}, gray, scales, own)

    @property
    def needs_window(self) -> bool:
        """Whether some images can only be read with a window."""
        return samples.NO_SCALE in self.bits

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, H, W); H = W = 0 if sizes differ, 3 channels if any file has colour."""
        width, height = next(iter(self.sizes)) if len(self.sizes) == 1 else (0, 0)
        return max(self.channels), height, width

    @property
    def mixed(self) -> str:
        """Which two files differ in size and what to do; empty if all have one size."""
        if len(self.sizes) == 1:
            return ""
        (a, first), (b, second) = list(self.sizes.items())[:2]
        return (
            f"the images have {len(self.sizes)} different sizes, for example {first} is "
            f"{a[0]}x{a[1]} and {second} is {b[0]}x{b[1]}: set input.size, or take a preset "
            f"that does, such as photos, {RESIZED}"
        )


RESIZED = "and every image is resized to it"  # ends what is said of several sizes
Image_ = TypeVar("Image_", bound=Path | Encoded)


def survey(files: Sequence[Path | Encoded]) -> Survey:
    """Read every file's header, not its pixels."""
    seen = Survey({}, {}, {}, {})
    for file, head in zip(files, _each(_header, files), strict=True):
        seen.sizes.setdefault((head.width, head.height), file)
        seen.channels.setdefault(head.channels, file)
        seen.bits.setdefault(head.bits, file)
        if head.scale is not None:
            seen.scales.setdefault((head.scale, head.own), file)
    return seen


def read_images(files: Sequence[Path | Encoded], form: Form, progress: Progress | None) -> Tensor:
    """Decode `files` in order -> uint8 (N, channels, H, W), in memory or in the form's cache.

    With `channels` 0 the images are grayscale if all of them are, else colour. With `size` 0
    they must have one size; otherwise each is resized as the form says, antialiased.
    """
    channels, height, width = form.channels, form.size, form.size
    if channels == 0 or form.size == 0:
        headers = survey(files)
        channels = channels or headers.shape[0]
        if form.size == 0 and headers.mixed:
            raise DataError(headers.mixed)
        if form.size == 0:
            _, height, width = headers.shape
    shape = (len(files), channels, height, width)

    def images(notice: Callable[[str], object]) -> Iterator[np.ndarray]:
        how = {"size": form.size, "resize": form.resize, "gray": form.gray}
        decode = partial(_pixels, channels=channels, **how)
        seen = samples.Brightness()
        for i, (image, light) in enumerate(_each(decode, files)):
            seen.add(light)
            if image.shape != shape[1:]:  # decoded, it has another size than its header says
                raise DataError(f"{files[i]} is not of the size that its header states: remove it")
            yield image
            if progress:
                progress(i + 1, len(files))
        seen.report(notice)

    notice = form.notice or logger.warning
    if form.cache is not None and form.cache.takes(shape):
        said = form.gray.bits if form.gray.window is None else form.gray.window
        key = key_of(_each(digest, files), *shape[1:], form.size, form.resize, said)
        return form.cache.get(key, shape, images, notice)
    x = torch.empty(shape, dtype=torch.uint8)
    into = x.numpy()  # shares its memory with x
    for i, image in enumerate(images(notice)):
        into[i] = image
    return x


def labelled(
    files: Sequence[Path | Encoded],
    names: Sequence[str],
    classes: tuple[str, ...],
    form: Form,
    progress: Progress | None,
) -> Labelled:
    """Decode files, each of the class of a name, as `read_images` does."""
    index = {name: i for i, name in enumerate(classes)}
    y = torch.tensor([index[name] for name in names], dtype=torch.int64)
    return Labelled(read_images(files, form, progress), y, classes)


def broken(files: Sequence[Path | Encoded], gray: samples.Gray) -> list[str]:
    """Decode all files -> a sentence for each that cannot be read, in their order."""

    def fault(file: Path | Encoded) -> str:
        try:
            tried = gray.to_try(_header(file).bits == samples.NO_SCALE)
            _pixels(file, channels=1, size=8, resize="stretch", gray=tried)
        except DataError as error:
            return str(error)
        return ""

    return [text for text in _each(fault, files) if text]


def sound(files: Sequence[Image_], gray: samples.Gray, where: Path) -> list[Image_]:
    """The files that can be read, in their order; the log says once which others are left out.

    Raises:
        DataError: none can be read.
    """

    def fault(file: Path | Encoded) -> str:
        if isinstance(file, Encoded) or not file.is_file():
            return "".join(broken([file], gray))
        its = file.stat()
        return _fault(file, its.st_size, its.st_mtime_ns, gray)

    faults = list(_each(fault, files))
    good = [file for file, why in zip(files, faults, strict=True) if not why]
    if files and not good:
        raise DataError(f"none of the {len(files)} images in {where} can be read: {faults[0]}")
    if len(good) < len(files):
        bad = (file.name for file, why in zip(files, faults, strict=True) if why)
        _say_left_out(where, tuple(bad))
    return good


@lru_cache(maxsize=1 << 20)
def _fault(file: Path, size: int, changed: int, gray: samples.Gray) -> str:
    """What is wrong with a file, which is decoded once unless its size or time changes."""
    return "".join(broken([file], gray))


@lru_cache(maxsize=1 << 10)
def _say_left_out(where: Path, names: tuple[str, ...]) -> None:
    logger.warning("%s: left out, as they cannot be read: %s", where, listed(names))


def digest(file: Path | Encoded, more: str = "") -> bytes:
    """A digest of a file's content and of `more`."""
    try:
        return hashlib.blake2b(file.read_bytes() + more.encode(), digest_size=DIGEST).digest()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({reason(error)}): check it") from error


def _each(
    function: Callable[[Path | Encoded], _Result], files: Sequence[Path | Encoded]
) -> Iterator[_Result]:
    with ThreadPoolExecutor(min(4, cpu_count() or 1)) as pool:
        for start in range(0, len(files), _CHUNK):
            yield from list(pool.map(function, files[start : start + _CHUNK]))


@contextmanager
def _opened(file: Path | Encoded) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(file.content) if isinstance(file, Encoded) else file) as image:
            known = image.mode in _GRAY | _COLOUR or samples.is_wide(image)
            if not known and (image.mode, image.format) != ("I", "PNG"):
                raise DataError(
                    f"{file} has pixels of the kind {image.mode!r}, but 8 bits per channel, or 16 "
                    f"of gray, are needed: convert it to an 8-bit grayscale or RGB image"
                )
            if image.format in _PAGED and (frames := getattr(image, "n_frames", 1)) > 1:
                raise DataError(
                    f"{file} holds {frames} images, an animation or pages, but one is needed: save "
                    f"the one to use as a file of its own"
                )
            if odd := samples.fault(image):
                raise DataError(f"{file} {odd}")
            yield image
    except PermissionError as error:
        raise DataError(
            f"{file} cannot be read ({reason(error)}): let this account read it, {OR_SKIP}"
        ) from error
    # Whatever Pillow stumbles over in a damaged file; a KeyError or a TypeError in a TIFF's tags.
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, struct.error) as error:
        raise DataError(
            f"{file} cannot be read as an image ({reason(error)}): replace or remove it, {OR_SKIP}"
        ) from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{file} has too many pixels ({error}): replace it with a smaller version"
        ) from error


def _other(file: Path | Encoded) -> ImageFile | None:
    """The file as a reader of other images takes it, if one does."""
    for each in plugins.installed("images").values():
        if (found := each.value(file)) is not None:
            return found
    return None


def _header(file: Path | Encoded) -> Header:
    if (other := _other(file)) is not None:
        return other.header()
    with _opened(file) as image:
        width, height = image.size
        if _orientation(image) in _ON_ITS_SIDE:
            width, height = height, width
        return Header(width, height, samples.channels(image, _GRAY), samples.stored(image))


def _pixels(
    file: Path | Encoded, channels: int, size: int, resize: Resize, gray: samples.Gray
) -> Decoded:
    """Decode one file and turn it upright."""
    mode, light, turn = "L" if channels == 1 else "RGB", None, None
    if (other := _other(file)) is not None:
        image = other.image(gray.window).convert(mode)
    else:
        with _opened(file) as opened, decompression_limits.alone(opened.width * opened.height):
            turn = _UPRIGHT.get(_orientation(opened))
            image, light = _of_8_bits(opened, file, gray)
            image = (image if image.mode in _GRAY else image.convert("RGB")).convert(mode)
    light = light or _light(image)
    if turn is not None:
        image = image.transpose(turn)
    array = np.asarray(_resized(image, size, resize) if size else image)
    return Decoded(array[None] if channels == 1 else array.transpose(2, 0, 1), light)


def _of_8_bits(
    image: Image.Image, file: Path | Encoded, gray: samples.Gray
) -> tuple[Image.Image, samples.Light | None]:
    """An image on white, of 8 bits, and how bright it was if it had more."""
    deep = samples.deep(image)
    if deep is not None:
        image, light = samples.shallow(deep, file, gray)
        return on_white(image), light
    if samples.is_cut(image) and gray != samples.AS_STORED:
        raise DataError(
            f"{file} has 16 bits of each colour, or transparency beside 16 bits of gray, to which "
            f"--gray-bits and a window do not apply: convert it to 8 bits, or to gray alone"
        )
    if samples.is_veiled(image):
        raise DataError(f"{file} {samples.VEILED}: save red, green and blue alone")
    return on_white(image), None


def _light(image: Image.Image) -> samples.Light:
    """How bright an image of 8 bits is."""
    found: Any = image.getextrema()
    pairs = found if isinstance(found[0], tuple) else (found,)
    return samples.Light(min(low for low, _ in pairs), max(high for _, high in pairs), 255)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation of an image that Pillow does not turn by itself; 1 is upright.

    Pillow turns TIFF files. A PNG file's is used if it comes before the pixels, in the header.
    """
    has_own = image.format in ("JPEG", "MPO", "WEBP") or "exif" in image.info
    return image.getexif().get(_ORIENTATION, 1) if has_own and image.format != "TIFF" else 1


def on_white(image: Image.Image) -> Image.Image:
    """Lay a transparent image on white; the colours of pixels that nobody sees are arbitrary."""
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    elif image.mode in ("La", "RGBa"):
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    elif "transparency" in image.info and image.mode in ("1", "L", "RGB"):
        image.info["transparency"] = samples.clear_value(image)
        image = image.convert("RGBA" if image.mode == "RGB" else "LA")
    if image.mode not in ("LA", "RGBA"):
        return image
    alpha, opaque = image.getchannel("A"), image.convert("L" if image.mode == "LA" else "RGB")
    if alpha.getextrema() == (255, 255):
        return opaque
    white = Image.new(opaque.mode, opaque.size, "white")
    white.paste(opaque, mask=alpha)
    return white


def _resized(image: Image.Image, size: int, resize: Resize) -> Image.Image:
    """An image of `size` x `size` pixels."""
    wanted = scaled(*image.size, size) if resize == "crop" else (size, size)
    if image.size != wanted:
        image = image.resize(wanted, Image.Resampling.BILINEAR)
    if resize == "crop":
        left, top = (middle(length, size) for length in wanted)
        image = image.crop((left, top, left + size, top + size))
    return image
