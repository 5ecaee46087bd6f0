"""Stacked bars over the rounds, in the frame of the curves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .axes import SIZE, axis, drawing, frame, stripe
from .html import Html, e, n
from .line import CELLS
from .parts import NOTHING, figure, folded, legend, patch, table


@dataclass(frozen=True)
class Layer:
    """One part of every bar: its name, the number of its colour, its values by round."""

    name: str
    colour: int
    values: Mapping[int, float]


def bars(
    title: str,
    unit: str,
    layers: Sequence[Layer],
    rounds: int,
    text: Callable[[float], str],
    *,
    factor: float = 1.0,
    high: float | None = None,
) -> Html | None:
    """Draw a figure of stacked bars; None if every value is missing or zero.

    Args:
        title: what is shown.
        unit: unit of the axis.
        layers: from the bottom to the top.
        rounds: number of rounds of the run.
        text: writes a value of a layer.
        factor: what a value of a layer is multiplied by to give the axis's unit.
        high: the tallest bar of all figures that share this scale, before `factor`.
    """
    layers = [layer for layer in layers if any(layer.values.values())]
    sums = {r: sum(layer.values.get(r, 0) for layer in layers) for r in range(1, rounds + 1)}
    if not layers:
        return None
    low, top, ticks = axis(0, factor * max(high or 0, *sums.values()), 0, None)
    slot = SIZE / rounds
    wide = slot * (0.72 if rounds <= 60 else 1)
    below = dict.fromkeys(sums, 0.0)
    shapes = []
    for layer in layers:
        parts = []
        for r, value in sorted(layer.values.items()):
            if value and r in sums:
                base, height = SIZE * factor * below[r] / top, SIZE * factor * value / top
                left, right = slot * (r - 0.5) - wide / 2, slot * (r - 0.5) + wide / 2
                upper = n(SIZE - base - height)
                parts.append(f"M{n(left)} {n(SIZE - base)}V{upper}H{n(right)}V{n(SIZE - base)}Z")
                below[r] += value
        # This overrides `fill: none` of the style sheet, which is for paths that are lines.
        fill = f"fill:var(--k{layer.colour})"
        shapes.append(e("path", d="".join(parts), style=fill))
    stripes = [stripe(slot * (r - 1), slot, _hover(r, layers, text)) for r in sums]
    said = f"{title}: {_totals(layers, text)} in all. The numbers follow in a table."
    art = drawing(low, top, ticks, *shapes, *stripes, said=said)
    entries = [(patch(layer.colour), layer.name, "") for layer in layers]
    return figure(
        title,
        unit,
        frame(art, low, top, ticks, rounds),
        legend(reversed(entries)),
        folded("Numbers", _numbers(title, layers, sums, text)),
    )


def _hover(r: int, layers: Sequence[Layer], text: Callable[[float], str]) -> list[str]:
    lines = [f"{x.name}: {text(x.values[r])}" for x in reversed(layers) if x.values.get(r)]
    return [f"round {r}", *lines]


def _totals(layers: Sequence[Layer], text: Callable[[float], str]) -> str:
    return ", ".join(f"{x.name} {text(sum(x.values.values()))}" for x in layers)


def _numbers(
    title: str,
    layers: Sequence[Layer],
    sums: Mapping[int, float],
    text: Callable[[float], str],
) -> Html:
    every = -(-len(sums) * (len(layers) + 1) // CELLS)
    rows = [
        [r, *(_cell(x.values.get(r), text) for x in layers), _cell(total, text)]
        for r, total in sums.items()
        if r % every == 0 or r in (1, len(sums))
    ]
    return table(["round", *(x.name for x in layers), "in all"], rows, label=title, open_=False)


def _cell(value: float | None, text: Callable[[float], str]) -> Html | str:
    """Write a value for people, with the number itself for a CSV file."""
    return NOTHING if value is None else e("data", text(value), value=f"{value:.10g}")
