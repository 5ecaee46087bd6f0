"""Curves on Weights & Biases, or with WANDB_MODE=offline in files that `wandb sync` sends later.

Numbers and settings go where wandb's own environment says and nowhere else: the project's code,
its console and the machine's load are not sent. The package is optional, and imported only here.
"""

import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fedda.errors import ConfigError
from fedda.files import replacing

from .trackers import About, Point

NOTE = "wandb.json"  # in a training's folder: its run, and the last round that was logged
PRIVATE = {
    **dict.fromkeys(("WANDB_DISABLE_CODE", "WANDB_DISABLE_GIT", "WANDB_SILENT"), "true"),
    **dict.fromkeys(("WANDB__DISABLE_STATS", "WANDB_X_DISABLE_STATS"), "true"),
    "WANDB_CONSOLE": "off",
}


class WandB:
    """One run per training; a resumed training finds its run's id in its folder.

    Args:
        project: the project's name there, or ENTITY/PROJECT.
        base: the folder for wandb's own files.

    Raises:
        ConfigError: wandb is not installed.
    """

    title = "Weights & Biases"

    def __init__(self, project: str, base: Path) -> None:
        os.environ |= {k: os.environ.get(k, v) for k, v in PRIVATE.items()}
        try:
            self._wandb = import_module("wandb")
        except ImportError:
            raise ConfigError(
                f"track.wandb is '{project}', but wandb is not installed on the server; install it "
                'by pip install "fedda[wandb]", or leave the setting out.'
            ) from None
        self._project, self._base = project, base
        self._run: Any = None

    def begin(self, about: About, points: Sequence[Point]) -> None:
        """See Tracker."""
        self.stop()
        self._note = about.folder / NOTE
        run, self._last = self._known(points[-1].step if points else 0)
        entity, _, project = self._project.rpartition("/")
        named = f"{about.run} {about.folder.name}"
        self._run = self._wandb.init(
            entity=entity or None,
            project=project,
            name=named,
            group=about.run,
            id=run or None,
            resume="allow" if run else None,
            dir=str(self._base),
            config=dict(about.settings),
        )
        about.folder.mkdir(parents=True, exist_ok=True)
        self._keep()
        for point in points:
            self.add(point)

    def add(self, point: Point) -> None:
        """See Tracker."""
        if point.step > self._last:
            self._run.log(dict(point.numbers), step=point.step)
            self._last = point.step
            self._keep()

    def finish(self, point: Point) -> None:
        """See Tracker."""
        run, self._run = self._run, None
        run.summary.update(dict(point.numbers))
        run.finish()

    def stop(self) -> None:
        """See Tracker."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=1)

    def _known(self, last: int) -> tuple[str, int]:
        """The run of the training's earlier rounds, and their last; none if it has later ones.

        What was logged cannot be taken back, so a training that began afresh needs a new run.
        """
        try:
            noted = json.loads(self._note.read_text())
            if noted["project"] == self._project and noted["step"] <= last:
                return str(noted["run"]), int(noted["step"])
        except (OSError, ValueError, LookupError, TypeError):
            pass
        return "", 0

    def _keep(self) -> None:
        noted = {"project": self._project, "run": self._run.id, "step": self._last}
        with replacing(self._note) as part:
            part.write_text(json.dumps(noted))
