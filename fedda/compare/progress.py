"""How a comparison goes, while it goes: a bar on a terminal, a few plain lines anywhere else."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fedda.progress import clock
from fedda.results import counted, printable

from .cells import Cell

_AT_LEAST = 60.0  # seconds after which a plain line says that long trainings go on


class Display:
    """Shows a comparison's trainings; give it to `Plan.run` as `notify`, inside its `with` block.

    Args:
        rounds: of every cell.
        done: cells that an earlier try finished.
        jobs: trainings at a time.
        accuracy: of a finished cell, None where nothing was tested.
        console: by default stdout.
        watch: the time, in seconds.
    """

    def __init__(
        self,
        rounds: Mapping[Cell, int],
        done: Sequence[Cell],
        jobs: int,
        accuracy: Callable[[Cell], float | None],
        console: Console | None = None,
        watch: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._rounds = rounds
        self._jobs = jobs
        self._accuracy = accuracy
        self._watch = watch
        self._over = set(done)
        self._at: dict[Cell, int] = {}  # rounds done of the cells at work
        self._since: dict[Cell, float] = {}
        self._begun: dict[Cell, float] = {}
        self._seconds: dict[str, list[float]] = {}  # of every round watched, by variant
        self._said = watch()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=max(sum(rounds.values()), 1), left="")
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=lambda: Group(self._bar, *self._now()),
                console=self.console,
                transient=True,
            )

    def __enter__(self) -> Self:
        before = f", {len(self._over)} of them done before" if self._over else ""
        at_once = f", {self._jobs} at a time" if self._jobs > 1 else ""
        self._say(f"{counted(len(self._rounds), 'training')}{before}{at_once}")
        self._update()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, what: str, cell: Cell, value: Any) -> None:
        """Show one thing that happened to a cell."""
        now = self._watch()
        if what == "begin":
            self._begun[cell] = self._since[cell] = now
            self._at[cell] = value
        elif what == "round":
            pace = self._seconds.setdefault(cell.variant.name, [])
            pace.append(now - self._since.get(cell, now))
            self._since[cell] = now
            self._at[cell] = value
        else:
            self._done(cell, value, now)
        if not self._live and now - self._said >= _AT_LEAST:
            going = "; ".join(text.plain for text in self._now())
            self._say(f"  {', '.join(filter(None, (going, self._left())))}")
        self._update()

    def _done(self, cell: Cell, error: str | None, now: float) -> None:
        self._at.pop(cell, None)
        self._over.add(cell)
        took = clock(now - self._begun.get(cell, now))
        if error is not None:
            self._say(f"{self._count()} {title(cell)}: failed: {error}", "yellow")
            return
        accuracy = self._accuracy(cell)
        found = "no tests" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
        rest = "" if self._live else self._left()
        line = ", ".join(filter(None, (found, took, rest)))
        self._say(f"{self._count()} {title(cell)}: {line}")

    def _count(self) -> str:
        return f"{len(self._over)}/{len(self._rounds)}"

    def _now(self) -> list[Text]:
        """The cells at work, and how far each is."""
        return [
            Text(printable(f"{title(cell)}: round {at}/{self._rounds[cell]}"), style="dim")
            for cell, at in self._at.items()
        ]

    def _left(self) -> str:
        """Time until all is done, from the seconds per round that each variant took so far."""
        every = [s for found in self._seconds.values() for s in found]
        open_cells = [c for c in self._rounds if c not in self._over]
        if not every or not open_cells:
            return ""
        usual, seconds = sum(every) / len(every), 0.0
        for cell in open_cells:
            found = self._seconds.get(cell.variant.name)
            pace = sum(found) / len(found) if found else usual
            seconds += (self._rounds[cell] - self._at.get(cell, 0)) * pace
        return f"about {clock(seconds / min(self._jobs, len(open_cells)))} left"

    def _update(self) -> None:
        rounds = sum(self._rounds[c] for c in self._over) + sum(self._at.values())
        count = f"{self._count()} trainings"
        self._bar.update(self._task, description=count, completed=rounds, left=self._left())

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(Text(printable(text), style=style), soft_wrap=True, highlight=False)
        self._said = self._watch()


def title(cell: Cell) -> str:
    """What people call a cell."""
    return f"{cell.variant.name} → {cell.target}, seed {cell.seed}"
