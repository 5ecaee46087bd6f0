"""`fedda attach`, `fedda stop`: runs that other commands began, in the terminal."""

from pathlib import Path
from typing import Annotated

import typer

from fedda.cli import watching
from fedda.cli.exits import interruptible
from fedda.cli.launch import concluding, on_terminate, settings_of
from fedda.errors import RunError, typed
from fedda.results.escaping import Output, echo
from fedda.results.read import JOURNAL

Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]", help="The run's folder. Default: the only run in --dir that is going on."
    ),
]
Directory = Annotated[Path, typer.Option("--dir", file_okay=False, help="Folder of all runs.")]


def attach(run: Folder = None, directory: Directory = Path("runs")) -> None:
    """Watch a run that is going on until it ends, as `fedda run` does.

      fedda attach runs/kd3a

    Ctrl-C ends this command and leaves the run going. Exit code 0 means that the run finished, 1
    that it could not, 130 that the run was stopped, or this command was interrupted.
    """
    on_terminate()
    Output.ends = True
    folder = _chosen(run, directory)
    left = (
        f"The run goes on. Watch it again: {typed('fedda', 'attach', folder)}\n"
        f"End it: {typed('fedda', 'stop', folder)}"
    )
    with watching.going_on(folder) as going, concluding(folder), interruptible(left):
        from fedda.results.progress import Display

        with Display(settings_of(folder)) as display:
            journal = folder / JOURNAL
            watching.watch(journal, going.offset, going.ended, display, going.process)


def stop(run: Folder = None, directory: Directory = Path("runs")) -> None:
    """End a run that is going on; `fedda run --resume` goes on with it after its last full round.

    fedda stop runs/kd3a
    """
    folder = _chosen(run, directory)
    watching.stop(folder)
    echo(f"stopped {folder}{watching.resume_hint(folder)}")


def _chosen(run: Path | None, directory: Path) -> Path:
    """The folder that the user gave, or that of the only run that is going on.

    Raises:
        RunError: no such run is going on, or more than one.
    """
    if run is not None:
        return run.absolute()
    found = watching.all_going_on(directory.absolute())
    if not found:
        raise RunError(
            f"No run is going on in {directory}; give the run's folder, or the folder of all "
            "runs with --dir."
        )
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise RunError(f"{len(found)} runs are going on; say which one: {names}.")
    return found[0]
