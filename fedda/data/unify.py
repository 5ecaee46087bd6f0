"""Bringing images of several sites to one shape: grayscale and colour, any size to a square."""

from dataclasses import replace
from typing import TypeVar

from torch import Tensor
from torch.nn import functional as F

from fedda.data.form import Resize, middle, scaled
from fedda.data.sets import Examples
from fedda.errors import DataError

AnySet = TypeVar("AnySet", bound=Examples)

CHUNK = 512  # images converted at a time, so that working memory does not grow with the set


def conform(dataset: AnySet, channels: int, size: int, resize: Resize = "stretch") -> AnySet:
    """The same examples as images of `channels` channels and `size` x `size` pixels.

    Colour becomes grayscale by ITU-R 601 luma, grayscale becomes colour by repetition; sizes
    change by antialiased bilinear interpolation. Returns `dataset` itself when there is nothing to
    change.

    Args:
        dataset: images, or vectors if both numbers are 0.
        channels: 1, 3, or 0 to leave the channels as they are.
        size: pixels per side, or 0 to leave the size as it is.
        resize: `stretch` or `crop` (`fedda.data.form.Form`).
    """
    if channels == 0 and size == 0:
        return dataset
    if dataset.kind == "vector":
        raise DataError(
            f"this site's examples are vectors of {dataset.shape[0]} numbers and cannot become "
            f"images: leave input.channels and input.size at 0, or bring images"
        )
    x = conform_images(dataset.x, channels, size, resize)
    return dataset if x is dataset.x else replace(dataset, x=x)


def conform_images(x: Tensor, channels: int, size: int, resize: Resize = "stretch") -> Tensor:
    """`conform` on uint8 (N, c, h, w) -> uint8 (N, channels, size, size)."""
    n, c, h, w = x.shape
    channels = channels or c
    height, width = (size, size) if size else (h, w)
    crop = bool(size) and resize == "crop"
    if (c, h, w) == (channels, height, width) and not crop:
        return x
    if channels != c and {channels, c} != {1, 3}:
        raise DataError(
            f"images of {c} channels cannot get {channels}: only 1 (grayscale) and 3 (colour) "
            f"can be converted into each other; set input.channels to 1 or 3"
        )
    out = x.new_empty(n, channels, height, width)
    for part, into in zip(x.split(CHUNK), out.split(CHUNK), strict=True):
        if channels < c:
            part = luma(part)
        part = _resized(part, height, width, crop)
        into.copy_(part)  # one channel is repeated into three by broadcasting
    return out


def _resized(x: Tensor, height: int, width: int, crop: bool) -> Tensor:
    """Images (N, c, h, w) of another size -> (N, c, height, width)."""
    wide, high = scaled(x.shape[3], x.shape[2], width) if crop else (width, height)
    if x.shape[2:] != (high, wide):
        x = F.interpolate(x, size=(high, wide), mode="bilinear", antialias=True)
    top, left = middle(high, height), middle(wide, width)
    return x[:, :, top : top + height, left : left + width]


def luma(x: Tensor) -> Tensor:
    """ITU-R 601: 0.299 R + 0.587 G + 0.114 B, rounded as Pillow does -> uint8 (N, 1, H, W)."""
    r, g, b = x.int().split(1, dim=1)  # (N, 1, H, W) each
    return ((19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16).to(x.dtype)
