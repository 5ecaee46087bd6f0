"""One domain made into many, each turned by its own angle: the Rotated MNIST setting of FRUDA.

Images turn clockwise about their centre. Corners that turn into view are filled with the image's
own background, the median of its border. In FRUDA every domain holds all images; here each image is
in one domain only, as it would be at different sites, unless `everywhere` is set. Training images
stay training images, test images stay test images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.data.form import AS_IT_IS, CHUNK, Reading
from fedda.data.load import describe, load_evaluation, load_source, load_target
from fedda.data.naming import listed
from fedda.data.sets import Labelled, Role, Unlabelled
from fedda.errors import ConfigError, DataError
from fedda.files import filling

_Half = Labelled | Unlabelled
_SPLITS = ("train", "test")


@dataclass(frozen=True)
class Rotated:
    """A domain that was written, and how many examples it has."""

    path: Path
    train: int
    test: int


def build(
    source: Path,
    out: Path,
    angles: Sequence[int],
    *,
    role: Role = "source",
    size: int = 0,
    everywhere: bool = False,
    seed: int = 0,
    reading: Reading = AS_IT_IS,
) -> list[Rotated]:
    """Write OUT/<angle>/data.npz for every angle; folder names use angles from 0 to 359.

    Args:
        source: an image folder, an .npz file, or a folder that holds exactly one .npz file.
        out: a new or empty folder.
        angles: whole degrees clockwise, one domain each.
        role: a source's labels are written too; a target's training labels are not even read.
        size: pixels per side to which images are resized first; 0 leaves them as they are.
        everywhere: every domain holds all images, as in FRUDA; else each image is in one domain.
        seed: decides which domain gets which images, and in which order.
        reading: which split of the files becomes training images, and how gray ones are read.

    Raises:
        ConfigError: no angle is given, or one is given twice.
        DataError: the images are missing, not square or too few, or OUT is not empty.
    """
    angles = _checked(angles)
    halves = _read(source, role, size, reading)
    shares = []
    for s, half in enumerate(halves):
        rng = np.random.default_rng([seed, s])
        if everywhere:  # shuffled, as the order must reveal no class
            shares.append([rng.permutation(len(half)) for _ in angles])
        else:
            shares.append(
                _dealt(half, len(angles), rng, f"{('training', 'test')[s]} images in {source}")
            )
    written: list[Rotated] = []
    with filling(out):
        for i, angle in enumerate(angles):
            folder = out / str(angle)
            folder.mkdir()
            rows = [share[i] for share in shares]
            train, test = [*map(len, rows), 0][:2]
            written.append(Rotated(folder / "data.npz", train, test))
            arrays: dict[str, Any] = _arrays(halves, rows, angle)
            np.savez_compressed(written[-1].path, **arrays)
    return written


def rotate(x: Tensor, angle: int) -> Tensor:
    """Turn square images x clockwise by whole degrees -> uint8 (N, channels, H, W).

    Quarter turns are exact; other angles are interpolated between the four nearest pixels.
    """
    quarters, rest = divmod(angle % 360, 90)
    if not rest:
        return x.rot90(-quarters, dims=(2, 3))
    out = torch.empty_like(x)
    for part, into in zip(x.split(CHUNK), out.split(CHUNK), strict=True):
        into.copy_(_turned(part.float(), math.radians(angle)).round_().clamp_(0, 255))
    return out


def background(x: Tensor) -> Tensor:
    """The median of each image's border pixels, per channel -> (N, channels, 1, 1)."""
    edges = (x[..., 0, :], x[..., -1, :], x[..., 1:-1, 0], x[..., 1:-1, -1])
    return torch.cat(edges, dim=-1).median(dim=-1).values[..., None, None]


def deal(y: Tensor, domains: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal rows out, class by class -> row numbers per domain; sizes differ by one at most."""
    labels = y.numpy()
    rows = np.concatenate([rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)])
    return [rng.permutation(rows[d::domains]) for d in range(domains)]


def _turned(x: Tensor, radians: float) -> Tensor:
    """Sample x where each pixel of the turned image comes from -> float (N, channels, H, W)."""
    c, s = math.cos(radians), math.sin(radians)
    places = x.new_tensor([[c, s, 0.0], [-s, c, 0.0]]).expand(len(x), 2, 3)
    grid = F.affine_grid(places, list(x.shape), align_corners=False)
    fill = background(x)
    # grid_sample fills with zeros, so the background is subtracted before and added after.
    return F.grid_sample(x - fill, grid, mode="bilinear", align_corners=False) + fill


def _checked(angles: Sequence[int]) -> list[int]:
    if not angles:
        raise ConfigError("There is no angle to turn by; give degrees clockwise, such as 0,30,60.")
    reduced = [angle % 360 for angle in angles]
    if len(set(reduced)) < len(angles):
        raise ConfigError(
            f"The angles {', '.join(map(str, angles))} name one twice (360 is a whole turn); give "
            "each once."
        )
    return reduced


def _read(source: Path, role: Role, size: int, reading: Reading) -> list[_Half]:
    """The training images and, if there are any, the test images."""
    description = describe(source, role, reading)
    if description.kind != "image":
        raise DataError(
            f"{source} holds vectors of {description.shape[0]} numbers, but only images can be "
            "turned: give a folder of images, or an .npz file with images"
        )
    if description.shape[1] == 0 and size == 0:
        raise DataError(
            f"{source} has images of several sizes, but all must have one size: give --size, and "
            "they are all resized to it"
        )
    load = load_source if role == "source" else load_target
    train = load(source, size=size, reading=reading)
    classes = train.classes if isinstance(train, Labelled) else ()
    test = load_evaluation(source, classes=classes, size=size, reading=reading)
    halves: list[_Half] = [train] if test is None else [train, test]
    for half in halves:
        if half.shape[1] != half.shape[2]:
            raise DataError(
                f"{source} has images of {half.shape[2]}x{half.shape[1]} pixels, but only square "
                "ones can be turned: give --size, and they are stretched to it"
            )
    return halves


def _dealt(half: _Half, domains: int, rng: np.random.Generator, what: str) -> list[np.ndarray]:
    """Rows for each domain: every row in one domain, every class in every domain."""
    if isinstance(half, Unlabelled):
        y, names = torch.zeros(len(half), dtype=torch.int64), ("images",)
    else:
        y, names = half.y, half.classes
    counts = torch.bincount(y, minlength=len(names)).tolist()
    if few := [f"{name}: {n}" for name, n in zip(names, counts, strict=True) if 0 < n < domains]:
        raise DataError(
            f"there are too few {what} for {domains} angles ({listed(few)}): every class needs "
            "one per angle; give fewer angles or more images, or let every domain hold "
            "all images (--everywhere)"
        )
    return deal(y, domains, rng)


def _arrays(halves: list[_Half], rows: list[np.ndarray], angle: int) -> dict[str, np.ndarray]:
    """One domain as `fedda data digits` writes it, with the names of the classes."""
    arrays: dict[str, np.ndarray] = {}
    for split, half, chosen in zip(_SPLITS, halves, rows, strict=False):
        x = rotate(half.x[torch.from_numpy(chosen)], angle)  # (n, channels, H, W)
        arrays[f"x_{split}"] = x[:, 0].numpy() if x.shape[1] == 1 else x.permute(0, 2, 3, 1).numpy()
        if isinstance(half, Labelled):
            arrays[f"y_{split}"] = half.y.numpy()[chosen]
            arrays["classes"] = np.array(half.classes)
    return arrays
