"""Curves over the size of a window, which doubles from tick to tick."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .axes import SIZE, axis, drawing, frame_over, stripe
from .html import Html, e, n
from .parts import figure, key, legend


@dataclass(frozen=True)
class Line:
    """One curve; with the class `d1` (dashed) it is for comparison and has no dots."""

    name: str
    css: str
    values: Mapping[int, float]  # by examples


def chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    bounds: tuple[float | None, float | None],
    least: float,
) -> Html:
    """Draw a figure of curves over the examples in a window.

    Args:
        title: what is shown.
        unit: unit of the values.
        lines: in the order of the legend; the last is drawn on top.
        bounds: lower and upper bound of the axis; None to take it from the values.
        least: the size to mark: the smallest window that is sent.
    """
    sizes = sorted({size for line in lines for size in line.values})
    shown = [v for line in lines for v in line.values.values()]
    low, high, ticks = axis(min(shown), max(shown), *bounds)
    wide = math.log2(sizes[-1]) - math.log2(sizes[0]) + 1

    def x(size: float) -> float:
        return SIZE * (math.log2(size / sizes[0]) + 0.5) / wide

    def y(value: float) -> float:
        return SIZE * (1 - (value - low) / (high - low))

    entries = [(key(line.css), line.name, "") for line in lines]
    marks: list[Html] = []
    if sizes[0] < least <= sizes[-1]:
        marks = [e("line", x1=n(x(least)), x2=n(x(least)), y1=0, y2=SIZE, class_="s k0 d2")]
        entries.append((key("k0 d2 s"), f"smallest window that is sent, {least:,.0f}", ""))
    art = drawing(
        low,
        high,
        ticks,
        *marks,
        *(part for line in lines for part in _drawn(line, x, y)),
        *_hits(sizes, lines, x, SIZE / wide),
        said=f"{title} over the examples in a window. The numbers are in the table above.",
    )
    places = {size: x(size) for size in sizes}
    framed = frame_over(art, low, high, ticks, places, "examples in a window")
    return figure(title, unit, framed, legend(entries))


def _drawn(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> Iterator[Html]:
    places = [(n(x(size)), n(y(value))) for size, value in sorted(line.values.items())]
    yield e("path", d="M" + "L".join(f"{a} {b}" for a, b in places), class_=f"m {line.css}")
    if "d1" not in line.css:
        dots = "".join(f"M{a} {b}h0" for a, b in places)
        yield e("path", d=dots, class_=f"dot {line.css.split()[0]}")


def _hits(
    sizes: Sequence[int], lines: Sequence[Line], x: Callable[[float], float], width: float
) -> Iterator[Html]:
    """Make an invisible stripe per size, which shows its values under the pointer."""
    for size in sizes:
        texts = [f"{line.name}: {line.values[size]:.4g}" for line in lines if size in line.values]
        yield stripe(x(size) - width / 2, width, [f"{size} examples", *texts])
