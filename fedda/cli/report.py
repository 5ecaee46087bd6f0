"""`fedda report`: what a run found, as tables, as a picture and as JSON."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedda.cli.exits import clear_exit

PICTURE = "report.png"


def report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, the one with results.json.")
    ],
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help=f"Where the picture goes. Default: DIR/{PICTURE}."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON instead of tables.")
    ] = False,
) -> None:
    """Show a finished run: accuracy beside the baseline's, sites' weights, bytes and troubles.

    Draws the same over the rounds, as a PNG.

      fedda report runs/kd3a

      fedda report runs/kd3a --json --png kd3a.png
    """
    with clear_exit():
        present(directory, png, as_json)


def present(folder: Path, png: Path | None = None, as_json: bool = False) -> None:
    """Print a run's results and draw their picture.

    Raises:
        RunError: the folder holds no results, or the picture cannot be written.
    """
    from rich.console import Console

    from fedda.plot import plot  # matplotlib takes a second to import, and --help should not
    from fedda.report import table
    from fedda.results import load, summary

    results = load(folder)
    if as_json:
        typer.echo(json.dumps(summary(results), indent=1))
    else:
        Console().print(table(results))
    picture = plot(results, png or (folder if folder.is_dir() else folder.parent) / PICTURE)
    typer.echo(f"picture: {picture}", err=as_json)
