"""What never leaves a site, from the notes that are on this machine: confusion and features.

A confusion matrix has a row for each true class and a column for each predicted one. Its exact
counts are in the target's notes; what its last tests told of the classes, in tens, is in the
results. Features are points in 2D, of all sites with notes, before and after.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedda.maths.embed import tsne
from fedda.results.read import answers, in_tens

from .html import COLOURS, Html, e, figure, folded, grid, join, legend, n, note, section, table
from .noted import FIRST, LAST, Features, Noted
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


MOST = 1000  # most points of one embedding; t-SNE of more is slow
KEYS = 28  # most entries of a legend: the number of different marks


@dataclass(frozen=True)
class Cloud:
    """Points in a square of 100, each with its site and its class (-1: unknown)."""

    points: NDArray[np.float64]  # (N, 2)
    sites: list[str]
    labels: NDArray[np.int64]
    heading: str


def features(run: RunSeries, noted: Noted) -> Html | None:
    """Draw features before and after, by domain and by class, for the first seed with notes."""
    seed = next((s for s in run.labels if noted.features(run.own, s, LAST)), None)
    if seed is None:
        return None
    after = noted.features(run.own, seed, LAST)
    before, heading = _before(run, noted, seed)
    classes = [str(name) for name in run.results.get("classes", [])]
    clouds = [_cloud(before, heading)] if before else []
    clouds.append(_cloud(after, f"{run.short(run.own)}, last round"))
    figures = [_by_domain(run, c) for c in clouds] + [_by_class(c, classes) for c in clouds]
    missing = sorted({s["name"] for s in run.results["sites"]} - {f.site for f in after})
    words = (
        f"t-SNE of at most {MOST:,} features, all sites together, seed {seed}; distances between "
        "far groups mean little. Sources: training examples under the model they received; "
        f"{run.labels[seed]}: training examples without labels, and test examples with labels, "
        "under the model that was tested after the round."
    )
    if missing:
        words += f" No notes of {', '.join(missing[:12])}{' and others' * (len(missing) > 12)}."
    return join(grid(*figures, pairs=True), note(words))


def dictionary(run: RunSeries, noted: Noted) -> Html | None:
    """Draw the barycenter of the target's atoms, and the distilled set, over its own points."""
    seed = next((s for s in run.labels if noted.dictionary(run.own, s)), None)
    content = noted.dictionary(run.own, seed) if seed else None
    if seed is None or content is None:
        return None
    sets = [content.points, content.barycenter, content.distilled]
    points = _square_points(np.concatenate(sets))
    target, barycenter, distilled = np.split(points, np.cumsum([len(s) for s in sets])[:-1])
    classes = [str(name) for name in run.results.get("classes", [])]
    figures, mine = [], f"{run.labels[seed]}, training examples"
    for heading, made, labels in (
        ("Barycenter over the target", barycenter, content.barycenter_labels),
        ("Distilled set over the target", distilled, content.distilled_labels),
    ):
        drawn, named = _of_classes(made, labels, classes)
        parts = [_marks(target, -1, mine, faded=True), *drawn]
        entries = [(_key(-1), f"{run.labels[seed]} (target)", ""), *named][:KEYS]
        figures.append(_square(heading, parts, entries, f"{heading}, by class"))
    words = (
        f"t-SNE of {run.labels[seed]}'s features, of the support of B(alpha; atoms), and of "
        f"{len(distilled)} distilled samples, together; seed {seed}, last round. Made at the "
        "target, from its own coordinates."
    )
    return join(grid(*figures, pairs=True), note(words))


def last_step(run: RunSeries, noted: Noted) -> Html | None:
    """Draw the points of the target's last step by its answers, with those marked that changed."""
    seed = next((s for s in run.labels if noted.last_step(run.own, s)), None)
    step = noted.last_step(run.own, seed) if seed else None
    if seed is None or step is None:
        return None
    points = _square_points(step.points)
    classes = [str(name) for name in run.results.get("classes", [])]
    parts, entries = _of_classes(points, step.after, classes)
    changed = points[step.before != step.after]
    ring = "".join(f"M{n(x - 1.6)} {n(100 - y)}a1.6 1.6 0 1 1 0 0.01" for x, y in changed)
    title = e("title", f"changed: {len(changed)} examples")
    parts.append(e("path", title, d=ring, class_="k0 thin"))
    heading = "The target's last step: its answers"
    drawn = _square(heading, parts, entries[:KEYS], f"{heading}, {len(changed)} changed")
    words = (
        f"t-SNE of the points in which the last step of {run.labels[seed]} has a Gaussian for each "
        f"class: {len(points)} of its examples without labels, {run.short(run.own)}, seed {seed}. "
        f"The colour is the class that the refined model gives, {len(changed)} answers with a ring "
        "are others than before."
    )
    return join(grid(drawn, pairs=True), note(words))


def _before(run: RunSeries, noted: Noted, seed: str) -> tuple[list[Features], str]:
    for method in run.methods[1:]:
        if before := noted.features(method, seed, LAST):
            return before, f"{run.title(method)}, last round"
    return noted.features(run.own, seed, FIRST), f"{run.short(run.own)}, first round"


def _cloud(site_features: Sequence[Features], heading: str) -> Cloud:
    each = max(2, MOST // len(site_features))
    parts, labels, sites = [], [], []
    for f in site_features:
        chosen = np.unique(np.linspace(0, len(f.z) - 1, min(each, len(f.z))).round().astype(int))
        parts.append(f.z[chosen])
        labels.append(f.labels[chosen])
        sites += [f.site] * len(chosen)
    points = _square_points(np.concatenate(parts))
    return Cloud(points, sites, np.concatenate(labels), heading)


def _square_points(z: NDArray[np.floating]) -> NDArray[np.float64]:
    """Embed features in a square of 100."""
    points = tsne(z)
    low, high = points.min(axis=0), points.max(axis=0)
    side = max(float((high - low).max()), 1e-12)
    return 50 + 94 * (points - (low + high) / 2) / side


def _by_domain(run: RunSeries, cloud: Cloud) -> Html:
    sources = {site: i for i, site in enumerate(run.sources)}
    present = [s for s in [*run.sources, *run.targets] if s in set(cloud.sites)]
    parts, entries = [], []
    for site in present:
        mark = sources.get(site, -1)
        mine = cloud.points[[s == site for s in cloud.sites]]
        name = f"{site} (target)" if site in run.targets else site
        parts.append(_marks(mine, mark, name))
        if len(entries) < KEYS:
            entries.append((_key(mark), name, ""))
    said = f"{cloud.heading}: features of {len(present)} sites"
    return _square(f"{cloud.heading}, by domain", parts, entries, said)


def _by_class(cloud: Cloud, classes: Sequence[str]) -> Html:
    unknown = cloud.points[cloud.labels < 0]
    drawn, named = _of_classes(cloud.points, cloud.labels, classes)
    parts = [_marks(unknown, -1, "target, training examples without labels", faded=True), *drawn]
    entries = named[:KEYS] + [(_key(-1), "no label", "")] * bool(len(unknown))
    said = f"{cloud.heading}: features of {len(entries)} classes"
    return _square(f"{cloud.heading}, by class", parts, entries, said)


def _of_classes(
    points: NDArray[np.float64], labels: NDArray[np.int64], classes: Sequence[str]
) -> tuple[list[Html], list[tuple[Html, str, str]]]:
    """The points of each class with its colour, and the classes for a legend."""
    there = sorted({int(x) for x in labels if 0 <= x < len(classes)})
    parts = [_marks(points[labels == label], label, classes[label]) for label in there]
    return parts, [(_key(label), classes[label], "") for label in there]


def _square(
    heading: str,
    parts: Sequence[Html],
    entries: Sequence[tuple[Html, str, str]],
    said: str,
) -> Html:
    art = e("svg", *parts, view_box="0 0 100 100", role="img", aria_label=said)
    framed = e("div", art, class_="square")
    return figure(heading, "t-SNE, no units", framed, legend(entries))


def _look(mark: int) -> tuple[str, str]:
    """Return colour and shape of a site or class by its number; -1 is the text colour."""
    if mark < 0:
        return "k0", ""
    return f"k{1 + mark % COLOURS}", ("", "q", "thin plus", "thin cross")[mark % 4]


def _shape(shape: str, x: float, y: float, r: float = 0.8) -> str:
    if shape == "thin plus":
        return f"M{n(x - r)} {n(y)}h{n(2 * r)}M{n(x)} {n(y - r)}v{n(2 * r)}"
    if shape == "thin cross":
        d = n(2 * r)
        return f"M{n(x - r)} {n(y - r)}l{d} {d}M{n(x - r)} {n(y + r)}l{d} -{d}"
    return f"M{n(x)} {n(y)}h0"


def _marks(points: NDArray[np.float64], mark: int, name: str, faded: bool = False) -> Html:
    colour, shape = _look(mark)
    drawn = "".join(_shape(shape, float(x), 100 - float(y)) for x, y in points)
    css = f"{colour} {shape}{' faded' * faded}".strip()
    return e("path", e("title", f"{name}: {len(points)} examples"), d=drawn, class_=css)


def _key(mark: int) -> Html:
    colour, shape = _look(mark)
    drawn = _shape(shape, 6, 6, 4)
    style = (
        None
        if "thin" in shape
        else f"stroke-width:8;stroke-linecap:{'square' if shape else 'round'}"
    )
    line = e("path", d=drawn, class_=f"{colour} {shape}".strip(), style=style)
    return e("svg", line, width=12, height=12, aria_hidden="true")


def inside(run: RunSeries, noted: Noted) -> Html:
    """Make the section of what never leaves a site, from the notes that are on this machine."""
    matrices, clouds = confusions(run, noted), features(run, noted)
    explained = dictionary(run, noted)
    missing = None
    if not (matrices or clouds):
        missing = note(
            "Not shown, because features and exact confusion matrices never leave a site. Each "
            "site writes its own under its --state-dir; on a machine that holds such a folder, "
            "add it with fedda report RUN --site DIR."
        )
    elif not matrices:
        missing = note(
            "No confusion matrix: it is in the target's notes, if it has labelled tests."
        )
    elif not clouds:
        missing = note("No features: the notes have no features of the last round.")
    problems = [note(f"Left out: {problem}.") for problem in dict.fromkeys(noted.problems)]
    parts = [matrices, clouds, last_step(run, noted), explained, missing, *problems]
    return section("inside", "Confusion and features", *parts)
