"""Mean ranks of methods over tasks, and the critical-difference picture.

Demsar, Statistical comparisons of classifiers over multiple data sets, JMLR 7 (2006), section 3.2.

    scores  (N, k)  accuracies of k methods at N tasks
    ranks   (N, k)  1 for a task's best method; equal ones share the mean of their ranks
    chi2    float   Friedman's statistic, 12 N / (k (k + 1)) (sum_j R_j^2 - k (k + 1)^2 / 4), for
                    mean ranks R_j, divided by what ties take from it
    CD      float   critical difference q sqrt(k (k + 1) / (6 N)): mean ranks that lie farther apart
                    differ by Nemenyi's test; q is the studentised range's quantile / sqrt(2)

Tasks that share their data, such as the targets of one set, are not independent, so the test finds
differences more easily than it should.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

LEVEL = 0.05
LINE = 0.34  # inches per line of the picture


def ranks(scores: np.ndarray) -> np.ndarray:
    """Rank the methods within each task, (N, k) -> (N, k)."""
    return stats.rankdata(-scores, axis=1)


def friedman(scores: np.ndarray) -> float:
    """The probability of such differences in rank if all methods are alike; needs three methods."""
    return float(stats.friedmanchisquare(*scores.T).pvalue)


def critical_difference(methods: int, tasks: int, level: float = LEVEL) -> float:
    """By how much two mean ranks must differ to be different by Nemenyi's test."""
    q = float(stats.studentized_range.ppf(1 - level, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * tasks))


def cliques(means: Sequence[float], apart: float) -> list[tuple[int, int]]:
    """The longest runs of sorted mean ranks whose ends differ by at most `apart` -> first, last."""
    found: list[tuple[int, int]] = []
    for i, low in enumerate(means):
        j = max(k for k, high in enumerate(means) if high - low <= apart)
        if j > i and not (found and found[-1][1] >= j):
            found.append((i, j))
    return found


def draw(means: Mapping[str, float], tasks: int, path: Path) -> None:
    """Write the critical-difference picture as PNG.

    Args:
        means: mean rank by method.
        tasks: over how many tasks.
        path: the file.
    """
    names = sorted(means, key=lambda n: means[n])
    values = [means[n] for n in names]
    apart = critical_difference(len(names), tasks)
    bars = cliques(values, apart)
    half = math.ceil(len(names) / 2)
    height = LINE * (half + len(bars) * 0.5 + 3.5)
    figure = Figure(figsize=(9, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    low, high = 1, len(names)
    axes.set_xlim(low - 0.42 * (high - low), high + 0.42 * (high - low))
    axes.axis("off")
    axes.hlines(0, low, high, color="black", lw=1.2)
    for tick in range(low, high + 1):
        axes.vlines(tick, 0, 0.18, color="black", lw=1)
        axes.text(tick, 0.3, str(tick), ha="center", va="bottom", fontsize=9)
    axes.hlines(1.5, low, low + apart, color="black", lw=2)
    axes.text(low + apart / 2, 1.62, f"CD = {apart:.2f}", ha="center", va="bottom", fontsize=9)
    depth = 0.5 * (len(bars) + 1)
    for i, (first, last) in enumerate(bars):
        y = -0.5 * (i + 1)
        axes.hlines(y, values[first] - 0.06, values[last] + 0.06, color="#c44", lw=4)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        left = i < half
        y = -depth - (i if left else len(names) - 1 - i) - 0.3
        edge = low - 0.05 * (high - low) if left else high + 0.05 * (high - low)
        axes.plot([value, value, edge], [0, y, y], color="#666", lw=0.9)
        text = f"{name}  {value:.1f}" if left else f"{value:.1f}  {name}"
        side = "right" if left else "left"
        axes.text(edge + (-0.1 if left else 0.1), y, text, ha=side, va="center", fontsize=9)
    axes.set_ylim(-depth - half - 0.3, 2.4)
    figure.savefig(path, format="png")
