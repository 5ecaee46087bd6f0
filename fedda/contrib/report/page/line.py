"""Curves over rounds or other numbers: axes, legend, values on hover and a table of the numbers.

The drawing stretches with the page, while lines and letters keep their size: only lines are SVG,
with strokes that do not scale, and every letter is HTML beside it.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .html import NOTHING, Html, e, figure, folded, join, key, legend, n, note, table, text

Values = Mapping[int, float]  # by round; a round without a value is a gap

DOTTED = 30  # with at most so many rounds, each value gets a dot
LISTED = 12  # most curves that are named where each is one and the same number
CELLS = 20_000  # most cells of a table of numbers


@dataclass(frozen=True)
class Curve:
    """One curve: the mean over the seeds, and the values of each seed."""

    name: str  # its name in the legend and the table
    css: str  # classes of its colour and dashes
    seeds: Mapping[str, Values]  # values by seed
    marks: Mapping[str, int] = field(default_factory=dict)  # the round to mark with a ring, by seed
    drawn: bool = True  # whether it is in the figure and its legend, or in the table alone

    @cached_property
    def mean(self) -> Values:
        """The mean by round, over the seeds that have a value in that round."""
        rounds = sorted({r for values in self.seeds.values() for r in values})
        return {r: statistics.fmean(v[r] for v in self.seeds.values() if r in v) for r in rounds}


@dataclass(frozen=True)
class Scale:
    """How values are shown, and what the axis covers."""

    unit: str  # of the axis
    text: Callable[[float], str]  # writes a value
    factor: float = 1.0  # brings a value to the axis's unit
    low: float | None = None  # where the axis begins; None to take it from the values
    high: float | None = None  # where it ends; None to take it from the values
    span: float = 0.0  # the least that it covers, so that noise does not fill the height
    # the smallest and the largest value that there can be
    inside: tuple[float, float] = (-math.inf, math.inf)
    exact: bool = False  # whether a file has the values themselves, as texts are in several units


def chart(
    title: str,
    curves: Sequence[Curve],
    scale: Scale,
    rounds: int,
    *,
    remark: str = "",
    thin: bool = True,
    tall: bool = False,
    troubles: Mapping[int, int] | None = None,
    over: tuple[str, Sequence[int]] | None = None,
) -> Html | None:
    """Draw a figure of curves over the rounds; None if they have no values.

    Args:
        title: what is shown.
        curves: in the order of the legend; the first is drawn on top.
        scale: unit and form of the values.
        rounds: number of rounds of the run.
        remark: a sentence under the legend.
        thin: whether each seed has a thin line of its own.
        tall: whether the figure is higher, for many curves.
        troubles: number of troubles by round; marked on the axis.
        over: what the curves are over in place of rounds, and its number at each round.
    """
    curves = [c for c in curves if any(c.seeds.values())]
    drawn = [c for c in curves if c.drawn]
    if not drawn:
        return None
    same = "" if over or troubles or any(c.marks for c in curves) else _constant(curves, scale)
    if same:
        return note(f"{title} ({scale.unit}), in every round: {same}.")
    shown = [v * scale.factor for c in drawn for s in c.seeds.values() for v in s.values()]
    low, high, ticks = axis(min(shown), max(shown), scale.low, scale.high, scale.span, scale.inside)

    def y(value: float) -> float:
        return SIZE * (1 - (value * scale.factor - low) / (high - low))

    def x(number: float) -> float:
        return SIZE * (number - 0.5) / rounds

    what, names = over or ("round", range(1, rounds + 1))
    place = Spot(x, y, rounds, what, names)
    art = drawing(
        low,
        high,
        ticks,
        *(part for c in reversed(drawn) for part in _drawn(c, place, thin)),
        *_rings(drawn, place),
        *_troubles(troubles or {}, place),
        *_hits(drawn, place, scale, troubles or {}),
        said=_spoken(title, drawn, scale, place),
    )
    called = enumerate(names, 1) if over else ((r, r) for r in whole(rounds))
    places = {name: x(r) for r, name in called}
    css = "" if over else " tall" * tall + " dense" * (rounds > DENSE)
    framed = frame(art, low, high, ticks, places, what, css)
    entries = [(key(c.css), c.name, _last(c, rounds, scale)) for c in drawn]
    return figure(
        title,
        scale.unit,
        framed,
        legend(entries),
        note(remark) if remark else None,
        folded("Numbers", _numbers(curves, scale, place, title)),
    )


def _constant(curves: Sequence[Curve], scale: Scale) -> str:
    """What each curve always is, in words; empty if one changes, or there is but one round."""
    named: dict[str, list[str]] = {}
    for curve in curves:
        texts = {scale.text(v) for values in curve.seeds.values() for v in values.values()}
        if len(texts) > 1 or max(map(len, curve.seeds.values())) == 1:
            return ""
        named.setdefault(texts.pop(), []).append(curve.name)
    said = []
    for always, names in named.items():
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        said.append(f"{always} ({', '.join(names[:LISTED])}{more})")
    return "; ".join(said)


@dataclass(frozen=True)
class Spot:
    """Where a round and a value are in the drawing, and how the round is called."""

    x: Callable[[float], float]
    y: Callable[[float], float]
    rounds: int
    what: str
    names: Sequence[int]

    def called(self, number: int) -> str:
        """What a round is called."""
        return f"{self.what} {self.names[number - 1]}"


def _path(values: Values, place: Spot) -> str:
    """A line through neighbouring rounds, broken where a round has no value."""
    parts, last = [], None
    for r, v in sorted(values.items()):
        command = "L" if last == r - 1 else "M"
        parts.append(f"{command}{n(place.x(r))} {n(place.y(v))}")
        last = r
    return "".join(parts)


def _points(values: Values, place: Spot, every: bool) -> str:
    """Dots at every value, or only at values without a neighbour that a line could join."""
    alone = [r for r in values if every or not {r - 1, r + 1} & set(values)]
    return "".join(f"M{n(place.x(r))} {n(place.y(values[r]))}h0" for r in alone)


def _drawn(curve: Curve, place: Spot, thin: bool) -> Iterator[Html]:
    if thin and len(curve.seeds) > 1:
        for values in curve.seeds.values():
            yield e("path", d=_path(values, place), class_=f"s {curve.css}")
    mean = curve.mean
    yield e("path", d=_path(mean, place), class_=f"m {curve.css}")
    dots = _points(mean, place, every=place.rounds <= DOTTED)
    if dots:
        yield e("path", d=dots, class_=f"dot {curve.css.split()[0]}")


def _rings(curves: Sequence[Curve], place: Spot) -> Iterator[Html]:
    for curve in curves:
        for seed, number in curve.marks.items():
            value = curve.seeds.get(seed, {}).get(number)
            if value is not None:
                at, css = f"M{n(place.x(number))} {n(place.y(value))}h0", curve.css.split()[0]
                yield e("path", d=at, class_=f"ring {css}")
                yield e("path", d=at, class_=f"ring {css}")
                yield e("path", d=at, class_=f"in {css}")


def _troubles(troubles: Mapping[int, int], place: Spot) -> Iterator[Html]:
    where = "".join(f"M{n(place.x(r))} {SIZE}h0" for r in sorted(troubles) if r <= place.rounds)
    if where:
        yield e("path", d=where, class_="trouble")


def _hits(
    curves: Sequence[Curve], place: Spot, scale: Scale, troubles: Mapping[int, int]
) -> Iterator[Html]:
    """Make an invisible stripe per round, which shows its values under the pointer."""
    means = [(c.name, c.mean) for c in curves[:12]]
    for r in range(1, place.rounds + 1):
        lines = [f"{name}: {scale.text(mean[r])}" for name, mean in means if r in mean]
        lines += [f"troubles: {troubles[r]}"] if r in troubles else []
        if lines:
            left, right = place.x(r - 0.5), place.x(r + 0.5)
            yield stripe(left, right - left, [place.called(r), *lines])


def _last(curve: Curve, rounds: int, scale: Scale) -> str:
    value = curve.mean.get(rounds)
    return NOTHING if value is None else scale.text(value)


def _spoken(title: str, curves: Sequence[Curve], scale: Scale, place: Spot) -> str:
    said = []
    for curve in curves[:8]:
        ends = list(curve.mean.items())
        (first, a), (last, b) = ends[0], ends[-1]
        said.append(
            f"{curve.name} from {scale.text(a)} in {place.called(first)} to {scale.text(b)} in "
            f"{place.called(last)}"
        )
    return f"{title}: {'; '.join(said)}. The numbers follow in a table."


def _cell(value: float, scale: Scale) -> Html | str:
    shown = scale.text(value)
    return e("data", shown, value=f"{value:.10g}") if scale.exact else shown


def _numbers(curves: Sequence[Curve], scale: Scale, place: Spot, title: str) -> Html:
    """Make the table of values by round; if it is too long, of means only, then of fewer rounds."""
    columns: list[tuple[str, Values]] = []
    rounds, name = place.rounds, place.names
    seeds = any(len(c.seeds) > 1 for c in curves)
    each = sum(1 + len(c.seeds) for c in curves) * rounds <= CELLS
    for c in curves:
        several = len(c.seeds) > 1
        columns.append((f"{c.name}, mean" if several else c.name, c.mean))
        if several and each:
            columns += [(f"{c.name}, seed {s}", values) for s, values in c.seeds.items()]
    every = math.ceil(len(columns) * rounds / CELLS)
    numbers = [r for r in range(1, rounds + 1) if r % every == 0 or r in (1, rounds)]
    rows = [
        [name[r - 1], *(_cell(v[r], scale) if r in v else NOTHING for _, v in columns)]
        for r in numbers
    ]
    left_out = note(
        "Means over the seeds" * (seeds and not each),
        f"{', e' if seeds and not each else 'E'}very {every}th round" * (every > 1),
        "; the rest is in results.json.",
    )
    made = table([place.what, *(head for head, _ in columns)], rows, label=title, open_=False)
    return join(made, left_out if every > 1 or (seeds and not each) else None)


SIZE = 1000  # width and height of a drawing, in its own coordinates
DENSE = 100  # with more rounds lines are thinner


def frame(
    art: Html,
    low: float,
    high: float,
    ticks: Sequence[float],
    places: Mapping[int, float],
    what: str,
    css: str,
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
