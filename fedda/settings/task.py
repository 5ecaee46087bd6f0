"""The description of a training that sites receive: what their parts need, and no more."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import Field, field_validator

from fedda import config, plugins
from fedda.config import inputs, sections
from fedda.errors import ConfigError
from fedda.methods import Method, Stage, read_schedule
from fedda.secure import hiding

_read: dict[str, "tuple[Method, Task]"] = {}  # by its text the last one, which each request repeats


class Task(sections.Section):
    """One training, as its sites receive it."""

    run: str = Field(default="run", pattern=r"^[\w.-]+$")
    method: str = config.DEFAULT
    seed: int = Field(default=0, ge=0)
    rounds: int = Field(default=20, ge=1)
    schedule: str = Field(default="", description="the phases and their rounds, in order")
    target: str = Field(default="", description="the adapting target, if the run has several")
    shape: str = Field(
        default="", pattern=r"^(\d{1,7}|\d,\d{1,4},\d{1,4})?$", description="one input: C,H,W or d"
    )
    resize: inputs.Resize = Field(default="stretch", description="how images come to that shape")
    window: config.Window = Field(default="", description="gray values that become black and white")
    missing: inputs.Missing = Field(
        default=inputs.REFUSE, description="what becomes of gaps in vectors"
    )
    column_names: str = Field(default="", description="one line per column of tables of numbers")
    class_names: str = Field(default="", description="one line per class, in the labels' order")
    sites: int = Field(default=0, ge=0, le=10_000, description="number of sites, of all roles")
    secure: config.Secure = "none"
    frozen: str = Field(
        default="", pattern=r"^[0-9a-f]*$", description="hash of the weights that do not travel"
    )
    model: config.ModelConfig = config.ModelConfig()
    train: config.TrainConfig = config.TrainConfig()
    privacy: config.PrivacyConfig = config.PrivacyConfig()
    refine: config.Refine = Field(default="none", description="the target's last step")
    shares: config.Shares = "auto"
    wire: config.WireConfig = config.WireConfig()
    options: Any = None

    @field_validator("target")
    @classmethod
    def _is_site_name(cls, name: str) -> str:
        if name and not config.is_site_name(name):  # sites use it in names of files
            raise ValueError("it is not the name of a site")
        return name

    @property
    def training(self) -> str:
        """The name of this training in a site's files, and in what sites sign for one another."""
        return f"{self.run}.{self.label}"

    @property
    def label(self) -> str:
        """The training's name within its run."""
        return f"{self.method}-{self.seed}" + (f"-{self.target}" if self.target else "")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all settings, which tells this training from every other."""
        return hashlib.sha256(json.dumps(self.flat(), sort_keys=True).encode()).hexdigest()

    @cached_property
    def about(self) -> Method:
        """The method's phases and contract."""
        return hiding.through(plugins.method(self.method), self.secure, self.options)

    @property
    def hidden(self) -> hiding.Hidden:
        """How the sources' models are hidden from the server."""
        if self.secure == "sum":
            return "sum"
        return "sealed" if hiding.seals(plugins.method(self.method), self.options) else "none"

    @property
    def stays(self) -> bool:
        """Whether the adapted model stays at the target."""
        return self.about.stays(self.options)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The phases with their rounds."""
        return read_schedule(self.about, self.schedule)

    def stage(self, server_round: int) -> Stage:
        """Return the phase that a round belongs to, with its rounds.

        Raises:
            ConfigError: the training does not have this round.
        """
        for stage in self.stages:
            if stage.first <= server_round <= stage.last:
                return stage
        raise ConfigError(f"Round {server_round} is in no phase of '{self.schedule[:80]}'.")

    @property
    def names(self) -> tuple[str, ...]:
        """Class names in the order of the labels."""
        return tuple(self.class_names.split("\n")) if self.class_names else ()

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.names)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of one input: (channels, height, width) or (d,).

        Raises:
            ConfigError: the training names none.
        """
        if not self.shape:
            raise ConfigError("The training does not say which shape its inputs have.")
        return tuple(int(n) for n in self.shape.split(","))

    @cached_property
    def suspect(self) -> str:
        """What of a site's data makes the training diverge or learn nothing; empty if nothing."""
        return inputs.suspect(self.dims, self.window) if self.shape else ""

    @property
    def inputs(self) -> inputs.Inputs:
        """The shape of one input, and how images and vectors come to it."""
        columns = tuple(self.column_names.split("\n")) if self.column_names else ()
        return inputs.Inputs(self.dims, self.resize, self.window, self.missing, columns)

    @classmethod
    def parse(cls, flat: Mapping[str, Any]) -> "Task":
        """Read what `flat` wrote.

        Raises:
            ConfigError: a key is unknown, a value is out of range, or the schedule does not end
                with the training's last round.
        """
        text = repr(sorted(flat.items()))
        method, task = _read.get(text, (None, None))
        if task is None or plugins.method(task.method) is not method:
            task = cls._parsed(flat)
            _read.clear()
            _read[text] = plugins.method(task.method), task
        return task

    @classmethod
    def _parsed(cls, flat: Mapping[str, Any]) -> "Task":
        tree = sections.unflatten(flat)
        options = plugins.method(str(tree.get("method", ""))).config
        tree["options"] = sections.validate(options, tree.get("options", {}))
        task = sections.validate(cls, tree)
        about = plugins.method(task.method)
        hiding.check_noise(about, task.privacy, task.model, task.train, task.window, task.missing)
        task.about.check_encoder(task.options, task.model)
        task.about.check_steps(task.options, task.model, task.train)
        if not task.stages or task.stages[-1].last != task.rounds:
            raise ConfigError(
                f"The training's schedule '{task.schedule[:80]}' must end with its last round, "
                f"{task.rounds}."
            )
        return task
