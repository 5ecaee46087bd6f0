"""Augmentation: random changes of a batch of images that leave their classes alone.

x       (N, C, H, W)  floats in [0, 1], on any device
draws   a CPU generator, from which every random number comes, so that a run can be repeated

Each image of a batch gets changes of its own. Other packages add augmentations by the entry point
`fedda.augment` (`fedda.plugins`): functions (x, draws) -> x of the same shape. `per_image` makes
one of a transform of torchvision.transforms.v2:

    noisy = per_image(v2.Compose([v2.RandomInvert(), v2.GaussianNoise()]))
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import plugins
from fedda.config import AUGMENTATIONS
from fedda.errors import ConfigError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]

_JITTER = 0.3  # brightness, contrast and saturation change by up to this share
_TRIES = 10  # parts of an image that are drawn until one fits
_LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue


def augmentation(names: str) -> Augmentation:
    """The augmentation that `train.augment` names, several applied in order.

    Raises:
        ConfigError: there is no augmentation of a name.
    """
    steps = [_find(name.strip()) for name in names.split(",")]

    def augment(x: Tensor, draws: torch.Generator) -> Tensor:
        for step in steps:
            x = step(x, draws)
        return x

    return augment


def _find(name: str) -> Augmentation:
    if name in _OWN:
        return _OWN[name]
    added = plugins.installed("augment")
    if name not in added:
        plugins.check_barred("augment", name)
        known = ", ".join([*AUGMENTATIONS, *added])
        why = plugins.why_not("augment", name)
        raise ConfigError(f"There is no augmentation '{name}'; choose from {known}.{why}")

    def checked(x: Tensor, draws: torch.Generator) -> Tensor:
        found = added[name].value(x, draws)
        if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
            raise ConfigError(
                f"The augmentation {name} of {added[name].origin} changed images of shape "
                f"{tuple(x.shape)} into {_shape(found)}; it must keep shape and type."
            )
        return found

    return checked


def per_image(transform: Callable[[Any], Any]) -> Augmentation:
    """An augmentation that applies a transform of torchvision to each image by itself.

    Such transforms draw from torch's global generator. It is seeded from `draws` here, and left as
    it was afterwards.
    """

    def augment(x: Tensor, draws: torch.Generator) -> Tensor:
        seed = int(torch.randint(2**62, (), generator=draws))
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also seed the GPUs, and the fork does not restore those.
            torch.default_generator.manual_seed(seed)
            return torch.stack([transform(image) for image in x])

    return augment


# ---- fedda's own ---------------------------------------------------------------------------------


def flip_crop(x: Tensor, draws: torch.Generator) -> Tensor:
    """Shift by up to an eighth of the side, black outside, and mirror half of the images.

    He et al., CVPR 2016, https://arxiv.org/abs/1512.03385, section 4.2: 4 of 32 pixels.
    """
    n, pad = len(x), max(1, x.shape[2] // 8)
    top, left = torch.randint(2 * pad + 1, (2, n), generator=draws)
    return shifted(x, pad, top, left, _coin(n, draws))


def digits(x: Tensor, draws: torch.Generator) -> Tensor:
    """Turn by up to 15 degrees, shift by up to a tenth of the side and scale by .9 to 1.1.

    Digits are not mirrored. What comes in from outside is black.
    """
    n = len(x)
    return turned(
        x,
        angle=_uniform(-15, 15, n, draws),
        right=_uniform(-0.1, 0.1, n, draws) * x.shape[3],
        down=_uniform(-0.1, 0.1, n, draws) * x.shape[2],
        scale=_uniform(0.9, 1.1, n, draws),
    )


def photo(x: Tensor, draws: torch.Generator) -> Tensor:
    """Cut out a part, scale it to the whole, mirror half of the images, change their colours.

    The part is drawn as torchvision's RandomResizedCrop draws it: 8 to 100 % of the area, 3:4 to
    4:3. Then brightness, contrast and saturation, in this order, change by up to 30 %.
    """
    n = len(x)
    x = part(x, *parts(n, x.shape[2], x.shape[3], draws), _coin(n, draws))
    factors = 1 + _JITTER * (2 * torch.rand(3, n, generator=draws) - 1)
    return recoloured(x, *factors)


_OWN: dict[str, Augmentation] = {"flip-crop": flip_crop, "digits": digits, "photo": photo}


# ---- what they do, given the random numbers ------------------------------------------------------


def shifted(x: Tensor, pad: int, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
    """Cut (H, W) out of images with a black border, then mirror some -> (N, C, H, W).

    Args:
        x: (N, C, H, W).
        pad: width of the border.
        top: (N,) first row.
        left: (N,) first column.
        flip: (N,) bool, which ones to mirror.
    """
    n, c, h, w = x.shape
    rows = top[:, None] + torch.arange(h)  # (N, H)
    columns = left[:, None] + torch.arange(w)  # (N, W)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    image, channel = torch.arange(n)[:, None, None, None], torch.arange(c)[:, None, None]
    where = (image, channel, rows[:, None, :, None], columns[:, None, None, :])
    return F.pad(x, (pad, pad, pad, pad))[tuple(index.to(x.device) for index in where)]


def turned(x: Tensor, angle: Tensor, right: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """Turn, scale and shift about the centre, interpolated; black comes in -> (N, C, H, W).

    Args:
        x: (N, C, H, W).
        angle: (N,) degrees clockwise.
        right: (N,) pixels.
        down: (N,) pixels.
        scale: (N,) above 1 enlarges.
    """
    h, w = x.shape[2:]
    cos, sin = torch.cos(angle.deg2rad()) / scale, torch.sin(angle.deg2rad()) / scale
    # Of each pixel of the result, where it was, in units of half the width and height.
    u = torch.stack([cos, sin * h / w, -2 * (cos * right + sin * down) / w], dim=1)
    v = torch.stack([-sin * w / h, cos, -2 * (cos * down - sin * right) / h], dim=1)
    theta = torch.stack([u, v], dim=1).to(x)  # (N, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def parts(n: int, h: int, w: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a part of each of N images -> top, left, height, width (N,) each."""
    area = h * w * (0.08 + 0.92 * torch.rand(n, _TRIES, generator=draws))
    low, high = math.log(3 / 4), math.log(4 / 3)
    ratio = torch.exp(low + (high - low) * torch.rand(n, _TRIES, generator=draws))
    widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (widths >= 1) & (widths <= w) & (heights >= 1) & (heights <= h)
    first = fits.int().argmax(dim=1, keepdim=True)  # 0 if none fits: then the whole image
    some = fits.any(dim=1)
    height = torch.where(some, heights.gather(1, first)[:, 0], h)
    width = torch.where(some, widths.gather(1, first)[:, 0], w)
    top = (torch.rand(n, generator=draws) * (h - height + 1)).floor()
    left = (torch.rand(n, generator=draws) * (w - width + 1)).floor()
    return top, left, height, width


def part(
    x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor
) -> Tensor:
    """Scale a part of each image to the whole, interpolated, and mirror some -> (N, C, H, W)."""
    h, w = x.shape[2:]
    # Positions in pixels, kept within the part as if nothing were around it.
    down = (torch.arange(h) + 0.5) * height[:, None] / h - 0.5  # (N, H)
    right = (torch.arange(w) + 0.5) * width[:, None] / w - 0.5  # (N, W)
    down = top[:, None] + torch.minimum(down.clamp(min=0), height[:, None] - 1)
    right = left[:, None] + torch.minimum(right.clamp(min=0), width[:, None] - 1)
    right = torch.where(flip[:, None], right.flip(1), right)
    u, v = (2 * right + 1) / w - 1, (2 * down + 1) / h - 1
    grid = torch.stack(torch.broadcast_tensors(u[:, None, :], v[:, :, None]), dim=3)
    return F.grid_sample(x, grid.to(x), padding_mode="border", align_corners=False)


def recoloured(x: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Change brightness, contrast and saturation by factors (N,) each -> (N, C, H, W)."""
    b, c, s = (f.to(x)[:, None, None, None] for f in (brightness, contrast, saturation))
    x = (b * x).clamp(0, 1)
    x = (c * x + (1 - c) * _gray(x).mean(dim=(1, 2, 3), keepdim=True)).clamp(0, 1)
    return (s * x + (1 - s) * _gray(x)).clamp(0, 1) if x.shape[1] == 3 else x


def _gray(x: Tensor) -> Tensor:
    """-> (N, 1, H, W)."""
    if x.shape[1] != 3:
        return x
    return (x * x.new_tensor(_LUMA)[:, None, None]).sum(dim=1, keepdim=True)


def _coin(n: int, draws: torch.Generator) -> Tensor:
    return torch.rand(n, generator=draws) < 0.5


def _uniform(low: float, high: float, n: int, draws: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=draws)


def _shape(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"{tuple(found.shape)} of {found.dtype}"
    return f"a {type(found).__name__}"
