"""Show the progress of a run: a bar on a terminal, a few plain lines anywhere else."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fedda import plugins
from fedda.errors import ConfigError
from fedda.results.escaping import PlainConsole
from fedda.results.read import Event, counted, printable
from fedda.results.story import Key, Story, added, tell
from fedda.settings import RunConfig

PROGRESS = "fedda.progress"  # the log of long work at sites, before they can train
_SITES = logging.getLogger(PROGRESS)
_EVERY = 10  # rounds between two plain lines,
_AT_LEAST = 60.0  # or seconds between them if rounds take long
_LOOK = 0.2  # seconds between two looks at the journal
_ASK = 5  # looks between two calls of `stop`, which may send a request


class OnTerminal:
    """Keeps a picture on a terminal up to date inside its `with` block; elsewhere shows none."""

    def __init__(self, console: Console, picture: Callable[[], RenderableType]) -> None:
        self.console = console
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=picture, console=console, transient=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        self._lines, self._level = _Lines(self.console), _SITES.level
        _SITES.addHandler(self._lines)
        _SITES.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        _SITES.removeHandler(self._lines)
        _SITES.setLevel(self._level)
        if self._live:
            self._live.stop()


class _Lines(logging.Handler):
    """Prints what sites in this process say of long work before they can train."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text(f"  {printable(record.getMessage())}", style="dim"))


class Display(OnTerminal):
    """Show a run's events; call the display with each of them, inside its `with` block.

    Args:
        config: the run; from it the display knows the number of trainings, and so the time that is
            left for all of them. Without it each training is shown by itself.
        console: where to write, by default to stdout.
        words: puts what is said into the words of whoever reads it.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        console: Console | None = None,
        words: Callable[[str], str] = str,
    ) -> None:
        console, self._words = console or PlainConsole(), words
        self._story = tell((), config.flat() if config else None)
        self._said, self._hinted, self._there = 0.0, set[str](), set[str]()
        self._numbers = Text()
        self._lasting: dict[tuple[Any, ...], int] = {}  # the last round of each trouble
        self._bar = bar(console, "round", "left")
        self._task = self._bar.add_task("starting", total=None, round="", left="")
        super().__init__(console, self._picture)

    def __call__(self, event: Event) -> None:
        """Show one event; events of other kinds are ignored."""
        shows: dict[str, Callable[[Event], None]] = {
            "waiting": self._waiting,
            "waiting-for": self._waiting_for,
            "joined": self._joined,
            "training": self._training,
            "open": self._open,
            "selected": self._selected,
            "round": self._round,
            "trouble": self._trouble,
            "doubt": self._doubt,
            "ending": self._doubt,
        }
        self._story.add(event)
        if event["event"] in shows:
            shows[event["event"]](event)

    def _waiting(self, event: Event) -> None:
        both = (counted(event[f"{role}s"], role) for role in ("source", "target"))
        joined = f"{' and '.join(both)} have joined"
        self._bar.update(self._task, description=f"waiting for sites: {joined}")
        if not event["sources"] and not event["targets"]:
            self._say("waiting for sites to join")

    def _waiting_for(self, event: Event) -> None:
        """Show for whom the run waits; it says so less and less often, so each time is shown."""
        if self._story.awaited and not self._live:
            self._say(f"  {waits(self._story, event['time'])}")

    def _picture(self) -> RenderableType:
        """The bar and the last numbers, and for whom the run waits at this moment."""
        wait = Text()
        if self._story.awaited:
            text = printable(waits(self._story, time.time()))
            wait = Text(text, style="dim" if self._story.at_work else "yellow")
        return Group(self._bar, self._numbers, wait)

    def _joined(self, event: Event) -> None:
        if event["site"] not in self._there:
            self._say(f"joined: {event['text']}")
        self._there.add(event["site"])

    def _open(self, event: Event) -> None:
        self._bar.update(self._task, description="waiting for targets", round="", left="")
        self._say("the run is open: it adapts every target that joins, until it is stopped")

    def _training(self, event: Event) -> None:
        key, done, rounds = self._story.key(event), event["round"], event["rounds"]
        steps = f", {event['steps']:,} steps at a source" if event.get("steps") else ""
        plan = counted(rounds, "round") + steps
        going = f"going on after round {done} of {rounds}" if done else plan
        if not self._live:
            self._say(f"{self._name(key)}: {'done before' if done == rounds else going}")
        for hint in () if done else event.get("hints", ()):
            if (kind := re.sub(r"\d", "", hint)) not in self._hinted:  # once, whatever its numbers
                self._say(f"  {hint}", "dim")
            self._hinted.add(kind)
        self._said = event.get("time", 0.0)
        self._numbers = Text()
        self._update(key)

    def _selected(self, event: Event) -> None:
        of, start = len(event["candidates"]), event["collaborator"]
        one = f"{start}, of {of} candidate{'s' * (of != 1)}"
        every = f"all {of} candidates, starting from the model of {start}"
        taken = every if event["selector"] == "all" and of > 1 else one
        self._say(f"  {event.get('target', 'the target')} adapts from {taken}")

    def _round(self, event: Event) -> None:
        key, number, rounds = self._story.key(event), event["round"], self._story.rounds
        last, now = number == rounds, event.get("time", 0.0)
        pace = f"{self._story.per_round:.1f} s per round"
        numbers = [text for text in (_scores(event), pace) if text]
        if self._live:
            self._numbers = Text(", ".join(numbers), style="dim")
            if last:
                self._say(f"{self._name(key)}: {_scores(event)} after {number} rounds")
        elif last or number == 1 or number % _EVERY == 0 or now - self._said >= _AT_LEAST:
            left = self._story.left
            numbers += [f"{clock(left)} left"] if left else []
            self._say(f"  round {number}/{rounds}: {', '.join(numbers)}")
            self._said = now
        self._update(key)

    def _trouble(self, event: Event) -> None:
        """Show a trouble, but not again in each further round of a training in which it lasts."""
        which = ()
        if {"round", "seed"} <= {*event}:
            which = (*self._story.key(event), event["site"], event["text"])
        before, self._lasting[which] = self._lasting.get(which), event.get("round", 0)
        if which and before is not None and event["round"] == before + 1:
            return
        self._there.discard(event["site"])
        when = f"round {event['round']}" if "round" in event else ""
        self._say(": ".join(filter(None, (when, event["site"], event["text"]))), "yellow")

    def _doubt(self, event: Event) -> None:
        name = self._name(self._story.key(event))
        self._say(f"{name}, round {event['round']}: {event['text']}", "yellow")

    def _say(self, text: str, style: str = "") -> None:
        line = Text(printable(self._words(text)), style=style)
        self.console.print(line, soft_wrap=True, highlight=False)

    def _update(self, key: Key) -> None:
        story = self._story
        self._bar.update(
            self._task,
            description=self._name(key),
            completed=story.round,
            total=story.rounds,
            round=f"round {story.round}/{story.rounds}",
            left="" if story.left is None else f"{clock(story.left)} left",
        )

    def _name(self, key: Key) -> str:
        method, seed, target = key
        name = _title(method) + (f" on {target}" if target else "")
        if key not in self._story.plan:
            return f"{name}, seed {seed}"
        seeds = list(dict.fromkeys(s for _, s, _ in self._story.plan))
        place = f", seed {seed} ({seeds.index(seed) + 1} of {len(seeds)})"
        return name + place if len(seeds) > 1 else name


def _title(method: str) -> str:
    """The title of a method; its name if only the server has it installed."""
    try:
        return plugins.method(method).title
    except ConfigError:
        return method.upper()


def _scores(event: Event) -> str:
    parts = [f"loss {event['loss']:.3f}"] if "loss" in event else []
    if "accuracy" in event:
        parts.append(f"accuracy {100 * event['accuracy']:.1f} %")
    elif "infomax" in event:
        parts.append(f"infomax {event['infomax']:.3f}")
    return ", ".join(parts)


def bar(console: Console, *fields: str) -> Progress:
    """A bar as wide as the console, with a description before it and fields of its task after."""
    columns = [TextColumn(f"{{task.fields[{field}]}}") for field in fields]
    about = TextColumn("{task.description}", markup=False)
    return Progress(about, BarColumn(bar_width=None), *columns, console=console, expand=True)


def waits(story: Story, now: float) -> str:
    """Who is at work for a run at a moment, or for whom it waits, and since when."""
    what = "at work:" if story.at_work else "waiting for"
    return f"{what} {', '.join(story.awaited)} since {clock(max(0.0, now - story.since))}"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def follow(path: Path, stop: Callable[[], bool], start: int = 0) -> Iterator[Event]:
    """Yield events while another process writes them to its journal, until the run has ended.

    Args:
        path: the journal, a file of JSON lines that grows; it need not exist yet.
        stop: called every few looks; once it returns True, the rest of the file is read and
            the iteration ends.
        start: number of bytes at the beginning to skip, such as those written before a resume.
    """
    looks, stopping = 0, False
    while True:
        events: list[Event] = []
        with suppress(OSError):  # it need not exist yet
            events, start = added(path, start)
        for event in events:
            yield event
            if event["event"] in ("done", "failed"):
                return
        if stopping:
            return
        stopping = looks % _ASK == 0 and stop()
        looks += 1
        if not stopping:
            time.sleep(_LOOK)
