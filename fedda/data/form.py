"""The form in which a run wants a site's images: channels, size, and how they are resized."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fedda.data.cache import Cache

Resize = Literal["stretch", "crop"]

# torchvision evaluates on ImageNet at 224 pixels from the middle of images of 256.
_CROPPED_FROM = 256 / 224


@dataclass(frozen=True)
class Form:
    """What becomes of a site's images when they are read.

    Attributes:
        channels: 1, 3, or 0 for what the images have.
        size: pixels per side, or 0 for what the images have.
        resize: how images come to that size. `stretch` scales width and height to it. `crop` is
            torchvision's evaluation on ImageNet: the shorter side becomes size * 256 / 224 pixels,
            then the square in the middle is kept. Without a size nothing is resized.
        cache: where decoded images are kept on disk; None keeps them in memory.
    """

    channels: int = 0
    size: int = 0
    resize: Resize = "stretch"
    cache: "Cache | None" = None


def scaled(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height of an image before `crop` keeps its middle, as torchvision rounds them."""
    short = int(size * _CROPPED_FROM)
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def middle(length: int, size: int) -> int:
    """Where the middle `size` pixels of a side begin, as torchvision rounds it."""
    return round((length - size) / 2)
