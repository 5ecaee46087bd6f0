"""`fedda select`: measure from whom a target should learn, without adapting it."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fedda import plugins
from fedda.cli.as_json import JsonOption, print_json
from fedda.cli.exits import interruptible
from fedda.cli.launch import on_terminate
from fedda.errors import ConfigError, typed
from fedda.halves import load
from fedda.results.escaping import PlainConsole, echo
from fedda.settings import RunConfig, overrides, presets

METHOD = "fruda"


def select(
    data: Annotated[Path, typer.Option(metavar="ROOT")],
    target: Annotated[str, typer.Option(metavar="NAME")],
    change: Annotated[list[str] | None, typer.Option("-c", metavar="KEY=VALUE")] = None,
    preset: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure from which domain a target should learn, by FRUDA's bound (OCS).

      fedda data digits ./digits --train 300

      fedda select --data ./digits --target fonts
      -c input.size=16 -c input.channels=1

    Each other domain of ROOT trains a model on its own labels, for fruda.pretrain
    rounds. Then each of them measures with the target how far apart they are.
    Nothing is adapted, and nothing is kept on disk. A row per candidate says:

      eps     error of its model on its own data, 0 to 1; small is good
      theta   how fast its classifier can change with the features; small is good
      W1      distance between its features and the target's, by its model,
              ± how far two halves of the data disagree
      bound   sqrt(2) (eps + 2 theta W1); the smallest bound is chosen

    If bounds differ by less than W1's error explains, the choice is a guess.
    More sums measure better (-c measure.steps=300), and train.lipschitz keeps
    theta small. -c select=pad measures the proxy A-distance instead.

    `fedda run fruda` does the same before it adapts each target. A method with
    several sources, such as mdan, can take the best ones by -c run.sources=A,B;
    FRUDA's authors found fewer to be better than all. Exit code 0
    means that a table was printed, 1 that it could not, 130 that it was stopped.

    Options:
        data: Folder with one folder or .npz file per domain.
        target: Domain to take as the target, without its labels.
        change: Change a setting; see `fedda settings`.
        preset: Named settings; `fedda settings --presets` lists them.
        seed: Seed of every random draw.
        threads: CPU threads of each site.
    """
    on_terminate()
    if "," in target:
        raise ConfigError(
            f"--target is '{target}', but one target is measured at a time; for a chain of "
            "targets use fedda run fruda --simulate ROOT --target NAME,NAME."
        )
    with interruptible("stopped"), tempfile.TemporaryDirectory(prefix="fedda-select-") as at:
        config = settings(change or [], preset or [], seed, at)
        selection = measured(config, data, target, threads, as_json)
    if as_json:
        print_json(selection)
    else:
        show(selection, target)
        where = ["--simulate", str(data), "--target", target]
        if joint := best(selection, where + _of_all_methods(preset or [], change or [])):
            echo(joint)


def settings(change: list[str], chosen: list[str], seed: int, folder: str) -> RunConfig:
    """Return the settings of a run that pretrains, measures and ends.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    changes = overrides(METHOD, change)
    if "rounds" in changes:
        raise ConfigError(
            "-c rounds= is not taken here, as the measurement is one round; say by "
            "-c fruda.pretrain=N how long the candidates train before it."
        )
    flat: dict[str, Any] = {"method": METHOD, **presets.settings(METHOD, chosen), **changes}
    rounds = RunConfig.parse(flat | {"rounds": 1}).options[METHOD].pretrain + 1
    fixed = {"run.dir": folder, "run.name": "select", "run.baseline": "", "run.evaluate": False}
    fixed |= {"run.seeds": str(seed), "track.tensorboard": False, "rounds": rounds}
    return RunConfig.parse(flat | fixed)


def measured(
    config: RunConfig, data: Path, target: str, threads: int, quiet: bool
) -> dict[str, Any]:
    """Pretrain and measure -> the table, as in results.json."""
    from fedda.results.progress import Display

    local, journals = load("server", "simulation"), load("server", "journal")
    sites = local.folders(data, target, {}, threads)
    local.rehearse(config, sites)
    with nullcontext() if quiet else Display(config) as display:
        journal = journals.Journal(None, *([] if display is None else [display]))
        results = local.simulate(config, sites, journal, "process")
    (training,) = results["trainings"][METHOD]
    return training["selection"]


def show(selection: dict[str, Any], target: str) -> None:
    """Print the table."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from fedda.results.selection import headings, rows

    title = f"candidates for {escape(target)}, by {selection['selector']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, heading in enumerate(headings(selection)):
        table.add_column(
            heading, justify="right" if 0 < place < len(headings(selection)) - 1 else "left"
        )
    for row in rows(selection):
        table.add_row(*map(escape, row))
    PlainConsole().print(table)


def _of_all_methods(chosen: Sequence[str], change: Sequence[str]) -> list[str]:
    """The given options that a run of another method takes."""
    words = [w for name in chosen if name in presets.FOR_ALL for w in ("--preset", name)]
    own = f"{METHOD}."
    for pair in change:
        if not plugins.full_key(METHOD, pair.partition("=")[0]).startswith(own):
            words += ["-c", pair]
    return words


def best(selection: dict[str, Any], words: Sequence[str]) -> str:
    """Say how a method with several sources takes the best ones; empty if there is no choice.

    Args:
        selection: what was measured.
        words: the data and settings, as options of `fedda run`.
    """
    distance = "bound" if selection["selector"] != "pad" else "pad"
    candidates = sorted(selection["candidates"], key=lambda row: row[distance])
    names = [row["name"] for row in candidates if row["labelled"]]
    if len(names) < 3:
        return ""
    return (
        f"Best first: {', '.join(names)}. A method with several sources takes the best two by\n"
        f"{typed('fedda', 'run', 'mdan', *words, '-c', 'run.sources=' + ','.join(names[:2]))}"
    )
