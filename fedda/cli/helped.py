"""Help whose paragraphs fit the terminal, and the programs' option --version.

Typer keeps the line breaks of all paragraphs but the first.
"""

import inspect
from typing import Any

import click
from typer.core import TyperCommand, TyperGroup

from fedda import __version__
from fedda.flower.supported import installed


def joined(text: str) -> str:
    """Join the lines of each paragraph; indented lines, as of examples, stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split("\n")) for p in paragraphs)


def _join(command: click.Command) -> None:
    command.help = joined(command.help or "") or None
    for each in getattr(command, "commands", {}).values():
        _join(each)


def _complete(program: click.Command) -> None:
    """Join the lines of a program's help, and let it say its version and Flower's."""
    _join(program)
    click.version_option(__version__, message=f"fedda %(version)s, {installed()}")(program)


class HelpedGroup(TyperGroup):
    """A program of several commands, with --version; it joins the lines of all of them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _complete(self)


class HelpedCommand(TyperCommand):
    """A program's only command, with --version."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _complete(self)
