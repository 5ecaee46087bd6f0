"""How far a run is, and how many seconds it still takes: an estimate from the rounds so far."""

from collections.abc import Mapping, Sequence
from typing import Any

Key = tuple[str, int, str]  # names a training: method, seed, and the target if it has several


class Pace:
    """What a run has planned and done, learned from the events of its journal.

    Attributes:
        plan: the run's trainings, in order; empty if nobody knows them.
        rounds: of the current training, in all.
        seen: rounds done, by training.
    """

    def __init__(
        self, methods: Sequence[str] = (), seeds: Sequence[int] = (), rounds: int = 0
    ) -> None:
        """Describe the run: its methods in order, their seeds, and a training's rounds if known."""
        self.plan: list[Key] = [(m, s, "") for s in seeds for m in methods]
        self.rounds = rounds
        self.seen: dict[Key, int] = {}
        self._lengths: dict[Key, int] = {}  # rounds in all, of trainings that have begun
        self._seconds: dict[str, list[float]] = {}  # seconds of each round, by method

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Pace":
        """Read the plan from a run's settings, as its config.json holds them."""
        try:
            method, baseline = str(settings["method"]), str(settings.get("run.baseline") or "")
            seeds = [int(seed) for seed in str(settings["run.seeds"]).split(",")]
            methods = [*([baseline] if baseline not in ("", method) else []), method]
            return cls(methods, seeds, int(settings["rounds"]))
        except (KeyError, ValueError, TypeError):
            return cls()

    @property
    def timed(self) -> bool:
        """Whether a round has ended, so that there is something to estimate from."""
        return bool(self._seconds)

    def key(self, event: Mapping[str, Any]) -> Key:
        """The training that an event belongs to."""
        key = event["method"], event["seed"], event.get("target", "")
        planned = (*key[:2], "")  # a run that chose one of several targets plans without a target
        return planned if planned in self.plan else key

    def note(self, event: Mapping[str, Any]) -> None:
        """Learn from one event; events of other kinds are ignored."""
        if event["event"] == "roster":
            self._roster(event)
        elif event["event"] == "training":
            key = self.key(event)
            self.rounds = self._lengths[key] = event["rounds"]
            self.seen[key] = event["round"]
        elif event["event"] == "round":
            key = self.key(event)
            self.seen[key] = event["round"]
            self._seconds.setdefault(key[0], []).append(event["seconds"])

    def _roster(self, event: Mapping[str, Any]) -> None:
        """Plan one training per target if the run has several targets."""
        targets = event.get("targets", [])
        if len(targets) > 1 or event.get("open"):
            seeds = list(dict.fromkeys(s for _, s, _ in self.plan))
            methods = list(dict.fromkeys(m for m, _, _ in self.plan))
            self.plan = [(m, s, t) for s in seeds for t in targets for m in methods]

    def per_round(self, method: str) -> float:
        """Mean seconds per round of a method; of all methods until it has a round of its own."""
        seconds = self._seconds.get(method) or [s for many in self._seconds.values() for s in many]
        return sum(seconds) / len(seconds)

    def left(self, key: Key) -> float:
        """Seconds until all planned trainings are done; without a plan, until this one is done."""
        keys = self.plan if key in self.plan else [key]
        left = {k: self._lengths.get(k, self.rounds) - self.seen.get(k, 0) for k in keys}
        return sum(rounds * self.per_round(k[0]) for k, rounds in left.items())
