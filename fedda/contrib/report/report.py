"""`fedda report`: show a run's results as tables, page, picture and JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedda.cli.as_json import JsonOption, print_json
from fedda.results.escaping import PlainConsole, echo

PICTURE, PAGE = "report.png", "report.html"


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR")],
    png: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False)] = None,
    site: Annotated[
        list[Path] | None, typer.Option(metavar="STATE", exists=True, file_okay=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a finished run: accuracy of method and baseline, sites' weights, bytes and troubles.

    Writes all of it, round by round, into one HTML file that needs nothing else, and draws the
    accuracy and the weights as a PNG.

      fedda report runs/kd3a

      fedda report runs/kd3a --json --png kd3a.png

      fedda report runs/kd3a --site ~/.local/state/fedda/clinic-a

    Options:
        directory: A run's folder, the one with results.json.
        png: Where the picture goes. Default: DIR/report.png.
        html: Where the page goes. Default: DIR/report.html.
        site: A site's --state-dir on this machine, whose notes of the run (features, confusion
            matrix) go into the page; may be given more than once. The notes of a simulation and of
            the demo are found in DIR.
    """
    present(directory, png, as_json, html, site or ())


def present(
    folder: Path,
    png: Path | None = None,
    as_json: bool = False,
    html: Path | None = None,
    sites: Sequence[Path] = (),
) -> None:
    """Print a run's results, draw their picture and write their page.

    Raises:
        RunError: the folder holds no results, a file cannot be written, or a site's folder holds
            no notes of the run.
    """
    from fedda.results.read import load, summary
    from fedda.results.terminal import table

    results = load(folder)
    if as_json:
        print_json(summary(results))
    else:
        PlainConsole().print(table(results))
    place = folder if folder.is_dir() else folder.parent
    finished(results, place, png, html, sites, as_json)


def finished(
    results: dict[str, Any],
    place: Path,
    png: Path | None = None,
    html: Path | None = None,
    sites: Sequence[Path] = (),
    aside: bool = False,
) -> None:
    """Draw the picture of a run and write its page, as is done at a run's end.

    Args:
        results: the content of results.json.
        place: the run's folder.
        png: where the picture goes, by default into the folder.
        html: where the page goes, by default into the folder.
        sites: sites' state folders, whose notes the page shows.
        aside: say where they are on the standard error.

    Raises:
        RunError: a file cannot be written, or a site's folder holds no notes of the run.
    """
    from fedda.contrib.report.page import write
    from fedda.contrib.report.picture import plot  # it imports matplotlib, which takes a second

    picture = plot(results, png or place / PICTURE)
    echo(f"picture: {picture}", err=aside)
    page = write(results, html or place / PAGE, place, sites)
    echo(f"page: {page}", err=aside)
