"""`fedda runs`: the runs of a folder, the newest first."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedda.cli.as_json import JsonOption, print_json
from fedda.errors import FeddaError, RunError
from fedda.ops.lock import holder
from fedda.results import read
from fedda.results.escaping import PlainConsole


def runs(
    directory: Annotated[Path, typer.Option("--dir", file_okay=False)] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs of a folder, the newest first.

    Options:
        directory: Folder of all runs.
    """
    if not directory.is_dir():
        raise RunError(f"{directory} is no folder; give the folder of the runs by --dir")
    places = [p for p in directory.iterdir() if (p / read.JOURNAL).is_file()]
    places.sort(key=lambda p: (p / read.JOURNAL).stat().st_mtime, reverse=True)
    found = [_of(place) for place in places]
    if as_json:
        return print_json({"runs": found})
    shown = Table("run", "method", "target", "state", "accuracy", "refined", box=None)
    for each in found:
        scores = (read.percent(each[key]) for key in SCORES)
        shown.add_row(*(read.printable(str(each[key])) for key in KEYS), *scores)
    PlainConsole().print(shown if found else f"{directory} holds no runs")


KEYS, SCORES = ("name", "method", "target", "state"), ("accuracy", "refined")


def _of(place: Path) -> dict[str, Any]:
    """What is known of a run."""
    about = {"name": place.name, **dict.fromkeys((*KEYS[1:], *SCORES))}
    try:
        results = read.load(place)
    except FeddaError:
        started = read.noted(place / "launch.json")
        config = started.get("settings", {})
        joined = read.noted(place / "roster.json").get("nodes", ())
        state = "stopped" if joined else "not begun"
        state = "going on" if holder(place) else state
        target = started.get("target") or config.get("run.target", "")
        found = [site["name"] for site in joined if site["role"] == "target"]
        target = target or ", ".join(found)
        return about | {"method": config.get("method", ""), "target": target, "state": state}
    return about | {
        "method": results["method"],
        "target": read.target(results),
        "state": "finished",
        "accuracy": results.get("final_accuracy"),
        "refined": results.get("refined_accuracy"),
    }
