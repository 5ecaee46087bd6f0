"""`fedda logs`: the last lines of a site's own log, where the site lets them leave."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from fedda.cli.as_json import JsonOption, print_json
from fedda.cli.exits import clear_exit, interruptible
from fedda.cli.launch import on_server, on_terminate
from fedda.library.beginning import Launch
from fedda.results.plainly import echo
from fedda.results.read import LOOKED, printable
from fedda.settings import RunConfig


def logs(
    site: Annotated[str, typer.Argument(metavar="SITE", help="The site's registered name.")],
    server: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder that `fedda superlink` was given as --dir."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the last lines of a site's log that the site lets leave.

      fedda logs clinic-b --server ./hub

    A site tells them only if its policy has leaving.logs = true. They say what its program does and
    where it warned or failed, without anything that was put into its messages: no name of a file,
    class or column, and no value. The whole log stays with the site's operator.
    """
    on_terminate()
    with clear_exit(), interruptible("stopped"), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "logs"
        flat = {"run.logs": site, "run.dir": scratch, "run.name": folder.name}
        config = RunConfig.parse(flat)
        on_server(config, Launch(server=str(server.absolute())), folder, lambda event: None)
        lines = json.loads((folder / LOOKED).read_text())["text"].splitlines()
        if as_json:
            return print_json({"site": site, "lines": lines})
        for line in lines:
            echo(printable(line))
