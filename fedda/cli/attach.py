"""`fedda attach` and `fedda stop`: watch and end a run that another command started."""

from pathlib import Path
from typing import Annotated

import typer

from fedda.cli.exits import clear_exit
from fedda.cli.launch import INTERRUPTED, concluding, on_terminate, settings_of
from fedda.cli.watching import all_going_on, going_on, resume_hint, watch
from fedda.cli.watching import stop as end
from fedda.errors import RunError
from fedda.results.plainly import echo
from fedda.results.read import JOURNAL

Run = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]", help="The run's folder. Default: the only run in --dir that is going on."
    ),
]
Directory = Annotated[Path, typer.Option("--dir", file_okay=False, help="Folder of all runs.")]


def attach(run: Run = None, directory: Directory = Path("runs")) -> None:
    """Watch a run that is going on until it ends, as `fedda run` does.

      fedda attach runs/kd3a

    Ctrl-C ends this command and leaves the run going. Exit code 0 means that the run finished, 1
    that it could not, 130 that the run was stopped, or this command was interrupted.
    """
    on_terminate()
    with clear_exit():
        folder = _chosen(run, directory)
        with going_on(folder) as going, concluding(folder):
            from fedda.results.progress import Display

            try:
                with Display(settings_of(folder)) as display:
                    watch(folder / JOURNAL, going.offset, going.ended, display, going.process)
            except KeyboardInterrupt:
                echo(
                    f"\nThe run goes on. Watch it again: fedda attach {folder}\n"
                    f"End it: fedda stop {folder}",
                    err=True,
                )
                raise typer.Exit(INTERRUPTED) from None


def stop(run: Run = None, directory: Directory = Path("runs")) -> None:
    """End a run that is going on; `fedda run --resume` goes on with it after its last full round.

    fedda stop runs/kd3a
    """
    with clear_exit():
        folder = _chosen(run, directory)
        end(folder)
        echo(f"stopped {folder}{resume_hint(folder)}")


def _chosen(run: Path | None, directory: Path) -> Path:
    """The folder that the user gave, or that of the only run that is going on.

    Raises:
        RunError: no run is going on, or more than one.
    """
    if run is not None:
        return run.absolute()
    found = all_going_on(directory.absolute())
    if not found:
        raise RunError(
            f"No run is going on in {directory}; give the run's folder, or the folder of all runs "
            "with --dir."
        )
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise RunError(f"{len(found)} runs are going on; say which one: {names}.")
    return found[0]
