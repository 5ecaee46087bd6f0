"""The frozen part of a pretrained network at a site: it runs once per image, and never again.

Its weights are the site's own copy, and must have the hash that the request names. Its outputs stay
in memory, and with a folder to keep them in also on the site's disk.
"""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedda import data, models
from fedda.config import ModelConfig
from fedda.data.augment import Augmentation, augmentation
from fedda.errors import ModelError, WeightsError
from fedda.files import keep_newest, keeping
from fedda.settings import Task
from fedda.train import generator

from .reading import logger as progress
from .reading import shown

logger = logging.getLogger("fedda.site")

BATCH = 64  # images at a time
DIGEST = 16  # bytes
FILES = 64  # of outputs that stay on the disk

Images = TypeVar("Images", bound=data.Labelled | data.Unlabelled)


def _of(task: Task) -> tuple[Any, ...]:
    """What the outputs for an image depend on."""
    return task.model, task.frozen, task.inputs


class Frozen:
    """The frozen parts that a site needs, and what they give for its images.

    Args:
        device: where they run.
        folder: where outputs are kept; None: in memory only.
        weights: this site's own file of weights, for runs whose weights come from a file; or empty.
        name: the site's, for its progress.
    """

    def __init__(
        self, device: torch.device, folder: Path | None, weights: str, name: str = ""
    ) -> None:
        self._name = name
        self._device = device
        self._folder = folder
        self._weights = weights
        self._parts: dict[tuple[Any, ...], models.Backbone] = {}
        self._taken: dict[tuple[Any, ...], Any] = {}
        self._views: dict[tuple[Any, ...], Tensor] = {}

    def forget(self) -> None:
        """Forget the outputs, as the images have changed."""
        self._taken, self._views = {}, {}

    def part(self, task: Task) -> models.Backbone | None:
        """The frozen part of a training's network; None if all of it learns.

        Raises:
            WeightsError: its weights are not on this machine, or are not the server's.
        """
        if not task.model.freezes:
            return None
        key = (task.model, task.frozen, task.dims)
        if key not in self._parts:
            self._parts = {key: self._make(task)}
        return self._parts[key]

    def outputs(self, what: str, task: Task, images: Images) -> Images:
        """The same examples as a model takes them that learns without its frozen part: its outputs.

        Args:
            what: `train` or `test`; the last set of each stays in memory.
            task: names the part.
            images: as bytes or floats, (N, channels, H, W).

        Raises:
            ModelError: as for `part`.
        """
        part = self.part(task)
        assert part is not None
        names = task.names if what == "test" else ()
        key = (what, *_of(task), names)
        if key not in self._taken:
            self._taken = {k: v for k, v in self._taken.items() if k[0] != what}
            content = self._content(images.x)
            self._taken[key] = replace(images, x=self._computed(task, images.x, content, part))
        return self._taken[key]

    def views(self, task: Task, images: data.Labelled | data.Unlabelled) -> Tensor:
        """The outputs for V views of each image, changed by `train.augment` -> (V, N, *out).

        They are computed once, too, so a training sees the same V views in every round.

        Raises:
            ConfigError: there is no such augmentation.
            ModelError: as for `part`.
        """
        names, part = task.train.augment, self.part(task)
        assert part is not None
        key = (*_of(task), names, task.train.views)
        if key not in self._views:
            content, change = self._content(images.x), augmentation(names)
            found = [
                self._computed(task, images.x, content, part, change, f"{names} {view}")
                for view in range(task.train.views)
            ]
            self._views = {key: torch.stack(found)}
        return self._views[key]

    def own(self, config: ModelConfig) -> ModelConfig:
        """The same network, with this site's own file in place of a file of the server's.

        Raises:
            WeightsError: this site has none.
        """
        if not models.is_file(config.weights):
            return config
        if not self._weights:  # a server must not choose a path that is opened here
            raise WeightsError(
                f"The pretrained weights of this run come from a file, '{config.weights}' at the "
                "server; start this site with --weights and its own copy of that file."
            )
        return config.model_copy(update={"weights": self._weights})

    def _make(self, task: Task) -> models.Backbone:
        config = self.own(task.model)
        try:
            made = models.backbone(config, task.dims)
        except ModelError as error:
            raise WeightsError(str(error)) from error
        if (found := made.digest()) != task.frozen:
            raise WeightsError(
                f"The weights '{config.weights}' of {config.name} at this site have the hash "
                f"{found}, but the server's have {task.frozen}; install the same file or package "
                "at both."
            )
        return made.to(self._device)

    def _content(self, x: Tensor) -> str:
        """A digest of images; empty if nothing is kept on disk."""
        if self._folder is None:
            return ""
        content = hashlib.blake2b(f"{tuple(x.shape)} {x.dtype}".encode(), digest_size=DIGEST)
        for images in x.split(BATCH):  # they may lie on the disk, and be more than memory holds
            content.update(images.contiguous().numpy().data)
        return content.hexdigest()

    @torch.no_grad()
    def _computed(
        self,
        task: Task,
        x: Tensor,
        content: str,
        part: models.Backbone,
        augment: Augmentation | None = None,
        view: str = "",
    ) -> Tensor:
        """Outputs for all images, or for a view of all -> (N, *out) float32, on the CPU."""
        place = None
        if self._folder is not None:
            about = f"{task.frozen} {content} {view}"
            name = hashlib.blake2b(about.encode(), digest_size=DIGEST).hexdigest()
            place = self._folder / f"{name}.safetensors"
            if (kept := _read(place, len(x))) is not None:
                return kept
        what = f"images of {self._name}" if self._name else "images"
        progress.info("computing features of %d %s with %s, once", len(x), what, task.model.name)
        draws, parts = generator("view", view), []
        with shown(f"features of {what}", "computed", bar=False) as report:
            for number, images in enumerate(x.split(BATCH)):
                report(number * BATCH, len(x))
                inputs = models.as_inputs(images, self._device)
                inputs = inputs if augment is None else augment(inputs, draws)
                parts.append(part(inputs).float().cpu())
        found = torch.cat(parts)
        if place is not None:
            _keep(place, found)
        return found


def _read(place: Path, count: int) -> Tensor | None:
    try:
        kept = load_file(place)["outputs"]
    except (OSError, SafetensorError, KeyError):
        return None  # not there, or damaged
    return kept if len(kept) == count else None


def _keep(place: Path, found: Tensor) -> None:
    try:
        with keeping(place) as part:
            save_file({"outputs": found}, part)
        keep_newest(place.parent.glob("*.safetensors"), FILES)
    except (OSError, SafetensorError) as error:  # a full disk costs time, not the round
        logger.warning("features cannot be kept on disk (%s)", error)
