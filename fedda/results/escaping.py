"""Texts of others (names of classes, sites, files and models) where somebody reads them.

A terminal obeys control codes, and a spreadsheet computes cells that begin as formulas do.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fedda.results.read import printable

# Where a cell begins, also for programs that take the semicolon for the end of one.
_FORMULA = re.compile(r"(^|;)(?=[=+\-@\t\r\uff1d\uff0b\uff0d\uff20])")

OUTPUT = "the output"  # where an error is of it and of no file


def visible(text: str) -> str:
    """The same lines, without control codes that a terminal would obey."""
    return "\n".join(map(printable, text.split("\n")))


def cell(value: Any) -> Any:
    """A value for a CSV file; a text that a spreadsheet would compute begins with an apostrophe."""
    return printable(_FORMULA.sub(r"\1'", value)) if isinstance(value, str) else value


def markdown(
    heads: Sequence[str], body: Sequence[Sequence[str]], numbers: bool = True
) -> list[str]:
    """A table with aligned source text; all columns but the first hold `numbers` or text."""
    rows = [[in_table(text) for text in row] for row in (heads, *body)]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        sides = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
        padded = (side(c, w) for side, c, w in zip(sides, cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    end = ":" if numbers else "-"
    rule = ["-" * widths[0], *("-" * (w - 1) + end for w in widths[1:])]
    return [line(rows[0]), line(rule), *map(line, rows[1:])]


def in_table(text: str) -> str:
    """A text as a table's cell can hold it."""
    return printable(text).replace("|", "\\|")


def echo(text: object = "", err: bool = False) -> None:
    """Print a text to the terminal."""
    typer.echo(visible(str(text)), err=err)


class Output(io.FileIO):
    """The file of a program's stream: where nobody reads on, as after `| head`, the work goes on.

    What is then written goes nowhere. A program that only shows something `ends`, as if done.
    """

    ends = False
    former: TextIO  # the stream that it takes the place of, which would else close the file

    def write(self, data: Any) -> int:
        """Write bytes."""
        try:
            return super().write(data)
        except OSError as error:
            unread(self)
            if not isinstance(error, BrokenPipeError):
                error.filename = OUTPUT
                raise
            if self.ends:
                sys.exit()
            return memoryview(data).nbytes


def outlasting(stream: TextIO) -> TextIO:
    """A stream that writes to an `Output`; one to a terminal, or of no file, stays as it is."""
    with suppress(OSError):
        if not stream.isatty():
            file = Output(stream.fileno(), "w", closefd=False)
            file.former = stream
            how = stream.encoding, stream.errors, None, bool(stream.line_buffering)
            return io.TextIOWrapper(io.BufferedWriter(file), *how)
    return stream


def unread(stream: Any) -> None:
    """Let what is still written to a stream go nowhere, as its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class PlainFormatter(logging.Formatter):
    """Lines of a log as `visible` gives them."""

    def format(self, record: logging.LogRecord) -> str:
        """Put a record into words."""
        return visible(super().format(record))


class PlainConsole(Console):
    """A console whose texts hold no control codes but its own, and that nobody need read."""

    def on_broken_pipe(self) -> None:
        """Go on without the output, where rich would end the program."""
        unread(self.file)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as ever, with the texts as `visible` gives them."""
        for part in super().render(renderable, options):
            text, style, control = part
            yield part if control or text.isprintable() else Segment(visible(text), style)
