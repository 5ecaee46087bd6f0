"""The built-in benchmark: four domains of 16x16 digits, from the dependencies' images and fonts.

    handwritten   scikit-learn's pen digits, white on black                        (N, H, W)
    blended       other pen digits, |photo - digit| on colour photos as MNIST-M    (N, H, W, 3)
    fonts         serif fonts, white on black                                      (N, H, W)
    street        sans fonts in colour on photos, a neighbour on each side         (N, H, W, 3)

No pen digit is used in two domains, or in both the training and the test set of one domain. No
font is used in two domains. Nothing is downloaded, and the seed determines every image.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits, load_sample_images

from fedda.files import keeping

DOMAINS = ("handwritten", "blended", "fonts", "street")
# Labels are expensive and images are cheap: the demo's target, without labels, has more images.
TRAIN = {"handwritten": 200, "blended": 200, "fonts": 600, "street": 200}
SIDE = 16
CLASSES = 10
# Digits are drawn four times larger than they are stored, so that rotating them stays smooth.
LARGE = 4 * SIDE
SERIF = (
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmti10"),
)
SANS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "cmss10", "cmtt10"),
)

Pixels = NDArray[np.uint8]
Unit = NDArray[np.float64]  # brightness in [0, 1]


def build(
    out: Path, *, seed: int = 0, train: int | Mapping[str, int] = TRAIN, test: int = 500
) -> list[Path]:
    """Write OUT/<domain>/data.npz with x_train, y_train, x_test, y_test -> the files written.

    `train` is the number of training images, one for all domains or one for each; `test` is the
    number of test images of each domain.
    """
    sizes = dict.fromkeys(DOMAINS, train) if isinstance(train, int) else train
    files = []
    for d, domain in enumerate(DOMAINS):
        arrays = {}
        for s, (split, count) in enumerate((("train", sizes[domain]), ("test", test))):
            rng = np.random.default_rng([seed, d, s])
            labels = rng.permutation(np.arange(count) % CLASSES)
            arrays[f"x_{split}"] = draw(domain, split, labels, rng, seed)
            arrays[f"y_{split}"] = labels.astype(np.int64)
        files.append(out / domain / "data.npz")
        with keeping(files[-1]) as part, part.open("wb") as file:
            np.savez_compressed(file, **arrays)
    return files


@cache
def pen_digits() -> tuple[Unit, NDArray[np.int64]]:
    """scikit-learn's handwritten digits -> (1797, 8, 8) in [0, 1], (1797,) labels."""
    pixels, labels = load_digits(return_X_y=True)
    return np.asarray(pixels).reshape(-1, 8, 8) / 16, np.asarray(labels)


def handwritten_ids(seed: int) -> dict[tuple[str, str], list[NDArray[np.int64]]]:
    """Share the pen digits out: for each (domain, split), a list of row numbers per class."""
    rng = np.random.default_rng([seed, len(DOMAINS)])
    _, target = pen_digits()
    shares: dict[tuple[str, str], list[NDArray[np.int64]]] = {}
    for c in range(CLASSES):
        rows = rng.permutation(np.flatnonzero(target == c))
        pieces = np.split(rows, [int(f * len(rows)) for f in (0.3, 0.5, 0.8)])
        owners = [(domain, split) for domain in DOMAINS[:2] for split in ("train", "test")]
        for owner, piece in zip(owners, pieces, strict=True):
            shares.setdefault(owner, []).append(piece)
    return shares


def draw(
    domain: str, split: str, labels: NDArray[np.int64], rng: np.random.Generator, seed: int
) -> Pixels:
    """One image per label, each with its own position, tilt and colours -> (N, H, W[, 3])."""
    photos = load_sample_images().images
    pen, _ = pen_digits()
    ids = handwritten_ids(seed)
    images = []
    for i, label in enumerate(labels):
        if domain in DOMAINS[:2]:
            # There are few pen digits: when all are used they are used again, with another jitter.
            rows = ids[domain, split][label]
            picture = _jitter(_enlarge(pen[rows[i // CLASSES % len(rows)]]), rng, tilt=10, shift=3)
        else:
            fonts = SERIF if domain == "fonts" else SANS
            picture = _jitter(_glyph(str(label), fonts, rng), rng, tilt=15, shift=5)
        match domain:
            case "blended":
                picture = np.abs(_patch(photos, rng) - picture[..., None])
            case "street":
                picture = _street(picture, photos, rng)
        images.append(np.round(picture * 255).astype(np.uint8))
    return np.stack(images)


def _enlarge(pen: Unit) -> Image.Image:
    """An 8x8 pen digit, smoothly enlarged in the middle of a large canvas."""
    canvas = Image.new("L", (LARGE, LARGE))
    digit = Image.fromarray(np.round(pen * 255).astype(np.uint8)).resize(
        (LARGE - 8, LARGE - 8), Image.Resampling.BICUBIC
    )
    canvas.paste(digit, (4, 4))
    return canvas


def _glyph(text: str, fonts: tuple[str, ...], rng: np.random.Generator) -> Image.Image:
    """A character in a random font and size, in the middle of a large canvas."""
    name = fonts[rng.integers(len(fonts))]
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
    font = ImageFont.truetype(path, int(rng.integers(44, 68)), layout_engine=ImageFont.Layout.BASIC)
    canvas = Image.new("L", (LARGE, LARGE))
    left, top, right, bottom = font.getbbox(text)
    place = ((LARGE - left - right) / 2, (LARGE - top - bottom) / 2)
    ImageDraw.Draw(canvas).text(place, text, fill=255, font=font)
    return canvas


def _jitter(canvas: Image.Image, rng: np.random.Generator, *, tilt: float, shift: float) -> Unit:
    """Turn by up to `tilt` degrees, move by up to `shift` large pixels -> (SIDE, SIDE)."""
    moved = canvas.rotate(
        rng.uniform(-tilt, tilt),
        Image.Resampling.BILINEAR,
        translate=tuple(rng.uniform(-shift, shift, size=2)),
    )
    return np.asarray(moved.resize((SIDE, SIDE), Image.Resampling.BOX)) / 255.0


def _patch(photos: list[Pixels], rng: np.random.Generator) -> Unit:
    """A random square of a random photo, 8 to 16 pixels wide, enlarged -> (SIDE, SIDE, 3)."""
    photo = photos[rng.integers(len(photos))]
    width = int(rng.integers(SIDE // 2, SIDE + 1))
    top, left = (int(rng.integers(side - width)) for side in photo.shape[:2])
    square = Image.fromarray(photo[top : top + width, left : left + width])
    return np.asarray(square.resize((SIDE, SIDE), Image.Resampling.BILINEAR)) / 255.0


def _street(digit: Unit, photos: list[Pixels], rng: np.random.Generator) -> Unit:
    """Paint the digit and parts of two neighbours on a dimmed photo, with noise -> (H, W, 3)."""
    paper, ink = np.zeros((2, 3))
    while abs(ink.mean() - paper.mean()) < 0.3:
        paper = 0.6 * rng.uniform(0, 1, size=3) + 0.4 * _patch(photos, rng)
        ink = rng.uniform(0, 1, size=3)
    mask = digit.copy()
    for offset in (-1, 1):
        other = _jitter(_glyph(str(rng.integers(CLASSES)), SANS, rng), rng, tilt=5, shift=2)
        mask = np.maximum(mask, _shifted(other, offset * int(rng.integers(10, 14))))
    scene = paper * (1 - mask[..., None]) + ink * mask[..., None]
    return np.clip(scene + rng.normal(0, 0.04, size=scene.shape), 0, 1)


def _shifted(image: Unit, columns: int) -> Unit:
    """Move an image sideways; columns that leave the frame are lost."""
    moved = np.zeros_like(image)
    if columns > 0:
        moved[:, columns:] = image[:, :-columns]
    else:
        moved[:, :columns] = image[:, -columns:]
    return moved
