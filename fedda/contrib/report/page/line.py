"""Curves over rounds or other numbers: axes, legend, values on hover and a table of the numbers.

The drawing stretches with the page, while lines and letters keep their size: only lines are SVG,
with strokes that do not scale, and every letter is HTML beside it.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .axes import SIZE, axis, drawing, frame, frame_over, stripe
from .html import Html, e, join, n
from .parts import NOTHING, figure, folded, key, legend, note, table

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
    framed = frame(art, low, high, ticks, rounds, tall)
    if over:
        places = {name: x(r) for r, name in enumerate(names, 1)}
        framed = frame_over(art, low, high, ticks, places, what)
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
    for text, names in named.items():
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        said.append(f"{text} ({', '.join(names[:LISTED])}{more})")
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
