"""A comparison in one picture: accuracy by target and variant, and what each is worth more."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedda.errors import RunError
from fedda.plot import _GRAY as GRAY
from fedda.plot import _METHODS as METHODS
from fedda.plot import _SITES as SITES
from fedda.plot import _text as text

from .cells import Score
from .statistics import MEAN, Table, by_target, spread
from .tables import columns, differences

# The baseline is gray as in a run's report; the others have the colours of its lines.
_BASELINE = METHODS[1]
_COLOURS = (METHODS[0], *SITES)
_MARKERS = ("o", "s", "^", "D", "v")
_FULL = 0.8  # of a group's width that its variants take
_LABEL = 16  # characters of a target's name on a line
_SHORT = 38  # characters of a variant's name in the legend's line

_ASIDE = 0.22  # of a variant's width, by which its seeds stand to the left of their mean

Looks = Mapping[str, dict[str, Any]]  # how a variant's dots are drawn


def draw(scores: Sequence[Score], baseline: str, path: Path, targets: Sequence[str] = ()) -> bool:
    """Write a PNG, above accuracies, below differences from the baseline -> whether there are any.

    Raises:
        RunError: the file cannot be written.
    """
    targets = list(dict.fromkeys([*targets, *(s.target for s in scores)]))
    table = by_target(scores, targets=targets)
    if not table:
        return False
    looks = _looks(list(table), baseline)
    groups = columns(table, targets)
    shows = baseline in table and len(table) > 1
    names = ["\n".join(wrap(text(name), _SHORT)) for name in looks]
    wide = min(max(0.16 * len(groups) * len(looks) + 0.45 * len(groups), 5.0), 17)
    listed = sum(0.25 + 0.16 * name.count("\n") for name in names)
    tall = max(3.4 * (1 + shows) * (1 if wide < 10 else 1.3), 0.5 + listed)
    figure = Figure(figsize=(wide + 3.4, tall), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if shows else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        _frame(axes, groups)
    _accuracies(panels[0], table, groups, looks)
    if shows:
        _differences(panels[1], table, groups, looks, baseline)
    handles = [
        Line2D([], [], **look | {"lw": 0, "ms": 6, "label": name})
        for look, name in zip(looks.values(), names, strict=True)
    ]
    legend: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelspacing": 0.6}
    figure.legend(handles=handles, loc="outside right upper", **legend)
    _note(figure, table, shows, int(11 * (wide + 3)))
    try:
        with warnings.catch_warnings():
            # A name may need a script that the font does not have: boxes are good enough.
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            figure.savefig(path, format="png")
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}).") from error
    return True


def _note(figure: Figure, table: Table, shows: bool, width: int) -> None:
    """What bars and dots mean, where there is more than one seed."""
    counts = {len(values) for row in table.values() for values in row.values()}
    most = max(counts)
    if most == 1:
        note = "one seed, hence neither a spread nor an interval"
    else:
        seeds = f"{min(counts)} to {most} seeds" if len(counts) > 1 else f"{most} seeds"
        note = "above: " * shows + f"mean and standard deviation of {seeds}, each a small dot"
        note += "; below: mean of the differences and its 95 % interval, Student's t" * shows
    figure.supxlabel("\n".join(wrap(note, width)), fontsize=9, color=GRAY)


def _looks(names: Sequence[str], baseline: str) -> Looks:
    """Baseline a gray dot; once all colours are used the next ones are hollow, of another form."""
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


def _place(group: int, variant: int, variants: int) -> float:
    return group + _FULL * ((variant + 0.5) / variants - 0.5)


def _accuracies(axes: Axes, table: Table, groups: Sequence[str], looks: Looks) -> None:
    for v, (name, look) in enumerate(looks.items()):
        for g, group in enumerate(groups):
            values = table[name].get(group)
            if not values:
                continue
            x, found = _place(g, v, len(looks)), spread(values)
            if found.std is not None:
                aside = [x - min(_ASIDE * _FULL / len(looks), 0.02 * len(groups))] * len(values)
                dots = [100 * y for y in values.values()]
                axes.plot(aside, dots, ".", color=look["color"], alpha=0.45, ms=6, mew=0)
                low, high = 100 * (found.mean - found.std), 100 * (found.mean + found.std)
                axes.vlines(x, low, high, color=look["color"], lw=1.4)
            axes.plot(x, 100 * found.mean, lw=0, **look)
    axes.set_title("Target accuracy after the last round", loc="left", fontsize=11)
    axes.set_ylabel("accuracy (%)")
    axes.tick_params(axis="x", labelbottom=True)


def _differences(
    axes: Axes, table: Table, groups: Sequence[str], looks: Looks, baseline: str
) -> None:
    found = differences(table, baseline)
    axes.axhline(0, color=_BASELINE, lw=1.2)
    ends = [0.0]
    for v, (name, look) in enumerate(looks.items()):
        for g, group in enumerate(groups):
            each = found.get(name, {}).get(group)
            if each is None:
                continue
            x, mean = _place(g, v, len(looks)), 100 * each.mean
            ends.append(mean)
            if each.low is not None and each.high is not None:
                low, high = 100 * each.low, 100 * each.high
                axes.vlines(x, low, high, color=look["color"], lw=1.4)
                ends += [low, high]
            axes.plot(x, mean, lw=0, **look)
    _limit(axes, ends)
    axes.set_title(f"Minus {text(baseline)}, paired by seed", loc="left", fontsize=11)
    axes.set_ylabel("points")


def _limit(axes: Axes, ends: Sequence[float]) -> None:
    """An interval from two seeds can be wider than all differences that there can be."""
    low, high = max(min(ends), -100.0), min(max(ends), 100.0)
    room = max(0.06 * (high - low), 0.5)
    axes.set_ylim(low - room, high + room)
