"""From a run's journal to curves, in TensorBoard's files and, if asked for, elsewhere.

The journal's event `training` opens the curves of one method and seed; every event `round` adds a
point to each. Curves show what the checkpoint holds, so a resumed run continues them without gaps
or repeated points. Curves are a convenience: a tracker that fails is reported once and tried again
with the next training, and the run goes on.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedda.results.read import REFINED, label
from fedda.settings import RunConfig

from .. import checkpoint
from ..journal import Event, Journal
from .mlflow_runs import MLflow
from .trackers import About, Point, TensorBoard, Tracker
from .wandb_runs import WandB

# Settings that may differ between the tries of a run, and so do not describe it.
PASSING = ("run.dir", "run.name", "run.resume", "run.expect", "run.seeds", "wait.", "track.")
# Keys of a round entry that are no curves.
NO_NUMBERS = ("event", "time", "method", "seed", "target", "round", REFINED)


class Tracking:
    """Listens to a run's journal inside its `with` block, and passes points to the trackers.

    Args:
        config: the run's settings.
        folder: the run's folder.
        journal: the run's journal, which also records, once, each tracker that fails.

    Raises:
        ConfigError: a tracker that is asked for is not installed, or its address holds a password.
    """

    def __init__(self, config: RunConfig, folder: Path, journal: Journal) -> None:
        self._config = config
        self._folder = folder
        self._journal = journal
        self._trackers: list[Tracker] = [TensorBoard()] if config.track.tensorboard else []
        if config.track.mlflow:
            place = MLflow(config.track.mlflow, config.track.experiment, Path(config.run.dir))
            self._trackers.append(place)
        if config.track.wandb:
            self._trackers.append(WandB(config.track.wandb, Path(config.run.dir)))
        self._complete: set[Tracker] = set()  # those with all rounds of the current training
        self._reported: set[Tracker] = set()  # those that failed
        self._about = About("", "", 0, folder, {})
        self._time = 0.0  # when the newest round ended

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
        """Handle one event; only `training` and `round` matter to curves."""
        if event["event"] == "training":
            target = event.get("target", "")
            self._about = self._describe(event["method"], event["seed"], target)
            rounds = self._earlier if event["round"] else list
            for tracker in self._trackers:
                self._attempt(tracker, lambda t=tracker: t.begin(self._about, rounds()))
        elif event["event"] == "round":
            point = Point(event["round"], event["time"], dict(numbers(event)))
            self._time = point.time
            for tracker in filter(self._complete.__contains__, self._trackers):
                self._attempt(tracker, lambda t=tracker: t.add(point))

    def finished(self, training: Mapping[str, Any]) -> None:
        """Add a finished training's summary, and all its rounds to trackers that failed meanwhile.

        Args:
            training: its entry in results.json.
        """
        rounds = training["rounds"]
        summary = Point(rounds[-1]["round"], self._time, dict(final(training)))
        for tracker in self._trackers:
            if tracker not in self._complete:
                self._attempt(tracker, lambda t=tracker: t.begin(self._about, self._dated(rounds)))
            if tracker in self._complete:
                self._attempt(tracker, lambda t=tracker: t.finish(summary))

    def _describe(self, method: str, seed: int, target: str = "") -> About:
        others = tuple(f"{name}." for name in self._config.options if name != method)
        settings = {
            key: value
            for key, value in self._config.flat().items()
            if not key.startswith((*PASSING, *others))
        }
        settings |= {"method": method, "seed": seed} | ({"run.target": target} if target else {})
        folder = self._folder / label(method, seed, target)
        return About(self._config.run.name, method, seed, folder, settings, target)

    def _earlier(self) -> list[Point]:
        """The rounds of the run's earlier tries, from its checkpoint."""
        text = (self._about.folder / checkpoint.FACTS).read_text()
        return self._dated(json.loads(text)["history"])

    def _dated(self, rounds: Sequence[Mapping[str, Any]]) -> list[Point]:
        """Round entries as points, with the times that the journal recorded."""
        current = (self._about.method, self._about.seed, self._about.target)
        events = {
            event["round"]: event
            for event in self._journal.past("round")
            if (event["method"], event["seed"], event.get("target", "")) == current
        }
        points = []
        for entry in rounds:
            event = events.get(entry["round"], {})
            # A round that the journal lost gets the time of the round before it.
            self._time = event.get("time", self._time)
            if event.get("seconds") == entry["seconds"]:  # the same try of the round
                entry = event  # the event also has the time that its checkpoint took
            points.append(Point(entry["round"], self._time, dict(numbers(entry))))
        return points

    def _attempt(self, tracker: Tracker, step: Callable[[], None]) -> None:
        try:
            step()
            self._complete.add(tracker)
        except Exception as error:
            self._complete.discard(tracker)
            with suppress(Exception):
                tracker.stop()
            if tracker in self._reported:
                return
            self._reported.add(tracker)
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
    """The numbers of a training's summary, without those that were not measured."""
    summary = {
        "final/accuracy": training["final_accuracy"],
        "final/selected-accuracy": training["selected_accuracy"],
        "final/selected-round": training["selected_round"],
        "final/seconds": training["seconds"],
        "final/bytes": sum(training["bytes"].values()),
        "final/refined-accuracy": (training.get(REFINED) or {}).get("accuracy"),
    }
    yield from ((name, float(value)) for name, value in summary.items() if value is not None)
