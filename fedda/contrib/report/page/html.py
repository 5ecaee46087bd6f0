"""HTML and SVG elements, and what sections are built of: tables, folded ones, figures, legends.

A value that is not an `Html` made here is escaped as text.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from fedda.results.read import printable

VOID = {"meta", "rect", "path", "line", "circle"}


class Html(str):
    """Markup that is safe as it is."""


def text(value: Any) -> Html:
    """Return a value as markup: text is escaped and loses characters that cannot be printed."""
    if isinstance(value, Html):
        return value
    words = str(value)
    words = words if words.isprintable() else printable(words)
    return Html(html.escape(words, quote=True))


def e(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element; `class_` is the attribute class, `view_box` is viewBox, `x_y` is x-y."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = "viewBox" if key == "view_box" else key.rstrip("_").replace("_", "-")
        key = "preserveAspectRatio" if key == "aspect" else key
        parts.append(key if value is True else f'{key}="{text(value)}"')
    opened = " ".join(parts)
    if name in VOID and not children:
        return Html(f"<{opened}>" if name == "meta" else f"<{opened}/>")
    return Html(f"<{opened}>{join(*children)}</{name}>")


def join(*children: Any) -> Html:
    """Join children in order; None is left out."""
    return Html("".join(text(child) for child in children if child is not None))


def n(value: float) -> str:
    """Write a coordinate with one decimal, or none if that is a zero."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


COLOURS = 7  # k1 to k7; k0 is the text colour
DASHES = 4
NOTHING = "–"


def look(place: int) -> str:
    """Return colour and dashes of a series by its number: colours change first, then dashes."""
    dash = place // COLOURS % DASHES
    return f"k{1 + place % COLOURS}" + (f" d{dash}" if dash else "")


def key(css: str) -> Html:
    """Make a piece of a line, for a legend."""
    line = e("path", d="M0 5H26", class_=f"m {css}")
    return e("svg", line, width=26, height=10, aria_hidden="true")


def card(what: str, big: Any, small: Any, css: str = "card") -> Html:
    """Make a card with one large word or number, and what it is."""
    return e("div", e("span", what, class_="what"), e("b", big), e("span", small), class_=css)


def legend(entries: Iterable[tuple[Html, str, str]]) -> Html:
    """Make a legend: keys with a name and a value each."""
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
    """Make a table whose first `left` columns are text; each row begins with its heading."""
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
    # What scrolls must be reachable by keyboard; on a phone, every wide table scrolls in its box.
    return e("div", made, class_=css_class, tabindex="0")


def folded(summary: str, *content: Any) -> Html:
    """Make content that is hidden until the reader opens it."""
    return e("details", e("summary", summary), *content)


def figure(title: str, unit: str, *content: Any) -> Html:
    """Make a card with a heading and, at its right, the unit."""
    caption = e("figcaption", e("h3", title), e("span", unit) if unit else None)
    return e("figure", caption, *content)


def section(anchor: str, title: str, *content: Any) -> Html:
    """Make a part of the page."""
    return e("section", e("h2", title), *content, id=anchor)


def note(*words: Any) -> Html:
    """Make a remark under a figure or a table."""
    return e("p", *words, class_="note")


def grid(*figures: Html | None, pairs: bool = False) -> Html | None:
    """Put figures side by side if there is room; with `pairs`, at most two in a row."""
    shown = [f for f in figures if f]
    return e("div", *shown, class_="grid two" if pairs else "grid") if shown else None
