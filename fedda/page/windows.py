"""Curves over the size of a window, which doubles from mark to mark."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .axes import SIZE, axis, levels
from .html import Html, e, join, n
from .parts import figure, key, legend


@dataclass(frozen=True)
class Line:
    """One curve; dashed as `d1` it is a yardstick and has no dots."""

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
    """A figure of curves over the examples in a window.

    Args:
        title: what is shown.
        unit: of the values.
        lines: in the order of the legend; the last is drawn on top.
        bounds: of the axis, where they are fixed.
        least: size to mark, the smallest window that is sent.
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
    art = e(
        "svg",
        *(
            e("line", x1=0, x2=SIZE, y1=n(t), y2=n(t), class_="gl")
            for t in levels(ticks, low, high)
        ),
        *marks,
        *(part for line in lines for part in _drawn(line, x, y)),
        *_hits(sizes, lines, x, SIZE / wide),
        view_box=f"0 0 {SIZE} {SIZE}",
        aspect="none",
        role="img",
        aria_label=f"{title} over the examples in a window. The numbers are in the table above.",
    )
    return figure(title, unit, _frame(art, low, high, ticks, sizes, x), legend(entries))


def _drawn(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> Iterator[Html]:
    places = [(n(x(size)), n(y(value))) for size, value in sorted(line.values.items())]
    yield e("path", d="M" + "L".join(f"{a} {b}" for a, b in places), class_=f"m {line.css}")
    if "d1" not in line.css:
        dots = "".join(f"M{a} {b}h0" for a, b in places)
        yield e("path", d=dots, class_=f"dot {line.css.split()[0]}")


def _hits(
    sizes: Sequence[int], lines: Sequence[Line], x: Callable[[float], float], width: float
) -> Iterator[Html]:
    """An invisible stripe per size, to read its values from."""
    for size in sizes:
        found = [f"{line.name}: {line.values[size]:.4g}" for line in lines if size in line.values]
        words = Html("&#10;").join(join(text) for text in [f"{size} examples", *found])
        hit = {"x": n(x(size) - width / 2), "y": 0, "width": n(width), "height": SIZE}
        yield e("rect", e("title", Html(words)), class_="hit", **hit)


def _frame(
    art: Html,
    low: float,
    high: float,
    ticks: Sequence[float],
    sizes: Sequence[int],
    x: Callable[[float], float],
) -> Html:
    """As axes.frame, with the sizes of windows below."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    texts = [f"{t:.{digits}f}" for t in ticks]
    spans = [
        e("span", t, style=f"bottom:{n(100 * (v - low) / (high - low))}%")
        for t, v in zip(texts, ticks, strict=True)
    ]
    below = [e("span", f"{size}", style=f"left:{n(100 * x(size) / SIZE)}%") for size in sizes]
    return e(
        "div",
        e("div", e("i", max(texts, key=len)), *spans, class_="ys", aria_hidden="true"),
        art,
        e("div", *below, class_="xs", aria_hidden="true"),
        e("div", "examples in a window", class_="xl", aria_hidden="true"),
        class_="plot",
    )
