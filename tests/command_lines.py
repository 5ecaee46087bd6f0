"""Reads fedda's command lines as the programs would, without running them; or runs them here."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import typer
from click.testing import Result
from typer.testing import CliRunner

from fedda import cli
from fedda.cli.client import app as client_app
from fedda.settings import overrides


@cache
def whole(program: str) -> click.Command:
    """All commands of a program."""
    return typer.main.get_command({"fedda": cli.app, "fedda-client": client_app}[program])


def call(*words: object, code: int | None = 0, columns: int = 0) -> Result:
    """Run `fedda WORDS` in this process; it has to end with this code, or with any if it is None.

    Args:
        words: as they are typed.
        code: how the command has to end.
        columns: of the terminal; 0 for as many as there are.
    """
    env = {"COLUMNS": str(columns)} if columns else None
    done = CliRunner().invoke(cli.app, [str(word) for word in words], env=env)
    assert code is None or done.exit_code == code, done.output
    return done


def below(command: click.Command) -> dict[str, click.Command]:
    """The commands of a group by name, those too that packages add; of none, nothing."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: each for name, each in found.items() if each is not None}


def parse(words: list[str]) -> dict[str, Any]:
    """Read a command line as the program would, without running it -> its parameters.

    Raises:
        click.UsageError: the program would refuse the command line.
        ConfigError: the command line changes a setting that does not exist.
    """
    program, *rest = words
    command: Any = whole(program)
    while known := below(command):
        name, *rest = rest
        if name not in known:
            raise click.UsageError(f"no command {name}")
        command = known[name]
    for option in command.params:
        if isinstance(option.type, click.Path):
            option.type.exists = False  # the files are on another machine
    params = command.make_context(program, rest).params
    if "change" in params:
        overrides(params["method"], list(params["change"] or ()))
    return {k: Path(v) if str(v).startswith("/") else v for k, v in params.items()}


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield all fedda commands in a shell script, a code block, or a compose file's comments."""
    text = re.sub(r"\\\n#?", " ", text)
    for line in text.splitlines():
        line = re.sub(r"\brun --rm keys ", "fedda keys ", line)
        line = re.sub(r"[`;]|\|\||&&", " ; ", line)
        for part in line.split(" ; "):
            found = re.search(r"(?:^|\s|bin/)(fedda(?:-client)? [a-z-].*)", part)
            if found and not re.search(r"docker (build|run|image)", line):
                words = shlex.split(found[1].replace("...", ""), comments=True)
                yield list(takewhile(lambda word: word not in ("<", ">"), words))


def blocks(markdown: str) -> str:
    """Return the text of all blocks of shell commands."""
    return "\n".join(re.findall(r"```bash\n(.*?)```", markdown, re.DOTALL))
