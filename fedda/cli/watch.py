"""`fedda watch`, `fedda attach`, `fedda stop`: runs that other commands began, in the terminal."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fedda.cli import watching
from fedda.cli.at_server import looking, server_of
from fedda.cli.exits import clear_exit, interruptible
from fedda.cli.launch import concluding, on_terminate, settings_of
from fedda.errors import RunError
from fedda.results.plainly import PlainConsole, echo
from fedda.results.read import JOURNAL, counted, printable
from fedda.results.snapshot import RunNow, SiteNow, Snapshot

LOOK = 1.0  # seconds between two looks while no run goes on
SHOWN = 20  # most sites in the picture

Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN]", help="The run's folder. Default: the only run in --dir that is going on."
    ),
]
Directory = Annotated[Path, typer.Option("--dir", file_okay=False, help="Folder of all runs.")]


def watch(
    server: Annotated[Path, typer.Option(metavar="DIR")] = Path("fedda-server"),
    run: Annotated[str, typer.Option(metavar="RUN")] = "",
) -> None:
    """Watch a server: the sites that come and go, who trains, and its newest run until it ends.

      fedda watch --server hub

      fedda watch --server hub --run kd3a

    Without a run it shows the sites and waits for one. On a terminal it keeps one picture up to
    date; into a file or a pipe it writes one line per event.

    It only looks: Ctrl-C ends this command, and the run goes on (`fedda stop` ends a run). Exit
    code 0: the run has finished; 1: it failed or was stopped; 130: this command was interrupted.

    The same as a page, with charts: /live at the operator's port, such as
    https://127.0.0.1:8000/live.

    Options:
        server: The folder that `fedda superlink` was given as --dir.
        run: Name, number or folder of a run. Default: the newest.
    """
    on_terminate()
    left = interruptible("No longer watching; a run that goes on is not ended.")
    with clear_exit(), left, looking(*server_of(server.absolute())) as look:
        raise typer.Exit(Watcher(look, run, PlainConsole()).follow())


def attach(run: Folder = None, directory: Directory = Path("runs")) -> None:
    """Watch a run that is going on until it ends, as `fedda run` does.

      fedda attach runs/kd3a

    Ctrl-C ends this command and leaves the run going. Exit code 0 means that the run finished, 1
    that it could not, 130 that the run was stopped, or this command was interrupted.
    """
    on_terminate()
    with clear_exit():
        folder = _chosen(run, directory)
        left = (
            f"The run goes on. Watch it again: fedda attach {folder}\nEnd it: fedda stop {folder}"
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
    with clear_exit():
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


class Watcher:
    """Shows a server's sites and one run."""

    def __init__(self, look: Callable[[], Snapshot], which: str, console: Console) -> None:
        self._look = look
        self._which = which
        self._console = console
        self._snapshot = Snapshot()
        self._online: dict[int, bool] = {}
        self._failures = 0

    def follow(self) -> int:
        """Wait for the run, then show it until it ends -> exit code."""
        from fedda.results.progress import Display, OnTerminal, follow

        self.look()
        if self._run() is None and self._which:
            known = ", ".join(run.name for run in self._snapshot.runs) or "none"
            raise RunError(
                f"the server knows no run {self._which!r}; it has {known}: give one of these, or "
                "leave out --run."
            )
        with OnTerminal(self._console, self._sites):
            if self._run() is None:
                self.say("waiting for a run to begin: fedda run METHOD --server DIR")
            while (run := self._run()) is None:
                time.sleep(LOOK)
                self.look()
        if not run.ended:
            self.say(f"run {run.name} in {run.folder}")
            journal = run.path / JOURNAL
            settings = settings_of(run.path)
            with Display(settings, self._console, above=self._sites, every=1) as display:
                for event in follow(journal, self._over, watching.began(journal)):
                    display(event)
                    if event["event"] == "failed":
                        self.say(f"the run has failed: {event['text']}")
            while not (run := self._run() or run).ended:  # the server notices a little later
                time.sleep(LOOK)
                self.look()
        return self._conclude(run)

    def look(self) -> None:
        """Ask the server, and say which sites have come and gone.

        Raises:
            RunError: no server has answered several times.
        """
        try:
            self._snapshot = self._look()
        except RunError:
            self._failures += 1
            if self._failures == watching.TRIES or not self._online:
                raise
            return
        self._failures = 0
        for site in self._snapshot.sites:
            if self._online.get(site.node) != site.online:
                self._online[site.node] = site.online
                self.say(f"site {called(site)} is {'reachable' if site.online else 'away'}")

    def say(self, text: str) -> None:
        """Write one line."""
        line = Text(printable(text))
        self._console.print(line, soft_wrap=True, highlight=False)

    def _run(self) -> RunNow | None:
        return self._snapshot.run(self._which)

    def _over(self) -> bool:
        self.look()
        run = self._run()
        return run is not None and run.ended

    def _conclude(self, run: RunNow) -> int:
        self.say(f"run {run.name} has {run.how}")
        if run.ending != "completed":
            self.say(f"go on with: fedda run --resume {run.folder}")
            return 1
        self.say(f"see: fedda report {run.folder}")
        return 0

    def _sites(self) -> RenderableType:
        """A table of the sites, those at work first."""
        sites, run = self._snapshot.sites, self._run()
        online = sum(site.online for site in sites)
        table = Table(title=f"{online} of {counted(len(sites), 'site')} reachable")
        for heading in ("site", "role", "reachable", "now"):
            table.add_column(heading)
        order = sorted(sites, key=lambda site: (not site.work, not site.online, called(site)))
        for site in order[:SHOWN]:
            reach = Text("yes", "green") if site.online else Text("no", "red")
            table.add_row(Text(called(site)), site.role or "–", reach, printable(site.working(run)))
        if len(order) > SHOWN:
            table.caption = f"{len(order) - SHOWN} more are not shown"
        return table


def called(site: SiteNow) -> str:
    """A site's name as a terminal can show it."""
    return printable(site.called)
