"""Images of every kind, written byte by byte, with the pixels that are right."""

import io
import sys
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[2]))  # the writers are the tests'
from tests.field import written as w

SHAPE = (6, 10)
T = TypeVar("T")


class Written(NamedTuple):
    """An image file.

    Attributes:
        content: its bytes.
        right: its pixels, 0 to 255, (H, W) or (H, W, 3); None if it has to be refused.
    """

    content: bytes
    right: np.ndarray | None


def pick(rng: np.random.Generator, *of: T) -> T:
    """One of several."""
    return of[int(rng.integers(len(of)))]


def _samples(rng: np.random.Generator, bits: int, channels: int = 0) -> np.ndarray:
    shape = (*SHAPE, *([channels] * bool(channels)))
    return rng.integers(0, 2**bits, shape).astype(np.uint8 if bits <= 8 else np.uint16)


def _seen(samples: np.ndarray, bits: int) -> np.ndarray:
    return samples.astype(float) * 255 / (2**bits - 1)


def _on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return colour * alpha / 255 + 255 - alpha


def png(rng: np.random.Generator) -> Written:
    """Gray, colour, palette, transparency, 1 to 16 bits."""
    kind = pick(rng, w.GRAY, w.RGB, w.PALETTE, w.GRAY_ALPHA, w.RGB_ALPHA)
    if kind == w.PALETTE:
        bits = pick(rng, 1, 2, 4, 8)
        v, colours = _samples(rng, bits), rng.integers(0, 256, (2**bits, 3))
        alpha = rng.integers(0, 256, 2**bits)
        if pick(rng, True, False):
            return Written(w.png(v, bits, kind, colours.tolist()), colours[v].astype(float))
        made = w.png(v, bits, kind, colours.tolist(), bytes(alpha.tolist()))
        return Written(made, _on_white(colours[v], alpha[v][..., None]))
    bits = pick(rng, 1, 2, 4, 8, 16) if kind == w.GRAY else pick(rng, 8, 16)
    v = _samples(rng, bits, {w.GRAY: 0, w.RGB: 3, w.GRAY_ALPHA: 2, w.RGB_ALPHA: 4}[kind])
    full = _seen(v, bits)
    if kind in (w.GRAY_ALPHA, w.RGB_ALPHA):
        full = _on_white(full[..., :-1], full[..., -1:])
        full = full[..., 0] if kind == w.GRAY_ALPHA else full
    return Written(w.png(v, bits, kind), full)


def tiff(rng: np.random.Generator) -> Written:
    """Gray of both photometrics, colour, palette, CMYK; byte orders, compressions, orientations."""
    order, packing = pick(rng, "<", ">"), pick(rng, w.NONE, w.LZW, w.DEFLATE, w.PACKBITS)
    kind = pick(rng, "gray", "gray", "rgb", "palette", "cmyk", "wide")
    if kind == "gray":
        bits, photometric = pick(rng, 1, 2, 4, 8, 12, 16), pick(rng, 0, 1)
        predictor = pick(rng, 1, 2) if bits in (8, 16) else 1
        v = _samples(rng, bits)
        right = _seen(v, bits) if photometric else 255 - _seen(v, bits)
        made = w.tiff(v, bits, photometric, order, packing, predictor=predictor)
        fits = predictor == 1 or packing in (w.LZW, w.DEFLATE)
        return Written(made, right if fits else None)
    if kind == "rgb":
        bits, planar = pick(rng, 8, 16), pick(rng, 1, 1, 2)
        packing = w.NONE if packing == w.PACKBITS else packing
        v = _samples(rng, bits, 3)
        return Written(w.tiff(v, bits, 2, order, packing, planar=planar), _seen(v, bits))
    if kind == "palette":
        bits = pick(rng, 1, 2, 4, 8)
        v, palette = _samples(rng, bits), rng.integers(0, 65536, (3, 2**bits)).astype(np.uint16)
        return Written(w.tiff(v, bits, 3, order, palette=palette), palette.T[v] / 257)
    if kind == "cmyk":
        v = _samples(rng, 8, 4)
        c = 255 - v.astype(float)
        return Written(w.tiff(v, 8, 5, order), c[..., :3] * c[..., 3:] / 255)
    v = rng.integers(-1000, 1000, SHAPE).astype(pick(rng, "i2", "i4", "f4"))
    sample = {"i": 2, "f": 3}[v.dtype.kind]
    return Written(w.tiff(v, v.dtype.itemsize * 8, 1, order, kind=sample), None)  # has no scale


def turned(rng: np.random.Generator) -> Written:
    """A TIFF of each orientation."""
    number, v = int(rng.integers(1, 5)), _samples(rng, 8)  # those that keep width and height
    up = {1: v, 2: v[:, ::-1], 3: v[::-1, ::-1], 4: v[::-1]}[number]
    return Written(w.tiff(v, 8, 1, orientation=number), up.astype(float))


def bmp(rng: np.random.Generator) -> Written:
    """Gray or colour, as Pillow writes it."""
    v, stream = _samples(rng, 8, pick(rng, 0, 3)), io.BytesIO()
    Image.fromarray(v).save(stream, "BMP")
    return Written(stream.getvalue(), v.astype(float))


def broken(rng: np.random.Generator) -> Written:
    """A file that ends early, holds nothing, or something else."""
    whole = png(rng).content
    return Written(pick(rng, whole[: len(whole) // 2], b"", b"<html>not here</html>"), None)


KINDS = {"png": png, "tif": tiff, "tiff": turned, "bmp": bmp}


def drawn(rng: np.random.Generator, count: int) -> tuple[str, list[Written]]:
    """Images of one kind -> their ending, and they; in one of 20 sets one is broken."""
    ending = pick(rng, "png", "png", "tif", "tif", "tiff", "bmp")
    found = [KINDS[ending](rng) for _ in range(count)]
    if rng.random() < 0.05:
        found[int(rng.integers(count))] = broken(rng)
    return ending, found
