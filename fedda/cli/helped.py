"""Help whose paragraphs fit the terminal: typer keeps the line breaks of all but the first."""

import inspect
from typing import Any

import click
from typer.core import TyperCommand, TyperGroup


def joined(text: str) -> str:
    """Join the lines of each paragraph; indented lines, as of examples, stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split("\n")) for p in paragraphs)


def _join(command: click.Command) -> None:
    command.help = joined(command.help or "") or None
    for each in getattr(command, "commands", {}).values():
        _join(each)


class HelpedGroup(TyperGroup):
    """A group of commands; it joins the lines of all commands below it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _join(self)


class HelpedCommand(TyperCommand):
    """A program's only command."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _join(self)
