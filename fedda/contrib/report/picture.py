"""Plot a run: the target's score in each round, and the weight of each site in the average."""

import statistics
import warnings
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedda.files import writing
from fedda.results import read

# Okabe and Ito's colours, which colour-blind readers can tell apart, without yellow, which is too
# pale for a line. Methods and sites share no colour; black is the target's.
METHODS = ("#0072B2", "#777777")
SITES = ("#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_STYLES = ("-", "--", ":", "-.")
GRAY = "#666666"
_MARKED = 30  # runs of at most so many rounds get a dot for each round
_LISTED = 16  # at most so many sites fit into the legend beside the right panel

# Heading, label, form of a number, factor, and the least that the axis covers, so that noise does
# not fill the height.
_AXES = {
    "accuracy": ("Accuracy on {target}", "accuracy (%)", "{:.1f} %", 100, 10),
    "infomax": ("No labelled tests: infomax on {target}", "infomax (nats)", "{:.3f}", 1, 0.1),
    "loss": ("Nothing was tested: training loss", "loss over the sources", "{:.3f}", 1, 0.1),
}

Series = dict[int, list[float]]  # by round, the values of all seeds


def plot(results: read.Results, path: Path) -> Path:
    """Write a PNG: left the target's accuracy by round, right the weights of the sites.

    Raises:
        RunError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    rounds = max(len(t["rounds"]) for runs in results["trainings"].values() for t in runs)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5")
        axes.set_axisbelow(True)
        axes.set_xlabel("round")
        axes.set_xlim(1 - max(0.5, rounds / 40), rounds + max(0.5, rounds / 40))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    _scores(left, results)
    _weights(right, results)
    figure.suptitle(_heading(results), fontsize=12, fontweight="bold")
    many = {"seed": len(results["seeds"]), "target": len(read.targets(results))}
    if several := [what for what, count in many.items() if count > 1]:
        mean = " and ".join(read.counted(many[what], what) for what in several)
        note = f"lines: mean of {mean}; bands: lowest to highest {' and '.join(several)}"
        figure.supxlabel(note, fontsize=9, color=GRAY)
    with writing(path, "choose another file with --png") as part, warnings.catch_warnings():
        # A site's name may have characters that the font lacks; matplotlib then draws boxes.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(part, format="png")
    return path


def _heading(results: read.Results) -> str:
    sources = [s["name"] for s in results["sites"] if s["role"] == "source"]
    n = len(sources)
    names = ", ".join(sources) if n <= 4 else f"{n} sources"
    ends = [names, read.target(results)] if names else [read.target(results)]
    return text(f"{read.title(results, results['method'])}: {' → '.join(ends)}")


def text(text: str) -> str:
    """Escape a name for matplotlib, where a dollar sign would begin a formula."""
    return read.printable(text).replace("$", r"\$")


def _scores(axes: Axes, results: read.Results) -> None:
    shown = read.measure(results)
    heading, label, number, factor, span = _AXES[shown]
    own_first = sorted(results["trainings"].items(), key=lambda item: item[0] != results["method"])
    for i, (method, trainings) in enumerate(own_first):
        colour, style = METHODS[i % len(METHODS)], _STYLES[i % len(_STYLES)]
        series = _series([t["rounds"] for t in trainings], shown, factor)
        if not series:
            continue
        means = [statistics.fmean(values) for values in series.values()]
        tested = len(trainings[0]["rounds"]) in series  # else the line ends before the last round
        last = number.format(means[-1]) if tested else "–"
        name = text(f"{read.title(results, method)}, last round: {last}")
        marker = "o" if len(series) <= _MARKED else ""
        axes.plot(
            list(series), means, style, color=colour, label=name, marker=marker, ms=3.5, lw=1.8
        )
        if len(trainings) > 1:
            low, high = map(min, series.values()), map(max, series.values())
            axes.fill_between(list(series), list(low), list(high), color=colour, alpha=0.15, lw=0)
    selected = [
        (t["selected_round"], factor * r[shown])
        for trainings in results["trainings"].values()
        for t in trainings
        for r in t["rounds"]
        if r["round"] == t.get("selected_round") and shown in r
    ]
    if selected:
        x, y = zip(*selected, strict=True)
        axes.plot(x, y, "D", mfc="none", mec="black", ms=6, lw=0, label="selected without labels")
    low, high = axes.get_ylim()
    if high - low < span:
        axes.set_ylim((low + high - span) / 2, (low + high + span) / 2)
    axes.set_title(text(heading.format(target=read.target(results))), loc="left", fontsize=11)
    axes.set_ylabel(label)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -0.13),  # below the plot, where it hides no line
        frameon=False,
        fontsize=9,
        borderpad=0,
    )


def _series(histories: list[list[dict[str, Any]]], key: str, factor: float) -> Series:
    series: Series = {}
    for history in histories:
        for entry in history:
            if key in entry:
                series.setdefault(entry["round"], []).append(factor * entry[key])
    return dict(sorted(series.items()))


def _weights(axes: Axes, results: read.Results) -> None:
    method = results["method"]
    by_round: dict[int, list[tuple[dict[str, float], set[str]]]] = {}
    for training in results["trainings"].get(method, []):
        for entry in training["rounds"]:
            pair = entry.get("weights", {}), read.others(results, training)
            by_round.setdefault(entry["round"], []).append(pair)
    means = {
        r: read.mean_weights(*zip(*pairs, strict=True)) for r, pairs in sorted(by_round.items())
    }
    name = text(read.title(results, method))
    axes.set_title(f"Weight of each site in {name}'s average", loc="left", fontsize=11)
    if not any(means.values()):
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"{name} weighs no sites", ha="center", color=GRAY)
        return
    marker = "o" if len(means) <= _MARKED else ""
    lines: list[Line2D] = []
    for site, (colour, style) in _looks(results).items():
        y = [weights.get(site, 0.0) for weights in means.values()]
        (line,) = axes.plot(
            list(means), y, style, color=colour, marker=marker, ms=3.5, lw=1.8, alpha=0.9
        )
        role = " (target)" if site in read.targets(results) else ""
        line.set_label(f"{y[-1]:.2f}  {text(site[:24])}{role}")
        if any(y):  # a target that does not train has no weight
            lines.append(line)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("weight")
    lines.sort(key=lambda line: -float(line.get_ydata()[-1]))  # type: ignore[arg-type,index]
    more = len(lines) - _LISTED
    axes.legend(
        handles=lines[:_LISTED],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
        fontsize=9,
        title="last round" + (f", {more} more below" if more > 0 else ""),
        title_fontsize=9,
        alignment="left",
    )


def _looks(results: read.Results) -> dict[str, tuple[str, str]]:
    """Colour and line style of each site; a target's line is black."""
    looks = {}
    sources = [s["name"] for s in results["sites"] if s["role"] == "source"]
    for i, site in enumerate(sources):
        style = _STYLES[i // len(SITES) % len(_STYLES)]
        looks[site] = (SITES[i % len(SITES)], style)
    black = [("black", _STYLES[(1 + i) % len(_STYLES)]) for i in range(len(read.targets(results)))]
    return looks | dict(zip(read.targets(results), black, strict=True))
