"""Axes in HTML around a drawing in SVG: the drawing stretches with the page, letters do not."""

import math
from collections.abc import Iterable, Mapping, Sequence

from .html import Html, e, n, text

SIZE = 1000  # width and height of a drawing, in its own coordinates
DENSE = 100  # with more rounds lines are thinner


def frame(
    art: Html, low: float, high: float, ticks: Sequence[float], rounds: int, tall: bool = False
) -> Html:
    """Put axes around a drawing: values upwards, rounds to the right."""
    places = {r: SIZE * (r - 0.5) / rounds for r in whole(rounds)}
    css = " tall" * tall + " dense" * (rounds > DENSE)
    return frame_over(art, low, high, ticks, places, "round", css)


def frame_over(
    art: Html,
    low: float,
    high: float,
    ticks: Sequence[float],
    places: Mapping[int, float],
    what: str,
    css: str = "",
) -> Html:
    """Put axes around a drawing; `places` maps each number below it to its x in the drawing."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    texts = [f"{t:,.{digits}f}" for t in ticks]
    spans = [
        e("span", t, style=f"bottom:{n(100 * (v - low) / (high - low))}%")
        for t, v in zip(texts, ticks, strict=True)
    ]
    # A hidden copy of the longest number makes the column wide enough.
    left = e("div", e("i", max(texts, key=len)), *spans, class_="ys", aria_hidden="true")
    below = [e("span", f"{i}", style=f"left:{n(100 * x / SIZE)}%") for i, x in places.items()]
    return e(
        "div",
        left,
        art,
        e("div", *below, class_="xs", aria_hidden="true"),
        e("div", what, class_="xl", aria_hidden="true"),
        class_=f"plot{css}",
    )


def drawing(low: float, high: float, ticks: Sequence[float], *parts: Html, said: str) -> Html:
    """Make a drawing that stretches, with a line behind its parts at each tick of the axis."""
    heights = [n(SIZE * (1 - (t - low) / (high - low))) for t in ticks]
    return e(
        "svg",
        *(e("line", x1=0, x2=SIZE, y1=y, y2=y, class_="gl") for y in heights),
        *parts,
        view_box=f"0 0 {SIZE} {SIZE}",
        aspect="none",
        role="img",
        aria_label=said,
    )


def stripe(left: float, width: float, lines: Iterable[str]) -> Html:
    """Make an invisible part of a drawing that shows values when the pointer is on it."""
    title = e("title", Html("&#10;".join(map(text, lines))))
    return e("rect", title, class_="hit", x=n(left), y=0, width=n(width), height=SIZE)


def axis(
    low: float,
    high: float,
    least: float | None,
    most: float | None,
    span: float = 0.0,
    inside: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float, list[float]]:
    """Return bounds and ticks of an axis; the step is 1, 2 or 5 times a power of ten.

    Args:
        low: the smallest value.
        high: the largest value.
        least: where the axis begins; None to take it from the values.
        most: where it ends; None to take it from the values.
        span: the least that it covers, so that noise does not fill the height. It is at least
            a tenth of the largest value, whatever is given.
        inside: the smallest and the largest value that there can be.
    """
    low, high = (low if least is None else least), (high if most is None else most)
    span = max(span, 0.1 * max(abs(low), abs(high))) or 1.0
    if high - low < span * (1 - 1e-9):
        low, high = _widened(low, high, least, most, span, inside)
    step = step_of((high - low) / 5)
    low = low if least is not None else step * math.floor(low / step + 1e-9)
    high = high if most is not None else step * math.ceil(high / step - 1e-9)
    first = math.ceil(low / step - 1e-9)
    return low, high, [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _widened(
    low: float,
    high: float,
    least: float | None,
    most: float | None,
    span: float,
    inside: tuple[float, float],
) -> tuple[float, float]:
    """Widen a range to `span` around its middle, or from an end that is given -> low, high."""
    if least is not None or most is not None:
        return (low, low + span) if most is None else (high - span if least is None else low, high)
    begin = (low + high - span) / 2
    begin = max(inside[0], min(begin, inside[1] - span))
    return begin, begin + span


def whole(rounds: int) -> list[int]:
    """Return the rounds to label under an axis."""
    step = max(1, round(step_of(rounds / 8)))
    return [1, *(r for r in range(step, rounds + 1, step) if r > 1 + step // 2)]


def step_of(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-9))
