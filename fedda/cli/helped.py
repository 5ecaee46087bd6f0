"""Help whose paragraphs fit the terminal, commands of packages, and the option --version.

Typer keeps the line breaks of all paragraphs but the first. What an option means may stand in its
command's docstring, in a last part `Options:`, below the option's name in Python.
"""

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import click
import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from fedda import __version__, plugins
from fedda.cli.exits import clear_exit
from fedda.flower.supported import installed
from fedda.results.escaping import echo

SEVERAL = {"target", "seeds", "columns"}  # names of options of several values, with commas
OUTPUTS = {"--out", "--dir"}  # options that say where to write


def joined(text: str) -> str:
    """Join the lines of each paragraph; indented lines, as of examples, stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split("\n")) for p in paragraphs)


def _join(command: click.Command) -> None:
    """Join the lines of a command's help, and let it end on errors as all do (`clear_exit`)."""
    text, _, below = inspect.cleandoc(command.help or "").partition("\n\nOptions:\n")
    command.help = escape(joined(text)) or None  # fedda[clip] is no markup
    params: dict[str | None, Any] = {param.name: param for param in command.params}
    for name, told in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", below, re.MULTILINE):
        params[name].help = escape(" ".join(told.split()))
    for each in getattr(command, "commands", {}).values():
        _join(each)
    if params:
        _strict(command)
    if command.callback is not None:
        command.callback = clear_exit()(command.callback)


def _strict(command: click.Command) -> None:
    """Let a command refuse empty values, options of `SEVERAL` values that come twice, lone paths.

    An empty path would be the current folder, where a script's variable is not set. Of options
    that come twice click takes the last, silently; of one value that is what a script wants.
    """
    parse = command.parse_args
    known = {name for param in command.params for name in param.opts}

    def parse_args(ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return parse(ctx, args)
        values, left, given = command.make_parser(ctx).parse_args([*args])
        options = {"--data"} if left and Path(left[0]).exists() and "--data" in known else OUTPUTS
        if left and (meant := options & known):
            said = " or ".join(f"{name} {left[0]}" for name in sorted(meant))
            raise click.UsageError(f"{left[0]} stands alone: give it with {said}.", ctx)
        for each, count in Counter(given).items():
            said = each.opts[0] if isinstance(each, click.Option) else each.human_readable_name
            value = values[each.name]
            if "" in (value if isinstance(value, list | tuple) else [value]):
                why = "is empty: give a value, and see whether a variable of your shell is not set"
                raise click.UsageError(f"{said} {why}.", ctx)
            if count > 1 and each.name in SEVERAL:
                raise click.UsageError(f"{said} is given {count} times: write one with commas", ctx)
        return parse(ctx, args)

    command.parse_args = parse_args  # type: ignore[method-assign]


class OpenGroup(TyperGroup):
    """A group of commands to which packages add theirs: `NAME`, or `GROUP.NAME` below a group.

    They are imported when the help is asked for, or a name that fedda itself does not have.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._added = set[str]()  # names that packages gave

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name not in self.commands:
            self._add()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, in the order of the help."""
        self._add()
        return super().list_commands(ctx)

    def _add(self) -> None:
        for full, each in plugins.installed("commands").items():
            place, _, name = full.rpartition(".")
            if place != (self.name or "") or name in self._added:
                continue
            if name in self.commands:
                self._added.add(name)
                said = f"note: fedda has the command {name} itself, so that of {each.origin} is "
                echo(f"{said}left out; its package has to give it another name", err=True)
                continue
            self._added.add(name)
            added = typer.Typer()
            try:
                if isinstance(each.value, typer.Typer):
                    added.add_typer(each.value, name=name)
                else:
                    added.command(name)(each.value)
                self.commands.update(typer.main.get_group(added).commands)
                _join(self.commands[name])
            except Exception as error:  # of another package: the other commands stay
                why = f"{type(error).__name__}: {error}"
                echo(f"note: {name} of {each.origin} is left out ({why})", err=True)


class Helped(click.Command):
    """A program, which joins the lines of its help, and says its version and Flower's."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _join(self)
        click.version_option(__version__, message=f"fedda %(version)s, {installed()}")(self)


class HelpedGroup(Helped, OpenGroup):
    """A program of several commands."""


class HelpedCommand(Helped, TyperCommand):
    """A program's only command."""
