"""The progress of a comparison: a bar on a terminal, a few plain lines anywhere else."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.text import Text

from fedda.results.escaping import PlainConsole
from fedda.results.progress import OnTerminal, bar, clock
from fedda.results.read import counted, printable

from .plan import Cell

_AT_LEAST = 60.0  # seconds without output after which a plain line shows the progress


class CellsDisplay(OnTerminal):
    """Shows a comparison's trainings; give it to `Plan.run` as `notify`, inside its `with` block.

    Args:
        rounds: every cell and its number of rounds.
        done: cells that an earlier try finished.
        jobs: trainings at a time.
        accuracy: gives a finished cell's accuracy, or None where nothing was tested; None says
            nothing of accuracies.
        console: where to write, by default to stdout.
        watch: gives the time in seconds.
    """

    def __init__(
        self,
        rounds: Mapping[Cell, int],
        done: Sequence[Cell],
        jobs: int,
        accuracy: Callable[[Cell], float | None] | None,
        console: Console | None = None,
        watch: Callable[[], float] = time.monotonic,
    ) -> None:
        console = console or PlainConsole()
        self._rounds = rounds
        self._jobs = jobs
        self._accuracy = accuracy
        self._watch = watch
        self._finished = set(done)
        self._running: dict[Cell, int] = {}  # each cell at work, and how many rounds it has done
        self._began: dict[Cell, float] = {}
        self._round_began: dict[Cell, float] = {}
        self._fresh: set[Cell] = set()  # at work, before their first round ends
        # By variant: of each training until its first round has ended, and of every other round.
        self._starts: dict[str, list[float]] = {}
        self._seconds: dict[str, list[float]] = {}
        self._last_line = watch()
        self._idle = [self._last_line] * jobs  # since when; a training begins at the longest
        self._bar = bar(console, "left")
        self._task = self._bar.add_task("", total=max(sum(rounds.values()), 1), left="")
        super().__init__(console, lambda: Group(self._bar, *self._status()))

    def __enter__(self) -> Self:
        before = f", {len(self._finished)} of them done before" if self._finished else ""
        at_once = f", {self._jobs} at a time" if self._jobs > 1 else ""
        self._say(f"{counted(len(self._rounds), 'training')}{before}{at_once}")
        self._update()
        return super().__enter__()

    def __call__(self, what: str, cell: Cell, value: Any) -> None:
        """Show one thing that happened to a cell."""
        now = self._watch()
        if what == "begin":
            self._began[cell] = now
            self._round_began[cell] = self._idle.pop(0) if self._idle else now
            self._running[cell] = value
            self._fresh.add(cell)
        elif what == "round":
            seen = self._starts if cell in self._fresh else self._seconds
            seen.setdefault(cell.variant.name, []).append(now - self._round_began.get(cell, now))
            self._fresh.discard(cell)
            self._round_began[cell] = now
            self._running[cell] = value
        elif what == "line":
            self._say(f"  {title(cell)}: {value}", "dim")
        else:
            self._done(cell, value, now)
        if not self._live and now - self._last_line >= _AT_LEAST:
            going = "; ".join(text.plain for text in self._status())
            self._say(f"  {', '.join(filter(None, (going, self._left())))}")
        self._update()

    def _done(self, cell: Cell, error: str | None, now: float) -> None:
        if self._running.pop(cell, None) is not None:
            # What comes after the last round counts to the start of the next training.
            self._idle.append(self._round_began[cell] if error is None else now)
        self._fresh.discard(cell)
        self._finished.add(cell)
        took = clock(now - self._began.get(cell, now))
        if error is not None:
            self._say(f"{self._count()} {title(cell)}: failed: {error}", "yellow")
            return
        outcome = "" if self._accuracy is None else _accuracy_text(self._accuracy(cell))
        rest = "" if self._live else self._left()
        line = ", ".join(filter(None, (outcome, took, rest)))
        self._say(f"{self._count()} {title(cell)}: {line}")

    def _count(self) -> str:
        return f"{len(self._finished)}/{len(self._rounds)}"

    def _status(self) -> list[Text]:
        """A line for every cell at work: its name and its round."""
        return [
            Text(printable(f"{title(cell)}: round {done}/{self._rounds[cell]}"), style="dim")
            for cell, done in self._running.items()
        ]

    def _left(self) -> str:
        """Time until all cells are trained, from each variant's mean seconds so far."""
        open_cells = [c for c in self._rounds if c not in self._finished]
        later = self._seconds or max(self._rounds.values(), default=0) == 1
        if not self._starts or not later or not open_cells:
            return ""
        seconds = 0.0
        for cell in open_cells:
            name, rounds = cell.variant.name, self._rounds[cell] - self._running.get(cell, 0)
            if cell not in self._running or cell in self._fresh:
                seconds, rounds = seconds + _usual(self._starts, name), rounds - 1
            seconds += rounds * _usual(self._seconds, name)
        return f"about {clock(seconds / min(self._jobs, len(open_cells)))} left"

    def _update(self) -> None:
        rounds = sum(self._rounds[c] for c in self._finished) + sum(self._running.values())
        count = f"{self._count()} trainings"
        self._bar.update(self._task, description=count, completed=rounds, left=self._left())

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(Text(printable(text), style=style), soft_wrap=True, highlight=False)
        self._last_line = self._watch()


def _usual(seen: Mapping[str, Sequence[float]], name: str) -> float:
    """The mean of a variant's seconds, or of all variants' where it has none yet."""
    own = seen.get(name) or [seconds for each in seen.values() for seconds in each]
    return sum(own) / max(len(own), 1)


def _accuracy_text(accuracy: float | None) -> str:
    return "no tests" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"


def title(cell: Cell) -> str:
    """A cell's name for people."""
    return f"{cell.variant.name} → {cell.target}, seed {cell.seed}"
