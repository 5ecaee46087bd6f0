"""What a run's journal has said so far: a fold over its events, one after the other.

Everything here may come from a site: texts are kept as they are, and escaped where they are shown.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .read import JOURNAL, Event, event_in, noted

Entry = dict[str, Any]  # a round, as in results.json
Key = tuple[str, int, str]  # names a training: method, seed, and the target if it has several

WAITS, TRAINS, DONE, FAILED, STARTS = "waiting", "training", "done", "failed", "starting"
INTERRUPTS = ("KeyboardInterrupt", "SystemExit")  # how a stopped run ends


@dataclass
class Story:
    """A run as far as its journal tells.

    Attributes:
        plan: the run's trainings, in order; empty if nobody knows them.
        rounds: of the current training, in all; 0 while nobody knows.
        seen: rounds done, by training.
        lengths: rounds in all, of trainings that have begun.
        seconds: of each round, by method.
        state: starting, waiting, training, done or failed.
        why: the reason, if the run failed.
        joined: role of each site that joined, by name.
        targets: the targets that the run adapts to.
        awaited: the sites that the run waits for, and since when.
        at_work: whether it waits for their answers, and not for them to come back.
        current: the training that goes on, and its round.
        trainings: the rounds of each training, by their number.
        troubles: what went wrong, as results.json lists it.
        times: when each of the troubles came.
        doubts: signs that a training went wrong, by training.
        endings: why a training ends before its last planned round, by training.
        began: time of the run's first start.
        last: time of the last event.
    """

    plan: list[Key] = field(default_factory=list)
    rounds: int = 0
    seen: dict[Key, int] = field(default_factory=dict)
    lengths: dict[Key, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    state: str = STARTS
    why: str = ""
    stopped: bool = False
    joined: dict[str, str] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)
    shape: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    since: float = 0.0
    at_work: bool = False
    current: Key | None = None
    trainings: dict[Key, dict[int, Entry]] = field(default_factory=dict)
    troubles: list[Event] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    doubts: dict[Key, list[Event]] = field(default_factory=dict)
    endings: dict[Key, str] = field(default_factory=dict)
    began: float = 0.0
    last: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.state in (DONE, FAILED)

    @property
    def round(self) -> int:
        """Rounds that the current training has done."""
        return self.seen.get(self.current, 0) if self.current else 0

    @property
    def left(self) -> float | None:
        """Estimated seconds until the end; None before the first round, and after the end.

        Without a plan, until the end of the current training.
        """
        if self.current is None or self.ended or not self.seconds:
            return None
        keys = self.plan if self.current in self.plan else [self.current]
        left = {k: self.lengths.get(k, self.rounds) - self.seen.get(k, 0) for k in keys}
        return sum(rounds * self._mean(k[0]) for k, rounds in left.items())

    @property
    def per_round(self) -> float | None:
        """Mean seconds per round of the current method; None before the first round."""
        return self._mean(self.current[0]) if self.current and self.seconds else None

    def _mean(self, method: str) -> float:
        """Mean seconds per round of a method; of all methods until it has a round of its own."""
        seconds = self.seconds.get(method) or [s for many in self.seconds.values() for s in many]
        return sum(seconds) / len(seconds)

    @property
    def place(self) -> tuple[int, int]:
        """Which training goes on, of how many; the second is 0 if nobody knows."""
        if self.current in self.plan:
            return self.plan.index(self.current) + 1, len(self.plan)
        return len(self.trainings), 0

    @property
    def newest(self) -> Entry:
        """The last round of the current training; empty before its first."""
        rounds = self.trainings.get(self.current, {}) if self.current else {}
        return rounds[max(rounds)] if rounds else {}

    def bytes(self) -> Counter[str]:
        """Bytes so far, by direction, role and kind: `to source model`."""
        total: Counter[str] = Counter()
        for rounds in self.trainings.values():
            for entry in rounds.values():
                total.update(entry.get("bytes") or {})
        return total

    def expect(self, settings: Mapping[str, Any]) -> None:
        """Learn the plan from a run's settings, as its config.json holds them."""
        with suppress(KeyError, ValueError, TypeError):
            method, baseline = str(settings["method"]), str(settings.get("run.baseline") or "")
            seeds = [int(seed) for seed in str(settings["run.seeds"]).split(",")]
            methods = [*([baseline] if baseline not in ("", method) else []), method]
            self.rounds = self.rounds or int(settings["rounds"])
            self.plan = [(m, s, "") for s in seeds for m in methods]

    def key(self, event: Event) -> Key:
        """The training that an event belongs to."""
        key = event["method"], event["seed"], event.get("target", "")
        planned = (*key[:2], "")  # a run that chose one of several targets plans without a target
        return planned if planned in self.plan else key

    def add(self, event: Event) -> None:
        """Take the next event; unknown ones only move the clock."""
        what, now = event["event"], float(event.get("time", 0.0))
        self.began, self.last = self.began or now, max(self.last, now)
        match what:
            case "started":  # anew, after an interruption
                self.state, self.why, self.stopped = STARTS, "", False
                self.awaited = []
            case "joined":
                self.joined[str(event["site"])] = str(event["role"])
            case "waiting":
                self.state = WAITS
            case "waiting-for":
                self.awaited = [str(name) for name in event["sites"]]
                self.at_work = "round" in event  # they were asked something, and are connected
                self.since = now - event["seconds"]
            case "roster":
                targets = event.get("targets", [])
                if len(targets) > 1 or event.get("open"):  # one training per target
                    seeds = dict.fromkeys(s for _, s, _ in self.plan)
                    methods = dict.fromkeys(m for m, _, _ in self.plan)
                    self.plan = [(m, s, t) for s in seeds for t in targets for m in methods]
                self.targets = [*map(str, targets)]
                self.shape, self.classes = event.get("shape", []), list(event.get("classes", []))
                self.awaited = []
            case "training":
                self.state, self.current, self.awaited = TRAINS, self.key(event), []
                self.rounds = self.lengths[self.current] = event["rounds"]
                self.seen[self.current] = event["round"]
                before = self.trainings.get(self.current, {})
                kept = {n: e for n, e in before.items() if n <= event["round"]}
                self.trainings[self.current] = kept
            case "ending":
                self.rounds = self.lengths[self.key(event)] = event["last"]
                self.endings[self.key(event)] = str(event["text"])
            case "round":
                self._round(event)
            case "trouble":
                self.troubles.append(facts(event))
                self.times.append(now)
                if event.get("what") == "resumed":
                    self.awaited = []
            case "doubt":
                self.doubts.setdefault(self.key(event), []).append(event)
            case "done" | "failed":
                self.state, self.awaited = what, []
                self.why = str(event.get("text", ""))
                self.stopped = event.get("error") in INTERRUPTS

    def _round(self, event: Event) -> None:
        key = self.key(event)
        self.seen[key] = event["round"]
        self.seconds.setdefault(key[0], []).append(event["seconds"])
        entry = facts(event, "method", "seed", "target")
        self.trainings.setdefault(key, {})[int(event["round"])] = entry
        self.current, self.awaited = key, []


def facts(event: Event, *but: str) -> Event:
    """An event as results.json holds it: without its name, its time and some other entries."""
    return {k: v for k, v in event.items() if k not in ("event", "time", *but)}


def tell(events: Iterable[Event], settings: dict[str, Any] | None = None) -> Story:
    """Gather events.

    Args:
        events: of a run's journal, in order.
        settings: of the run, as its config.json holds them; with them the story knows how many
            trainings there will be.
    """
    story = Story()
    story.expect(settings or {})
    for event in events:
        story.add(event)
    return story


def added(path: Path, start: int = 0) -> tuple[list[Event], int]:
    """Read the whole lines of a growing journal from a byte on -> events, where to go on.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
    return list(filter(None, map(event_in, whole.splitlines()))), start + len(whole)


class JournalReader:
    """Reads a run's journal as it grows, and keeps the story so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read = 0  # bytes that are in the story
        self.story = Story()
        self._planned = False

    def look(self) -> Story:
        """Read what was added -> the story so far."""
        path = self.folder / JOURNAL
        with suppress(OSError):  # not begun, or its folder is gone: the story stays as it is
            if path.stat().st_size < self.read:  # another journal: somebody began the run anew
                self.read, self.story, self._planned = 0, Story(), False
            events, self.read = added(path, self.read)
            # After the events, as the settings are written before the first that needs them.
            if not self._planned and (settings := settings_of(self.folder)):
                self.story.expect(settings)
                self._planned = True
            for event in events:
                self.story.add(event)
        return self.story


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings in a run's folder; empty if there are none yet."""
    return noted(folder / "config.json")
