"""A contact sheet: one picture that shows a site's images, to check them and their labels."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from fedda.data.sets import Labelled, Unlabelled
from fedda.errors import DataError
from fedda.files import writing

_MOST_ROWS = 100  # classes on one sheet
_INCHES = 0.6  # per image
_GAP = 2  # pixels between images


def contact_sheet(dataset: Labelled | Unlabelled, out: Path, per_class: int = 10) -> Path:
    """Write a PNG: one row of `per_class` images per class, or `per_class` rows of a target.

    The images are spread evenly over the set; a row with fewer images than columns ends early.
    """
    if dataset.kind == "vector":
        raise DataError(
            f"this site's examples are vectors of {dataset.shape[0]} numbers, so there is no "
            f"picture to show: use `fedda data check`"
        )
    if isinstance(dataset, Labelled):
        names = list(dataset.classes[:_MOST_ROWS])
        rows = [_spread((dataset.y == c).nonzero()[:, 0], per_class) for c in range(len(names))]
        more = len(dataset.classes) - len(names)
        title = f"{len(dataset)} labelled images of {len(dataset.classes)} classes"
        title += f", {more} classes not shown" if more else ""
    else:
        chosen = _spread(torch.arange(len(dataset)), per_class * per_class)
        rows = list(chosen.split(per_class))
        names = [""] * len(rows)
        title = f"{len(dataset)} unlabelled images"
    sheet = _mosaic(dataset.x, rows, per_class)
    _draw(sheet, names, f"{title}, {'x'.join(map(str, dataset.shape))}", out, per_class)
    return out


def _spread(indices: Tensor, most: int) -> Tensor:
    if len(indices) <= most:
        return indices
    return indices[torch.linspace(0, len(indices) - 1, most).round().long()]


def _mosaic(x: Tensor, rows: list[Tensor], columns: int) -> np.ndarray:
    """uint8 (N, C, h, w) -> uint8 (len(rows) * (h + gap), columns * (w + gap), 3), white gaps."""
    h, w = x.shape[2:]
    sheet = x.new_full((3, len(rows) * (h + _GAP), columns * (w + _GAP)), 255)
    for r, row in enumerate(rows):
        for c, index in enumerate(row.tolist()):
            top, left = r * (h + _GAP), c * (w + _GAP)
            sheet[:, top : top + h, left : left + w] = x[index].expand(3, h, w)
    return sheet.permute(1, 2, 0).numpy()


def _draw(sheet: np.ndarray, names: list[str], title: str, out: Path, columns: int) -> None:
    height, width, _ = sheet.shape
    w_inch = max(4.0, columns * _INCHES)
    figure = Figure(figsize=(w_inch, w_inch * height / width), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(sheet, interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set_xticks([])
    step = height / len(names)
    axes.set_yticks([(i + 0.5) * step for i in range(len(names))], names, fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    with writing(out, "give another file with --out") as part:
        figure.savefig(part, format="png", bbox_inches="tight", pad_inches=0.1)
