"""What stays in memory at a site: its data, its models and their optimizers, on its device."""

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import optim

from fedda import __version__, data, models, wire
from fedda.config import FEATURES_HIDE, Task
from fedda.errors import ConfigError
from fedda.train import generator, make_optimizer
from fedda.wire import Role

from . import state

logger = logging.getLogger("fedda.site")


class Site:
    """One site: its role, its folder of data and the device it trains on.

    Args:
        node: role, name, data (path), and optionally device, threads, state-dir, notes (false: none
            are taken), poison (percent), min-images (fewer do not make a round here), min-examples
            (no gradient over fewer leaves), noise (on each, in multiples of its largest norm) and
            server (the host that this site dials).
    """

    def __init__(self, node: Mapping[str, Any]) -> None:
        self.role: Role = "target" if node["role"] == "target" else "source"
        self.path = Path(str(node["data"]))
        self.name = str(node.get("name") or self.path.name)
        self.device = pick_device(str(node.get("device", "auto")))
        self.poison = float(node.get("poison", 0))
        self.min_images = int(node.get("min-images", 2))
        self.min_examples = int(node.get("min-examples", FEATURES_HIDE))
        self.noise = float(node.get("noise", 0))
        self.server = str(node.get("server", ""))
        self.state_dir = Path(str(node["state-dir"])) if node.get("state-dir") else None
        self.notes = self.state_dir is not None and bool(node.get("notes", True))
        self.noted = ""  # the training whose first note was tried last
        if node.get("threads"):
            # How sums are split over threads decides their last bits, so engines must agree on it.
            torch.set_num_threads(int(node["threads"]))
        self._described: data.Description | None = None
        self._sets: dict[tuple[int, ...], Any] = {}
        self._tests: dict[tuple[Any, ...], Any] = {}
        self._workspaces: dict[tuple[Any, ...], Workspace] = {}

    def offer(self) -> dict[str, Any]:
        """What this site brings to a run: the only facts about its data that leave it."""
        found = data.describe(self.path, self.role)
        if found != self._described:  # since the last run: what is in memory is not what is offered
            self._sets, self._tests, self._described = {}, {}, found
        return offer(self.role, self.name, found)

    def training(self, shape: tuple[int, ...]) -> "data.Labelled | data.Unlabelled":
        """The training images in the run's shape; a target's have no labels."""
        if shape not in self._sets:
            self._sets = {shape: self._load(shape)}  # one shape at a time stays in memory
        return self._sets[shape]

    def _load(self, shape: tuple[int, ...]) -> "data.Labelled | data.Unlabelled":
        channels, size = _image(shape)
        if self.role == "target":
            return data.load_target(self.path, channels=channels, size=size)
        found = data.load_source(self.path, channels=channels, size=size)
        if self.poison:
            # The same labels are wrong in every round and run: a bad site, not a noisy one.
            found = data.poison(found, self.poison, generator("poison", self.name))
            logger.warning("poison: %g%% of this site's labels are flipped", self.poison)
        return found

    def evaluation(
        self, shape: tuple[int, ...], classes: tuple[str, ...]
    ) -> "data.Labelled | None":
        """The labelled test files, apart from the training images; only a test opens them.

        Labels are numbered as the run numbers its classes, by name.
        """
        if (shape, classes) not in self._tests:
            channels, size = _image(shape)
            found = data.load_evaluation(self.path, classes=classes, channels=channels, size=size)
            self._tests = {(shape, classes): found}
        return self._tests[shape, classes]

    def workspace(self, task: Task) -> "Workspace":
        """The model and optimizer of one training; they outlive the request."""
        key = (task.run, task.method, task.seed, task.model, task.dims, task.names)
        if key not in self._workspaces:
            self._workspaces = {key: Workspace(self, task)}
        return self._workspaces[key]


def offer(role: Role, name: str, found: data.Description) -> dict[str, Any]:
    """What a site says of its data; a target's classes are nobody's business."""
    return {
        "role": role,
        "name": name,
        "examples": found.train,
        "tested": found.test,
        "classes": list(found.classes) if role == "source" else [],
        "shape": list(found.shape),
        "version": __version__,
    }


class Workspace:
    """A model on the site's device, its optimizer, and the layout of its state on the wire."""

    def __init__(self, site: Site, task: Task) -> None:
        self._site = site
        self._task = task
        self._second: models.Model | None = None
        self.model = self._blank()
        self.schema = wire.pack(models.to_arrays(self.model), wire.Kind.MODEL).manifest
        self._kept: dict[tuple[str, int], state.Kept] = {}
        self.dictionary: Any = None  # what FedDaDiL keeps from round to round

    def _blank(self) -> "models.Model":
        # Pretrained or not, the weights come with the server's first message.
        task = self._task
        return models.blank(task.model, task.dims, task.classes).to(self._site.device)

    def second(self) -> "models.Model":
        """Another model beside the one that trains, such as a teacher; made once."""
        if self._second is None:
            self._second = self._blank()
        return self._second

    def optimizer(self, task: Task, rate: float, server_round: int) -> optim.Optimizer:
        """A fresh optimizer, or with `train.carry-momentum` the last round's with a new rate."""
        optimizer = make_optimizer(self.model, task.train, rate)
        if task.train.carry_momentum and server_round > 1:
            kept = self.recall(task, server_round - 1, state.OPTIMIZER)
            if kept is None:
                logger.warning("the optimizer of round %d starts afresh", server_round)
            else:
                rates = [group["lr"] for group in optimizer.param_groups]
                optimizer.load_state_dict(kept.get_optimizer("optimizer"))
                for group, new in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = new
        return optimizer

    def keep(self, optimizer: optim.Optimizer, task: Task, server_round: int) -> None:
        """Remember the optimizer for the next round."""
        if task.train.carry_momentum:
            kept = state.Kept()
            kept.put_optimizer("optimizer", optimizer)
            self.remember(task, server_round, state.OPTIMIZER, kept)

    def remember(self, task: Task, server_round: int, what: str, kept: state.Kept) -> None:
        """Hold on to something for the next round, also on disk if the site has a place.

        What was kept in the round before stays too, since the server may ask for a round again.
        """
        old = (what, server_round - 2)
        self._kept = {key: k for key, k in self._kept.items() if key[0] != what or key > old}
        self._kept[what, server_round] = kept
        state.save(self._site, task, server_round, what, kept)

    def recall(self, task: Task, server_round: int, what: str) -> state.Kept | None:
        """What was remembered in a round, or None."""
        found = self._kept.get((what, server_round))
        return found or state.load(self._site, task, server_round, what)


def pick_device(text: str) -> torch.device:
    """auto, cpu, cuda or cuda:N -> a device that is there.

    Raises:
        ConfigError: the device is not there.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"'{text}' is not a device; use auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"Device {text} is not there: this machine shows {torch.cuda.device_count()} CUDA "
            "devices; use auto or cpu."
        )
    return device


def _image(shape: tuple[int, ...]) -> tuple[int, int]:
    """Channels and size to bring images to; (0, 0) for vectors, which are left as they are."""
    return (shape[0], shape[1]) if len(shape) == 3 else (0, 0)


@cache
def resident(node: tuple[tuple[str, Any], ...]) -> Site:
    """The site of a node configuration, made once per process."""
    return Site(dict(node))
