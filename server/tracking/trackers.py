"""Trackers, which show curves: what every tracker must do, and TensorBoard's event files."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from fedda.config import Flat

FINAL = (
    "accuracy",
    "selected-accuracy",
    "selected-round",
    "seconds",
    "bytes",
    "refined-accuracy",
)

EVENTS = (
    "events.out.tfevents."  # TensorBoard finds files by this prefix, and reads them sorted by name
)
OWN = ".fedda"  # how their names end


@dataclass(frozen=True)
class About:
    """One training, as trackers name and describe its curves.

    Attributes:
        run: the run's name.
        method: the training's method.
        seed: the seed of its random draws.
        folder: the training's folder.
        settings: the run's settings that matter to the training.
        target: the target that adapts, if the run has several.
    """

    run: str
    method: str
    seed: int
    folder: Path
    settings: Flat
    target: str = ""


@dataclass(frozen=True)
class Point:
    """One round's value in every curve."""

    step: int
    time: float  # in seconds since 1970
    numbers: Mapping[str, float]


class Tracker(Protocol):
    """A place where curves are shown. Whatever it raises, the run goes on."""

    title: str

    def begin(self, about: About, points: Sequence[Point]) -> None:
        """Open a training's curves, new or an earlier try's, so that they hold exactly `points`."""
        ...

    def add(self, point: Point) -> None:
        """Add one more round."""
        ...

    def finish(self, point: Point) -> None:
        """Add the summary of a finished training, and close its curves."""
        ...

    def stop(self) -> None:
        """Close the curves of an unfinished training, if any are open."""
        ...


class TensorBoard:
    """An event file in each training's folder: `tensorboard --logdir RUN`.

    Records are written one by one and not by SummaryWriter, whose thread notices a full disk late
    and prints a traceback of its own. A resumed training gets a new file with all its rounds, which
    replaces the earlier one: a program that reads all files finds each round once.
    """

    title = "TensorBoard"

    def __init__(self) -> None:
        import torch.utils.tensorboard.summary  # noqa: F401  here, as it takes time and memory

        self._file: IO[bytes] | None = None

    def begin(self, about: About, points: Sequence[Point]) -> None:
        """See Tracker."""
        from torch.utils.tensorboard import RecordWriter
        from torch.utils.tensorboard.summary import hparams, text

        self.stop()
        about.folder.mkdir(parents=True, exist_ok=True)
        path = about.folder / f"{EVENTS}{time.time():017.6f}{OWN}"
        try:
            self._file = path.open("wb")
            self._records = RecordWriter(self._file)
            self._write(file_version="brain.Event:2")
            # START makes an open TensorBoard forget what it has read from the older files.
            self._write(step=0, session_log={"status": "START"})
            lines = [f"| {key} | {value} |" for key, value in about.settings.items()]
            table = "\n".join(["| setting | value |", "| --- | --- |", *lines])
            self._write(step=0, summary=text("settings", table))
            metrics = dict.fromkeys((f"final/{name}" for name in FINAL), 0.0)
            *beginning, self._ended = hparams(dict(about.settings), metrics)
            for summary in beginning:
                self._write(step=0, summary=summary)
            for point in points:
                self._scalars(point)
            self._file.flush()
            _replaced(about.folder, path)
        except BaseException:
            self.stop()
            path.unlink(missing_ok=True)
            raise

    def add(self, point: Point) -> None:
        """See Tracker."""
        self._scalars(point)
        if self._file:
            self._file.flush()

    def finish(self, point: Point) -> None:
        """See Tracker."""
        self._scalars(point)
        self._write(step=point.step, summary=self._ended)
        if self._file:
            self._file.close()
            self._file = None

    def stop(self) -> None:
        """See Tracker."""
        file, self._file = self._file, None
        with suppress(OSError):  # closing fails again where writing failed
            if file:
                file.close()

    def _scalars(self, point: Point) -> None:
        from torch.utils.tensorboard.summary import scalar

        for name, value in point.numbers.items():
            self._write(step=point.step, wall_time=point.time, summary=scalar(name, value))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        proto: Any = event_pb2  # protobuf makes its classes on import
        event = proto.Event(**({"wall_time": time.time()} | fields))
        self._records.write(event.SerializeToString())


def _replaced(folder: Path, newest: Path) -> None:
    """Empty the files before the newest; an open TensorBoard stops reading if it finds one gone."""
    for older in folder.glob(f"{EVENTS}*{OWN}"):
        if older.name < newest.name:
            if older.stat().st_size:
                os.truncate(older, 0)
            else:  # emptied by an earlier try, so TensorBoard has gone on to the next file
                older.unlink()
