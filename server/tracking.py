"""A run's curves where people watch them: TensorBoard's files, and MLflow where it is asked for.

Fed by what the journal is told: `training` opens the curves of one method and seed, every `round`
adds a point to each. What curves show is what the checkpoint holds, so a run that is resumed goes
on with them, without a gap or a point twice. They are a convenience: a tracker that fails is told
of once, tried again with the next training, and never ends a run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedda.config import RunConfig

from . import checkpoint
from .journal import Event, Journal
from .mlflow_runs import MLflow
from .trackers import About, Point, TensorBoard, Tracker

# What may differ between the tries of a run, and so does not describe it.
PASSING = ("run.dir", "run.name", "run.resume", "run.expect", "run.seeds", "wait.", "track.")
NO_NUMBERS = ("event", "time", "method", "seed", "round")  # of a round entry


class Tracking:
    """Listens to a run's journal inside its `with` block, and tells the trackers.

    Args:
        config: the run.
        folder: of the run.
        journal: of the run; told, once, of each tracker that fails.

    Raises:
        ConfigError: a tracker is asked for that is not installed, or its address cannot be.
    """

    def __init__(self, config: RunConfig, folder: Path, journal: Journal) -> None:
        self._config = config
        self._folder = folder
        self._journal = journal
        self._trackers: list[Tracker] = [TensorBoard()] if config.track.tensorboard else []
        if config.track.mlflow:
            place = MLflow(config.track.mlflow, config.track.experiment, Path(config.run.dir))
            self._trackers.append(place)
        self._good: set[Tracker] = set()  # those that hold all of the training at hand
        self._told: set[Tracker] = set()
        self._about = About("", "", 0, folder, {})
        self._time = 0.0  # of the newest round

    def __enter__(self) -> Self:
        self._journal.listeners.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ValueError):  # the journal drops a listener that failed
            self._journal.listeners.remove(self)
        for tracker in self._trackers:
            with suppress(Exception):
                tracker.stop()

    def __call__(self, event: Event) -> None:
        """Take one event; most say nothing about curves."""
        if event["event"] == "training":
            self._about = self._describe(event["method"], event["seed"])
            rounds = self._before if event["round"] else list
            for tracker in self._trackers:
                self._attempt(tracker, lambda t=tracker: t.begin(self._about, rounds()))
        elif event["event"] == "round":
            point = Point(event["round"], event["time"], dict(numbers(event)))
            self._time = point.time
            for tracker in filter(self._good.__contains__, self._trackers):
                self._attempt(tracker, lambda t=tracker: t.add(point))

    def finished(self, training: Mapping[str, Any]) -> None:
        """A training is over: file its summary, and catch up where a tracker failed.

        Args:
            training: what results.json says of it.
        """
        rounds = training["rounds"]
        summary = Point(rounds[-1]["round"], self._time, dict(final(training)))
        for tracker in self._trackers:
            if tracker not in self._good:
                self._attempt(tracker, lambda t=tracker: t.begin(self._about, self._dated(rounds)))
            if tracker in self._good:
                self._attempt(tracker, lambda t=tracker: t.finish(summary))

    def _describe(self, method: str, seed: int) -> About:
        others = tuple(f"{name}." for name in self._config.options if name != method)
        settings = {
            key: value
            for key, value in self._config.flat().items()
            if not key.startswith((*PASSING, *others))
        }
        settings |= {"method": method, "seed": seed}
        folder = self._folder / f"{method}-{seed}"
        return About(self._config.run.name, method, seed, folder, settings)

    def _before(self) -> list[Point]:
        """The rounds of the run's earlier tries."""
        text = (self._about.folder / checkpoint.FACTS).read_text()
        return self._dated(json.loads(text)["history"])

    def _dated(self, rounds: Sequence[Mapping[str, Any]]) -> list[Point]:
        """Round entries as points; the journal knows when each round was."""
        mine = (self._about.method, self._about.seed)
        told = {
            event["round"]: event
            for event in self._journal.past("round")
            if (event["method"], event["seed"]) == mine
        }
        points = []
        for entry in rounds:
            event = told.get(entry["round"], {})
            # A round that the journal lost was soon after the one before it.
            self._time = event.get("time", self._time)
            if event.get("seconds") == entry["seconds"]:  # the same try of the round
                entry = event  # which also says how long its checkpoint took
            points.append(Point(entry["round"], self._time, dict(numbers(entry))))
        return points

    def _attempt(self, tracker: Tracker, step: Callable[[], None]) -> None:
        try:
            step()
            self._good.add(tracker)
        except Exception as error:
            self._good.discard(tracker)
            with suppress(Exception):
                tracker.stop()
            if tracker in self._told:
                return
            self._told.add(tracker)
            why = " ".join(str(error).split())[:200] or type(error).__name__
            text = f"{tracker.title} cannot be written ({why}); training goes on without it"
            self._journal.trouble("tracking", "", text)


def numbers(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a round entry under a name: `accuracy`, `weights/anna`, `phases/train`."""
    for key, value in entry.items():
        name = prefix + str(key)
        if not prefix and key in NO_NUMBERS:
            continue
        if key == "bytes":  # `to source model`
            value = {str(k).replace(" ", "-"): v for k, v in value.items()}
        if isinstance(value, Mapping):
            yield from numbers(value, f"{name}/")
        elif isinstance(value, list | tuple):
            yield from numbers({str(i): v for i, v in enumerate(value)}, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def final(training: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The summary of a training, without what was not measured."""
    found = {
        "final/accuracy": training["final_accuracy"],
        "final/selected-accuracy": training["selected_accuracy"],
        "final/selected-round": training["selected_round"],
        "final/seconds": training["seconds"],
        "final/bytes": sum(training["bytes"].values()),
    }
    yield from ((name, float(value)) for name, value in found.items() if value is not None)
