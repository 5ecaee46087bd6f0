"""Curves on an MLflow server, or in a database that MLflow reads.

Numbers go to the address that the operator gave and nowhere else. MLflow is an optional dependency
and imported only where it is used, as importing it takes long.
"""

import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedda.config import Flat
from fedda.errors import ConfigError

from .trackers import About, Point

NOTE = "mlflow.json"  # in a training's folder: its MLflow run
DATABASE = "mlflow.db"
MOST = {"metrics": 1000, "params": 100}  # the most in one request to MLflow
LONGEST = 6000  # characters of a parameter; longer ones are cut
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")

# By default MLflow reports its use, and tries an unreachable server for minutes.
PRIVATE = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MLflow:
    """One MLflow run per training; a resumed training finds its run's id in its folder.

    Args:
        place: a server's address, or a folder for a database.
        experiment: MLflow's name for a group of runs.
        base: the folder to which a relative `place` belongs.

    Raises:
        ConfigError: MLflow is not installed, or the address holds a password.
    """

    title = "MLflow"

    def __init__(self, place: str, experiment: str, base: Path) -> None:
        if _has_secret(place):
            raise ConfigError(
                "track.mlflow holds a password, which the run's results would show; give "
                "it by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead."
            )
        os.environ |= PRIVATE | {k: os.environ.get(k, v) for k, v in PATIENCE.items()}
        try:
            import mlflow  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"track.mlflow is '{place}', but MLflow is not installed on the server; install "
                'it by pip install "fedda[mlflow]", or leave the setting out.'
            ) from None
        for chatty in ("mlflow", "alembic"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self._place = place
        self._folder = None if "://" in place or place == "databricks" else base / place
        self._experiment = experiment
        self._run = ""
        self._logged: dict[str, set[int]] = {}

    def begin(self, about: About, points: Sequence[Point]) -> None:
        """See Tracker."""
        self.stop()
        self._client = self._connect()
        note = about.folder / NOTE
        self._run = self._known(note, points[-1].step if points else 0)
        if self._run:
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._logged = {}
            self._run = self._new(about)
            about.folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps({"place": self._place, "run": self._run}))
        self._describe(about.settings)
        self._log(points)

    def add(self, point: Point) -> None:
        """See Tracker."""
        self._log([point])

    def finish(self, point: Point) -> None:
        """See Tracker."""
        self._log([point])
        run, self._run = self._run, ""
        self._client.set_terminated(run, "FINISHED")

    def stop(self) -> None:
        """See Tracker."""
        run, self._run = self._run, ""
        if run:
            self._client.set_terminated(run, "KILLED")

    def _connect(self) -> Any:
        from mlflow import MlflowClient

        if self._folder is None:
            return MlflowClient(self._place)
        self._folder.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():  # MLflow's own, of how it uses SQLAlchemy
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"mlflow\.")
            return MlflowClient(f"sqlite:///{(self._folder / DATABASE).absolute()}")

    def _known(self, note: Path, last: int) -> str:
        """The id of the run that holds the training's earlier rounds and no later ones, or ""."""
        from mlflow.exceptions import MlflowException

        try:
            noted = json.loads(note.read_text())
            run = self._client.get_run(noted["run"]) if noted["place"] == self._place else None
        except (FileNotFoundError, ValueError, LookupError):
            return ""
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return ""
            raise
        if run is None or run.info.lifecycle_stage == "deleted":
            return ""
        run_id = run.info.run_id
        history = {name: self._client.get_metric_history(run_id, name) for name in run.data.metrics}
        self._logged = {name: {each.step for each in points} for name, points in history.items()}
        newest = max((max(steps) for steps in self._logged.values()), default=0)
        # MLflow deletes no points, so a training that began afresh needs a new run.
        return run_id if newest <= last else ""

    def _new(self, about: About) -> str:
        existing = self._client.get_experiment_by_name(self._experiment)
        if existing is None:
            # The database asks for a folder of files, though only numbers are written.
            files = self._folder and (self._folder / "files").absolute().as_uri()
            experiment = self._client.create_experiment(self._experiment, artifact_location=files)
        else:
            experiment = existing.experiment_id
        name = f"{about.run} {about.folder.name}"
        tags = {"fedda.run": about.run, "fedda.method": about.method}
        tags |= {"fedda.target": about.target} if about.target else {}
        return self._client.create_run(experiment, run_name=name, tags=tags).info.run_id

    def _describe(self, settings: Flat) -> None:
        """Log the settings, without those of an earlier try, which MLflow does not let change."""
        from mlflow.entities import Param

        logged = self._client.get_run(self._run).data.params
        new = [Param(k, str(v)[:LONGEST]) for k, v in settings.items() if k not in logged]
        for part in _parts(new, MOST["params"]):
            self._client.log_batch(self._run, params=part)

    def _log(self, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        new = []
        for point in points:
            for name, value in point.numbers.items():
                key = NOT_IN_NAMES.sub(lambda match: f"_{ord(match[0]):x}_", name)
                if point.step not in self._logged.setdefault(key, set()):
                    self._logged[key].add(point.step)
                    new.append(Metric(key, value, round(point.time * 1000), point.step))
        for part in _parts(new, MOST["metrics"]):
            self._client.log_batch(self._run, metrics=part)


def _has_secret(place: str) -> bool:
    """Whether an address holds a password, or a token in place of a user's name."""
    try:
        parts = urlsplit(place)
    except ValueError:  # not an address, which MLflow will say
        return False
    return bool(parts.password or (parts.scheme in ("http", "https") and parts.username))


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    return (items[i : i + most] for i in range(0, len(items), most))
