"""What sections are put together from: tables, folded tables, figures, keys of legends."""

from collections.abc import Iterable, Sequence
from typing import Any

from .html import Html, e

COLOURS = 7  # k1 to k7; k0 is the ink
DASHES = 4
NOTHING = "–"


def look(place: int) -> str:
    """Colour and line of the series at this place: by colour first, then by dashes."""
    dash = place // COLOURS % DASHES
    return f"k{1 + place % COLOURS}" + (f" d{dash}" if dash else "")


def key(css: str) -> Html:
    """A piece of a line, for a legend."""
    line = e("path", d="M0 5H26", class_=f"m {css}")
    return e("svg", line, width=26, height=10, aria_hidden="true")


def patch(place: int) -> Html:
    """A filled square, for a legend."""
    box = e("rect", width=12, height=12, rx=2, class_=f"f{place % (COLOURS + 1)}")
    return e("svg", box, width=12, height=12, aria_hidden="true")


def legend(entries: Iterable[tuple[Html, str, str]]) -> Html:
    """Keys with a name and a value each."""
    items = [
        e("li", mark, e("span", name), e("b", value) if value else None)
        for mark, name, value in entries
    ]
    return e("ul", *items, class_="legend")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: int = 1,
    styles: Sequence[str] = (),
    wrap: Iterable[int] = (),
    label: str = "",
    open_: bool = True,
) -> Html:
    """A table whose first `left` columns are text; each row begins with its heading."""
    wrapped = set(wrap)

    def css(i: int) -> str | None:
        return " ".join(filter(None, ("l" * (i < left), "wrap" * (i in wrapped)))) or None

    body = []
    for number, row in enumerate(rows):
        cells = [
            e("td" if i else "th", cell, class_=css(i), scope=None if i else "row")
            for i, cell in enumerate(row)
        ]
        style = styles[number] if number < len(styles) else ""
        body.append(e("tr", *cells, class_=style or None))
    heads = [e("th", h, class_="l" if i < left else None, scope="col") for i, h in enumerate(head)]
    made = e("table", e("thead", e("tr", *heads)), e("tbody", *body), aria_label=label or None)
    css_class = "scroll open" if open_ else "scroll"
    # What scrolls must be reachable by keyboard.
    return e("div", made, class_=css_class, tabindex=None if open_ else "0")


def folded(summary: str, *content: Any) -> Html:
    """Something that is shown when asked for."""
    return e("details", e("summary", summary), *content)


def figure(title: str, unit: str, *content: Any) -> Html:
    """A card with a heading and, at its right, what is measured in what."""
    caption = e("figcaption", e("h3", title), e("span", unit) if unit else None)
    return e("figure", caption, *content)


def section(anchor: str, title: str, *content: Any) -> Html:
    """A part of the page."""
    return e("section", e("h2", title), *content, id=anchor)


def note(*words: Any) -> Html:
    """A remark under a figure or a table."""
    return e("p", *words, class_="note")


def grid(*figures: Html | None, pairs: bool = False) -> Html | None:
    """Figures side by side, where there is room; as pairs there are never three."""
    shown = [f for f in figures if f]
    return e("div", *shown, class_="grid two" if pairs else "grid") if shown else None
