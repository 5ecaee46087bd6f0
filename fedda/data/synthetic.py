"""Synthetic numbers in colour, like the set SYN of Digit-Five, whose file is published no more.

Ganin et al., JMLR 2016, section 5.2.3: "varying the text (that includes different one-, two-, and
three-digit numbers), positioning, orientation, background and stroke colors, and the amount of
blur". These are drawn anew after that description, from the fonts that matplotlib brings and those
of a folder. The label is the digit in the middle.
"""

from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from fedda.errors import DataError
from fedda.files import keeping

from .digits import CLASSES, SANS, SERIF, Pixels

DOMAIN = "syn"
LARGE = 128  # pixels a side, in which numbers are drawn; they are stored in fewer
HEIGHTS = (88, 169)  # of the letters, in these pixels
TILT = 25  # degrees, either way
SHIFT = 12  # such pixels, either way
BLURS, HOW_OFTEN = (0, 1, 2, 4, 6), (0.2, 0.25, 0.25, 0.2, 0.1)  # radius, in such pixels

Font = ImageFont.FreeTypeFont
Colour = tuple[int, ...]


def build(
    out: Path,
    *,
    seed: int = 0,
    train: int = 9000,
    test: int = 2000,
    size: int = 32,
    fonts: Path | None = None,
) -> Path:
    """Write OUT/syn/data.npz with x_train, y_train, x_test, y_test -> the file.

    Args:
        out: the folder for the domain.
        seed: of all draws.
        train: number of training images, of all classes alike.
        test: number of test images, drawn apart, of the same fonts.
        size: width and height of an image.
        fonts: a folder with more fonts (.ttf, .otf) than matplotlib's.

    Raises:
        DataError: that folder has none.
    """
    files, arrays = font_files(fonts), {}
    for s, (split, count) in enumerate((("train", train), ("test", test))):
        rng = np.random.default_rng([seed, s])
        labels = rng.permutation(np.arange(count) % CLASSES)
        drawn = [number(int(label), files, rng, size) for label in labels]
        arrays |= {f"x_{split}": np.stack(drawn), f"y_{split}": labels.astype(np.int64)}
    path = out / DOMAIN / "data.npz"
    with keeping(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def font_files(folder: Path | None) -> list[Path]:
    """The fonts to draw with, in the order of their names.

    Raises:
        DataError: the folder has none.
    """
    own = Path(matplotlib.get_data_path(), "fonts", "ttf")
    found = [own / f"{name}.ttf" for name in (*SERIF, *SANS)]
    if folder is not None:
        more = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".ttf", ".otf"))
        if not more:
            raise DataError(f"{folder} has no .ttf or .otf file; name a folder of fonts.")
        found += more
    return found


def number(label: int, fonts: list[Path], rng: np.random.Generator, size: int) -> Pixels:
    """A number of one to three digits with the label in the middle -> (size, size, 3)."""
    background, ink = _colours(rng)
    path, height = fonts[rng.integers(len(fonts))], int(rng.integers(*HEIGHTS))
    font = ImageFont.truetype(path, height, layout_engine=ImageFont.Layout.BASIC)
    picture = _ground(background, rng)
    stroke = int(rng.integers(1, 6)) if rng.random() < 0.4 else 0
    letters, edge = _text(label, font, stroke, rng)
    tilt, shift = float(rng.uniform(-TILT, TILT)), rng.uniform(-SHIFT, SHIFT, 2)
    for layer, colour in ((edge, _colours(rng)[0]), (letters, ink)):
        turned = layer.rotate(tilt, Image.Resampling.BILINEAR, translate=tuple(shift.tolist()))
        picture.paste(Image.new("RGB", picture.size, colour), (0, 0), _middle(turned))
    if radius := float(rng.choice(BLURS, p=HOW_OFTEN)):
        picture = picture.filter(ImageFilter.BoxBlur(radius))
    image = np.asarray(picture.resize((size, size), Image.Resampling.BOX), np.float64)
    if rng.random() < 0.3:
        image = image + rng.normal(0, rng.uniform(2, 10), image.shape)
    return np.clip(np.round(image), 0, 255).astype(np.uint8)


def _colours(rng: np.random.Generator) -> tuple[Colour, Colour]:
    """Two colours that can be told apart, also in gray."""
    while True:
        one, other = rng.integers(0, 256, (2, 3))
        if np.abs(one - other).sum() > 120 and abs(one.mean() - other.mean()) > 25:
            return tuple(one.tolist()), tuple(other.tolist())


def _ground(colour: Colour, rng: np.random.Generator) -> Image.Image:
    """A background, plain or with a slope or an edge to a colour near by."""
    plain = Image.new("RGB", (LARGE, LARGE), colour)
    if rng.random() >= 0.4:
        return plain
    near = tuple(int(c) for c in np.clip(np.add(colour, rng.integers(-70, 71, 3)), 0, 255))
    slope = Image.linear_gradient("L").resize((2 * LARGE, 2 * LARGE))
    slope = _middle(slope.rotate(float(rng.uniform(0, 360))))
    if rng.random() < 0.5:
        limit = int(rng.integers(90, 166))
        slope = Image.fromarray((np.asarray(slope) > limit).astype(np.uint8) * 255)
    return Image.composite(Image.new("RGB", plain.size, near), plain, slope)


def _text(
    label: int, font: Font, stroke: int, rng: np.random.Generator
) -> tuple[Image.Image, Image.Image]:
    """The digits on a canvas twice as wide, without and with their outline."""
    count = int(rng.integers(1, 4))
    digits = [str(digit) for digit in rng.integers(CLASSES, size=count)]
    at = 1 if count == 3 else int(rng.integers(count))
    digits[at] = str(label)
    letters, edge = (Image.new("L", (2 * LARGE, 2 * LARGE)) for _ in range(2))
    for digit, place in _places(digits, at, font, max(stroke, 2)):
        ImageDraw.Draw(letters).text(place, digit, fill=255, font=font)
        if stroke:
            drawn = ImageDraw.Draw(edge)
            drawn.text(place, digit, fill=255, font=font, stroke_width=stroke, stroke_fill=255)
    return letters, edge


def _places(
    digits: list[str], at: int, font: Font, gap: int
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Each digit and where it stands, so that the one at index `at` is in the middle."""
    left, top, right, bottom = font.getbbox(digits[at])
    widths = [font.getlength(digit) + gap for digit in digits]
    x, y = LARGE - (left + right) / 2 - sum(widths[:at]), LARGE - (top + bottom) / 2
    for digit, width in zip(digits, widths, strict=True):
        yield digit, (x, y)
        x += width


def _middle(canvas: Image.Image) -> Image.Image:
    """The middle of a canvas twice as wide as a picture."""
    return canvas.crop((LARGE // 2, LARGE // 2, LARGE // 2 + LARGE, LARGE // 2 + LARGE))
