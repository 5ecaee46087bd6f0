"""Texts of others (names of classes, sites, files and models) where somebody reads them.

A terminal obeys control codes, and a spreadsheet computes cells that begin as formulas do.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fedda.results.read import printable

# Where a cell begins, also for programs that take the semicolon for the end of one.
_FORMULA = re.compile(r"(^|;)(?=[=+\-@\t\r\uff1d\uff0b\uff0d\uff20])")


def visible(text: str) -> str:
    """The same lines, without control codes that a terminal would obey."""
    return "\n".join(map(printable, text.split("\n")))


def cell(value: Any) -> Any:
    """A value for a CSV file; a text that a spreadsheet would compute begins with an apostrophe."""
    return printable(_FORMULA.sub(r"\1'", value)) if isinstance(value, str) else value


def echo(text: object = "", err: bool = False) -> None:
    """Print a text to the terminal."""
    typer.echo(visible(str(text)), err=err)


class PlainFormatter(logging.Formatter):
    """Lines of a log as `visible` gives them."""

    def format(self, record: logging.LogRecord) -> str:
        """Put a record into words."""
        return visible(super().format(record))


class PlainConsole(Console):
    """A console whose texts hold no control codes but its own."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as ever, with the texts as `visible` gives them."""
        for part in super().render(renderable, options):
            text, style, control = part
            yield part if control or text.isprintable() else Segment(visible(text), style)
