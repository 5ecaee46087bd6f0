"""A comparison in one picture: accuracies by target, and differences from the baseline."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedda.contrib.report.picture import GRAY, METHODS, SITES, text
from fedda.files import writing

from .plan import Score
from .statistics import MEAN, Table, by_target, spread
from .tables import columns, differences

# The baseline is gray, as in a run's report; the others have the colours of the report's lines.
_BASELINE = METHODS[1]
_COLOURS = (METHODS[0], *SITES)
_MARKERS = ("o", "s", "^", "D", "v")
_FULL = 0.8  # the share of a group's width that its variants fill
_LABEL = 16  # characters per line of a target's name
_SHORT = 38  # characters per line of a variant's name in the legend

_ASIDE = 0.22  # the share of a variant's width by which its seeds are drawn left of their mean

Looks = Mapping[str, dict[str, Any]]  # how a variant's dots are drawn


def draw(scores: Sequence[Score], baseline: str, path: Path, targets: Sequence[str] = ()) -> bool:
    """Write a PNG of accuracies and differences from the baseline -> False without accuracies.

    Raises:
        RunError: the file cannot be written.
    """
    targets = list(dict.fromkeys([*targets, *(s.target for s in scores)]))
    table = by_target(scores, targets=targets)
    if not table:
        return False
    looks = _looks(list(table), baseline)
    groups = columns(table, targets)
    has_differences = baseline in table and len(table) > 1
    names = ["\n".join(wrap(text(name), _SHORT)) for name in looks]
    width = min(max(0.16 * len(groups) * len(looks) + 0.45 * len(groups), 5.0), 17)
    legend_height = sum(0.25 + 0.16 * name.count("\n") for name in names)
    height = max(3.4 * (1 + has_differences) * (1 if width < 10 else 1.3), 0.5 + legend_height)
    figure = Figure(figsize=(width + 3.4, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if has_differences else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        _frame(axes, groups)
    _accuracies(panels[0], table, groups, looks)
    if has_differences:
        _differences(panels[1], table, groups, looks, baseline)
    handles = [
        Line2D([], [], **look | {"lw": 0, "ms": 6, "label": name})
        for look, name in zip(looks.values(), names, strict=True)
    ]
    legend: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelspacing": 0.6}
    figure.legend(handles=handles, loc="outside right upper", **legend)
    _note(figure, table, has_differences, int(11 * (width + 3)))
    with writing(path, "make room") as part, warnings.catch_warnings():
        # A name may need a script that the font does not have: boxes are good enough.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(part, format="png")
    return True


def _note(figure: Figure, table: Table, has_differences: bool, width: int) -> None:
    """Explain bars and dots below the panels."""
    counts = {len(values) for row in table.values() for values in row.values()}
    most = max(counts)
    if most == 1:
        note = "one seed, hence neither a spread nor an interval"
    else:
        seeds = f"{min(counts)} to {most} seeds" if len(counts) > 1 else f"{most} seeds"
        note = f"mean and standard deviation of {seeds}, each a small dot"
        if has_differences:
            note = f"above: {note}; below: mean of the differences and its 95 % interval, "
            note += "Student's t"
    figure.supxlabel("\n".join(wrap(note, width)), fontsize=9, color=GRAY)


def _looks(names: Sequence[str], baseline: str) -> Looks:
    """A gray dot for the baseline; when all colours are used, another shape, hollow by turns."""
    looks: dict[str, dict[str, Any]] = {baseline: {"color": _BASELINE, "marker": "o", "ms": 5}}
    for i, name in enumerate(n for n in names if n != baseline):
        turn, colour = divmod(i, len(_COLOURS))
        look = {"color": _COLOURS[colour], "marker": _MARKERS[turn % len(_MARKERS)], "ms": 5}
        looks[name] = look | ({"mfc": "white", "mew": 1.4} if turn % 2 else {})
    return {name: looks[name] for name in names}


def _frame(axes: Axes, groups: Sequence[str]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    labels = ["\n".join(wrap(text(g), _LABEL)) for g in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=9)
    axes.tick_params(axis="x", length=0)
    for i in range(len(groups) - 1):
        last = groups[i + 1] == MEAN
        axes.axvline(i + 0.5, color="#999999" if last else "#e5e5e5", lw=0.8)


def _x(group: int, variant: int, variants: int) -> float:
    """Where a variant's mean is drawn within its group."""
    return group + _FULL * ((variant + 0.5) / variants - 0.5)


def _accuracies(axes: Axes, table: Table, groups: Sequence[str], looks: Looks) -> None:
    for v, (name, look) in enumerate(looks.items()):
        for g, group in enumerate(groups):
            values = table[name].get(group)
            if not values:
                continue
            x, summary = _x(g, v, len(looks)), spread(values)
            if summary.std is not None:
                aside = [x - min(_ASIDE * _FULL / len(looks), 0.02 * len(groups))] * len(values)
                dots = [100 * y for y in values.values()]
                axes.plot(aside, dots, ".", color=look["color"], alpha=0.45, ms=6, mew=0)
                low, high = 100 * (summary.mean - summary.std), 100 * (summary.mean + summary.std)
                axes.vlines(x, low, high, color=look["color"], lw=1.4)
            axes.plot(x, 100 * summary.mean, lw=0, **look)
    axes.set_title("Target accuracy after the last round", loc="left", fontsize=11)
    axes.set_ylabel("accuracy (%)")
    axes.tick_params(axis="x", labelbottom=True)


def _differences(
    axes: Axes, table: Table, groups: Sequence[str], looks: Looks, baseline: str
) -> None:
    by_variant = differences(table, baseline)
    axes.axhline(0, color=_BASELINE, lw=1.2)
    values = [0.0]
    for v, (name, look) in enumerate(looks.items()):
        for g, group in enumerate(groups):
            change = by_variant.get(name, {}).get(group)
            if change is None:
                continue
            x, mean = _x(g, v, len(looks)), 100 * change.mean
            values.append(mean)
            if change.low is not None and change.high is not None:
                low, high = 100 * change.low, 100 * change.high
                axes.vlines(x, low, high, color=look["color"], lw=1.4)
                values += [low, high]
            axes.plot(x, mean, lw=0, **look)
    _limit(axes, values)
    axes.set_title(f"Minus {text(baseline)}, paired by seed", loc="left", fontsize=11)
    axes.set_ylabel("points")


def _limit(axes: Axes, values: Sequence[float]) -> None:
    """Show -100 to 100 points at most: an interval from two seeds can reach far beyond."""
    low, high = max(min(values), -100.0), min(max(values), 100.0)
    room = max(0.06 * (high - low), 0.5)
    axes.set_ylim(low - room, high + room)
