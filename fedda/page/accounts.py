"""A page of its own: what sites tell of their data (`fedda look`)."""

from collections.abc import Mapping
from typing import Any

from fedda.maths.summaries import BINS, FLOOR, LEAST
from fedda.results.read import counted, human

from .axes import SIZE, axis, drawing, frame_over
from .html import Html, e, n
from .page import document
from .parts import NOTHING, figure, grid, key, legend, look, note, section, table

MOST = 12  # columns that are drawn

Site = Mapping[str, Any]


def page(seen: Mapping[str, Any], command: str) -> str:
    """Return the whole document.

    Args:
        seen: what `fedda look` writes as JSON.
        command: what to type next; empty if no run is possible.
    """
    names = [site["name"] for site in seen["sites"]]
    head, *sites = rows(seen)
    refused = [[name, why] for name, why in seen["refused"].items()]
    crossed = [[name, human(size)] for name, size in seen["bytes"].items()]
    return document(
        f"What the data of {', '.join(names)} look like",
        e("h1", f"{counted(len(names), 'site')} before training"),
        e("p", seen["text"]),
        e("p", "Next: ", e("code", command)) if command else None,
        section("sites", "Sites", table(head, sites, label="Sites", left=2)),
        section("refused", "Who told nothing", table(["site", "why"], refused, left=2))
        if refused
        else None,
        section("drift", "Drift", _drift(seen, names), note(DRIFT)),
        section("values", "Values", _values(seen["sites"]), note(VALUES)),
        section("bytes", "What crossed", table(["what", "bytes"], crossed, label="Bytes")),
    )


DRIFT = (
    "Root mean square, over features, of the difference of two sites' means in units of their "
    "deviation: 0 is alike, 1 is a deviation apart. Features are a table's columns, or brightness "
    "and edges of gray images on a grid of 4 x 4 cells. Labels have no part in it."
)
VALUES = (
    f"Of {LEAST} examples or more, as they left the sites: a bin that fewer than {FLOOR} examples "
    "reach is empty, and ends hold all beyond them. Images are reduced to 32 pixels a side."
)


def rows(seen: Mapping[str, Any]) -> list[list[str]]:
    """The table of the sites: its heads, and a row per site."""
    head = ["site", "role", "examples", "form", "values", "gaps", "classes"]
    made, target = [_row(site) for site in seen["sites"]], seen["target"]
    if target:
        head.append(f"drift to {target}")
        place = [row[0] for row in made].index(target)
        for row, drift in zip(made, seen["drift"], strict=True):
            row.append(_text(drift[place]))
    return [head, *made]


def _row(site: Site) -> list[str]:
    shape, its = site["shape"], site["arrays"]
    form = f"{shape[0]} columns"
    if site["kind"] == "image":
        size = f"{shape[2]} x {shape[1]}" if shape[1] else "several sizes"
        form = f"{'colour' if shape[0] == 3 else 'gray'}, {size}"
    values = f"{min(its['low']):.3g} to {max(its['high']):.3g}" if its else NOTHING
    gaps = f"{100 * max(its['missing']):.0f} %" if its else NOTHING
    counts = [*site["classes"].values()]
    classes = f"{len(counts)}, {min(counts)}+ to {max(counts)}+" if counts else NOTHING
    examples = f"{site['examples']}+" if site["examples"] else f"fewer than {FLOOR}"
    return [site["name"], site["role"], examples, form, values, gaps, classes]


def _text(drift: float | None) -> str:
    return NOTHING if drift is None else f"{drift:.2f}"


def _drift(seen: Mapping[str, Any], names: list[str]) -> Html:
    """Draw the drift between every two sites, dark where it is large."""
    body = []
    for name, row in zip(names, seen["drift"], strict=True):
        cells = [e("th", name, scope="row")]
        for value in row:
            shade = 0 if value is None else min(100, 100 * value)
            cells.append(
                e("td", _text(value), class_="hi" * (shade > 55), style=f"--v:{n(shade)}%")
            )
        body.append(e("tr", *cells))
    head = e("tr", e("th", ""), *(e("th", name, scope="col") for name in names))
    made = e("table", e("thead", head), e("tbody", *body), class_="heat", aria_label="Drift")
    return figure("Drift between sites", "deviations", e("div", made, class_="wide"))


def _values(sites: list[Site]) -> Html | None:
    """Draw histograms: a figure per channel or column, a line per site."""
    told = [site for site in sites if site["arrays"]]
    most = max((site["shape"][0] for site in told), default=0)
    return grid(*(_column(c, sites) for c in range(min(most, MOST))))


def _column(c: int, sites: list[Site]) -> Html | None:
    lines = {}
    for place, site in enumerate(sites):
        its = site["arrays"]
        if its and c < site["shape"][0] and any(its["share"][c]):
            ends = (0.0, 1.0) if site["kind"] == "image" else (its["low"][c], its["high"][c])
            lines[place] = (ends, its["share"][c])
    if not lines:
        return None
    begin, end = min(a for (a, _), _ in lines.values()), max(b for (_, b), _ in lines.values())
    wide = end - begin or 1.0
    low, high, ticks = axis(0, 100 * max(max(s) for _, s in lines.values()), 0, None)

    def path(place: int) -> Html:
        (a, b), shares = lines[place]
        steps = [SIZE * (a + i * (b - a) / BINS - begin) / wide for i in range(BINS + 1)]
        tops = [SIZE * (1 - 100 * share / high) for share in shares]
        d = "".join(
            f"L{n(x)} {n(y)}H{n(x2)}" for x, x2, y in zip(steps, steps[1:], tops, strict=False)
        )
        return e("path", d=f"M{n(steps[0])} {SIZE}{d}V{SIZE}", class_=f"m {look(place)}")

    names = {place: sites[place]["name"] for place in lines}
    first = sites[min(lines)]
    what = f"channel {c + 1}" if first["kind"] == "image" else first["columns"][c]
    said = f"Histogram of {what} at {', '.join(names.values())}."
    art = drawing(low, high, ticks, *map(path, lines), said=said)
    plot = frame_over(art, low, high, ticks, {}, f"{begin:.3g} to {end:.3g}")
    keys = [(key(look(place)), name, "") for place, name in names.items()]
    return figure(what, "% of values", plot, legend(keys))
