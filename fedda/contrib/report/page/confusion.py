"""The target's confusion matrix: rows are true classes, columns are predicted classes.

Its exact counts are in the target's notes, if these are on this machine; what its last tests
told of the classes, in tens, is in the results.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedda.results.read import answers, in_tens

from .html import Html, e, n
from .noted import Noted
from .parts import figure, folded, grid, note, table
from .series import RunSeries

CELLS = 20  # classes up to which the matrix is drawn with numbers
TABLE = 60  # classes up to which all counts are in a table
WORST = 6
SHADES = 8

Counts = NDArray[np.float64]


def confusions(run: RunSeries, noted: Noted) -> Html | None:
    """Draw a figure per method and target, for the last round."""
    figures = [
        _one(run, {} if which == "refined" else noted.confusions(m, t), m, t, which)
        for m in run.methods
        for t in run.targets
        for which in ("last", "refined")
    ]
    return grid(*figures, pairs=True)


def _one(
    run: RunSeries,
    by_seed: dict[str, tuple[list[str], NDArray[np.int64]]],
    method: str,
    target: str,
    which: str,
) -> Html | None:
    tens = False
    if not by_seed:
        told = answers(run.results, method, which, target)
        names = list(run.results.get("classes", ()))
        by_seed = {seed: (names, np.array(each["counts"])) for seed, each in told.items()}
        tens = in_tens(told.values())
    if not any(counts.any() for _, counts in by_seed.values()):
        return None
    classes = next(iter(by_seed.values()))[0]
    same = {seed: counts for seed, (names, counts) in by_seed.items() if names == classes}
    counts = np.mean(list(same.values()), axis=0)
    seeds = ", ".join(same)
    over = f"mean of seeds {seeds}" if len(same) > 1 else f"seed {seeds}"
    total = counts.sum()
    right = 100 * counts.trace() / total if total else 0
    # Shares of each row, so that a rare class is as visible as a common one.
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    picture = _cells(classes, counts, shares) if len(classes) <= CELLS else _map(classes, shares)
    rows = [[name, *map(_count, row)] for name, row in zip(classes, counts, strict=True)]
    numbers = table(["class", *classes], rows, label="Counts by class and prediction", open_=False)
    return figure(
        f"{run.short(method)}: test at {target}, {which.replace('last', 'last round')}",
        f"% of each class, {over}",
        e("div", picture, class_="wide"),
        note(
            f"{right:.1f} % of {_count(total)} correct. {_worst(classes, counts, shares)}"
            + " Counts are in tens, as they left the site; fewer than 10 count as none." * tens
        ),
        folded("Counts", numbers) if len(classes) <= TABLE else None,
    )


def _count(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")  # a mean over seeds may be between two counts


def _cells(classes: Sequence[str], counts: Counts, shares: Counts) -> Html:
    rows = []
    for i, name in enumerate(classes):
        cells = [e("th", name, title=name, scope="row")]
        for j, share in enumerate(shares[i]):
            css = ["hi"] if share > 0.55 else []
            css += ["diag"] if i == j else []
            css += ["none"] if counts[i, j] == 0 else []
            said = f"{name} predicted as {classes[j]}: {_count(counts[i, j])}, {100 * share:.1f} %"
            shown = f"{100 * share:.0f}"
            style = f"--v:{n(share * 100)}%"
            cells.append(e("td", shown, title=said, class_=" ".join(css) or None, style=style))
        rows.append(e("tr", *cells))
    corner = e("th", "true ↓ predicted →", class_="soft")
    head = e("tr", corner, *(e("th", c, title=c, scope="col") for c in classes))
    return e(
        "table", e("thead", head), e("tbody", *rows), class_="heat", aria_label="Confusion matrix"
    )


def _map(classes: Sequence[str], shares: Counts) -> Html:
    """Draw the matrix without numbers: one path per shade, over the cells that are not empty."""
    size = len(classes)
    shades: dict[int, list[str]] = {}
    for i, j in zip(*np.nonzero(shares), strict=True):
        shade = min(SHADES, 1 + int(shares[i, j] * SHADES))
        shades.setdefault(shade, []).append(f"M{j} {i}h1v1h-1z")
    paths = [
        e("path", d="".join(parts), style=f"fill:rgb(var(--heat)/{n(100 * shade / SHADES)}%)")
        for shade, parts in sorted(shades.items())
    ]
    art = e(
        "svg",
        *paths,
        view_box=f"0 0 {size} {size}",
        role="img",
        aria_label=f"Confusion matrix of {size} classes: rows true, columns predicted",
    )
    return e("div", art, class_="square")


def _worst(classes: Sequence[str], counts: Counts, shares: Counts) -> str:
    """Write the most frequent errors in words."""
    off = counts * (1 - np.eye(len(classes)))
    order = np.argsort(-off, axis=None, kind="stable")[:WORST]
    pairs = [(int(k) // len(classes), int(k) % len(classes)) for k in order if off.flat[k] > 0]
    said = [f"{classes[i]} as {classes[j]} ({_count(counts[i, j])})" for i, j in pairs]
    return f"Most frequent errors: {', '.join(said)}." if said else ""
