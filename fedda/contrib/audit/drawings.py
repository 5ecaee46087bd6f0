"""Pictures of what an attack recovered, for the eyes of the site alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from fedda.files import replacing

SIDE, GAP = 96, 8  # pixels


def pairs(made: Sequence[tuple[Tensor, Tensor]], path: Path) -> None:
    """Draw originals above and reconstructions below, one column per size of the update."""
    width, height = (len(made) * (SIDE + GAP) + GAP, 2 * (SIDE + GAP) + GAP)
    sheet = Image.new("RGB", (width, height), "white")
    for column, pair in enumerate(made):
        for row, image in enumerate(pair):
            place = GAP + column * (SIDE + GAP), GAP + row * (SIDE + GAP)
            sheet.paste(_drawn(image), place)
    with replacing(path) as part:
        sheet.save(part, format="PNG")


def _drawn(image: Tensor) -> Image.Image:
    pixels = (image.clamp(0, 1) * 255).round().to("cpu").numpy().astype(np.uint8)
    flat = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    return Image.fromarray(flat).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
