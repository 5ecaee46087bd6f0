"""A picture of a site's noted features, before and after a training; it stays at the site."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedda.maths.embed import pca

# Okabe and Ito's colours, which colour-blind readers can tell apart; beyond eight, other shapes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
_SHAPES = ("circle", "square", "triangle", "cross")
_UNKNOWN = "#B0B0B0"
_SIDE, _GAP, _TOP, _LINE = 440, 30, 66, 22  # pixels: panel, gap, top margin, line of text
_FINE = 2  # the picture is drawn this many times larger, then reduced, for smooth edges
_LISTED = 24  # classes that the legend names


def draw(first: Path, last: Path, out: Path) -> None:
    """Write a PNG of two panels, each with the two main directions of its own features."""
    panels = [dict(np.load(path, allow_pickle=False)) for path in (first, last) if path.exists()]
    classes = [str(name) for name in panels[-1]["classes"]]
    legend = classes[:_LISTED]
    columns = 4
    rows = -(-(len(legend) + 1) // columns)
    width = 2 * _SIDE + 3 * _GAP
    image = Image.new("RGB", (width * _FINE, (_TOP + _SIDE + _GAP + rows * _LINE) * _FINE), "white")
    pen = _Pen(ImageDraw.Draw(image))
    pen.text(_GAP, 10, f"{last.parent.parent.parent.name}, {last.parent.name}: features, PCA", 16)
    for i, panel in enumerate(panels):
        left = _GAP + i * (_SIDE + _GAP)
        pen.text(left, 38, f"round {int(panel['round'])}, model {panel['model']}", 13)
        _panel(pen, panel, left)
    for i, name in enumerate([*legend, "no label"]):
        x, y = _GAP + i % columns * (width // columns), _TOP + _SIDE + 14 + i // columns * _LINE
        pen.mark(x + 5, y + 8, i if i < len(legend) else -1)
        pen.text(x + 18, y, name[:26], 12)
    image.reduce(_FINE).save(out, format="PNG")


def _panel(pen: "_Pen", panel: dict[str, np.ndarray], left: int) -> None:
    z = panel["features"]
    labels = panel.get("labels", np.full(len(z), -1))
    if "test_features" in panel:
        z = np.concatenate([z, panel["test_features"]])
        labels = np.concatenate([labels, panel["test_labels"]])
    points = pca(z.astype(np.float32))
    low, high = points.min(axis=0), points.max(axis=0)
    places = (points - low) / np.maximum(high - low, 1e-12) * (_SIDE - 20) + 10
    pen.frame(left, _TOP, _SIDE)
    for (x, up), label in sorted(zip(places, labels, strict=True), key=lambda p: int(p[1])):
        pen.mark(left + float(x), _TOP + _SIDE - float(up), int(label))


class _Pen:
    def __init__(self, canvas: ImageDraw.ImageDraw) -> None:
        self.canvas = canvas

    def text(self, x: float, y: float, text: str, size: int) -> None:
        self.canvas.text((x * _FINE, y * _FINE), text, fill="#222222", font=_font(size * _FINE))

    def frame(self, left: float, top: float, side: float) -> None:
        box = [n * _FINE for n in (left, top, left + side, top + side)]
        self.canvas.rectangle(box, outline="#CCCCCC", width=_FINE)

    def mark(self, x: float, y: float, label: int) -> None:
        """Draw the mark of one image; a label of -1 means no label."""
        colour = _COLOURS[label % len(_COLOURS)] if label >= 0 else _UNKNOWN
        shape = _SHAPES[label // len(_COLOURS) % len(_SHAPES)] if label >= 0 else "circle"
        r = (3.2 if label >= 0 else 2.2) * _FINE
        x, y = x * _FINE, y * _FINE
        if shape == "circle":
            self.canvas.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif shape == "square":
            self.canvas.rectangle((x - r, y - r, x + r, y + r), fill=colour)
        elif shape == "triangle":
            self.canvas.polygon(((x, y - r), (x + r, y + r), (x - r, y + r)), fill=colour)
        else:
            for dx in (-r, r):
                self.canvas.line((x - dx, y - r, x + dx, y + r), fill=colour, width=_FINE * 2)


def _font(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib  # for its fonts; takes a moment to import

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
