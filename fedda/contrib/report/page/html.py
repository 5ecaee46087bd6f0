"""HTML and SVG elements. A value that is not an `Html` made here is escaped as text."""

import html
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
