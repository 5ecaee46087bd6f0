"""Who is at the server, and which runs it has: what those who watch it are told."""

from dataclasses import dataclass
from pathlib import Path

FINISHED = "finished"
WORK = {"train": "trains", "evaluate": "is tested", "query": "answers a question"}
ENDINGS = {"completed": "finished", "stopped": "been stopped", "failed": "failed"}


@dataclass(frozen=True)
class SiteNow:
    """A registered site.

    Attributes:
        node: its number at the server.
        name: the name that it was registered with; empty if it has none.
        role: source or target, if the operator bound its key to one; else empty.
        online: whether it is reachable.
        work: what it was asked and has not answered: train, evaluate, query; empty if nothing.
        run: of that work.
    """

    node: int
    name: str
    role: str
    online: bool
    work: str = ""
    run: int = 0

    @property
    def called(self) -> str:
        """Its name, or its number if it was registered without one."""
        return self.name or f"node {self.node}"

    def working(self, run: "RunNow | None") -> str:
        """What it does for a run, in words; empty if nothing."""
        if run is None or run.ended or self.run != run.number:
            return ""
        return WORK.get(self.work.partition(".")[0], self.work)


@dataclass(frozen=True)
class RunNow:
    """A run at the server.

    Attributes:
        number: Flower's id of the run.
        name: of the run's folder.
        folder: the path on the server's machine.
        method: the method that it trains.
        status: pending, starting, running or finished.
        ending: completed, failed or stopped; empty while it goes on.
        began: when it was asked for, as Flower writes it.
    """

    number: int
    name: str
    folder: str
    method: str
    status: str
    ending: str = ""
    began: str = ""

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status == FINISHED

    @property
    def how(self) -> str:
        """How it ended: finished, been stopped or failed; empty while it goes on."""
        return ENDINGS.get(self.ending, "failed") if self.ended else ""

    @property
    def path(self) -> Path:
        """The folder, as a path."""
        return Path(self.folder)


@dataclass(frozen=True)
class Snapshot:
    """The sites, and the runs, the newest first."""

    sites: tuple[SiteNow, ...] = ()
    runs: tuple[RunNow, ...] = ()

    def run(self, which: str = "") -> RunNow | None:
        """The run of a name, number or folder; without one the newest. None if there is none."""
        if not which:
            return next(iter(self.runs), None)
        for run in self.runs:
            if which in (str(run.number), run.name) or Path(which).absolute() == run.path:
                return run
        return None
