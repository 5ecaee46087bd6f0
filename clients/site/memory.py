"""What stays in memory at a site: its data, its models and their optimizers, on its device."""

import logging
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from fedda import __version__, data, plugins
from fedda.config.inputs import Inputs
from fedda.config.site_config import SiteConfig
from fedda.data import categories, naming
from fedda.data.naming import listed
from fedda.errors import BatchError, ConfigError
from fedda.settings import Task
from fedda.train import generator, repeatable
from fedda.wire import MOST_TOLD, Role

from ..policy.audit_log import AuditLog
from ..policy.gate import Gate
from ..policy.rules import Policy
from . import blocks, reading, teacher
from .blocks import Blocks, secret
from .frozen import Frozen
from .identity import Drawer, Identity
from .origin import Origin
from .output_privacy import FEW
from .sealed import Sealed
from .summed import Summed
from .workspace import ModelCache, Workspace

logger = logging.getLogger("fedda.site")

T = TypeVar("T")

FROZEN = "frozen"  # folder of what the frozen part of a network gives for this site's images


class Site:
    """One site: its role, its folder of data and the device it trains on.

    Args:
        node: the settings of `SiteConfig`, as a flat table.

    Raises:
        ConfigError: one of them is missing, unknown or impossible.
    """

    def __init__(self, node: Mapping[str, Any]) -> None:
        config = SiteConfig.parse(node)
        self.config = config
        self.role: Role = config.role
        self.path = config.data
        self.name = config.name or self.path.name
        self.device = pick_device(config.device)
        self.min_images, self.min_examples = config.min_images, config.min_examples
        self.state_dir = config.state_dir
        folder = self.state_dir / self.name / "cache" if self.state_dir else None
        self.cache = data.Cache.of(config.cache, folder)
        self.reading = data.Reading.said(config.table())
        # Without a folder to keep the division in, it must be the same after a restart.
        self.reproducible = self.state_dir is None or config.reproducible
        if self.reproducible and self.device.type == "cuda":
            repeatable()
        self.few = 1 if self.reproducible else FEW
        # In an experiment, the few images of a small site are one block, unless a limit is set.
        self._lenient = self.reproducible and "min_images" not in config.model_fields_set
        self._secret = ""
        self.shelf = ModelCache()
        self.noted = ""  # the training whose first note was tried last
        self._obey(config)
        if config.threads:
            # The number of threads changes the last bits of sums, so all engines must use the same.
            torch.set_num_threads(config.threads)
        self._described: data.Description | None = None
        self._said: set[str] = set()  # what is odd about the data
        self._blocks: Blocks | None = None
        self._sets: dict[tuple[Any, ...], Any] = {}
        self._tests: dict[tuple[Any, ...], Any] = {}
        self._workspaces: dict[tuple[Any, ...], Workspace] = {}
        folder = None if self.state_dir is None else self.state_dir / self.name / FROZEN
        own = config.features_dir or folder
        self.frozen = Frozen(self.device, own, str(config.weights or ""), self.name)
        # Whoever simulates sites is their server, too, whose models are then his own.
        self.origin = Origin(self, self.frozen, config.start_from) if config.audited else None
        self.teacher = teacher.shared(config.teacher, self.path, self.reading, self.device)

    def _obey(self, config: SiteConfig) -> None:
        """Let the stricter of the site's policy and its other settings hold."""
        self.policy = policy = Policy.parse(config.policy)
        if config.audited:
            plugins.restrict(policy.allow.plugins)
        protect, self.keep = policy.protect, policy.keep
        self.min_images = max(self.min_images, protect.min_images)
        self.min_examples = max(self.min_examples, protect.min_examples)
        booked = self.state_dir if config.audited else None
        self.trail = AuditLog(booked)
        self.identity = Identity(self.name, config.key, config.peers)
        place = self.state_dir / self.name if self.state_dir else None
        lasting = place if config.forgetful else None
        summed, sealed = (Drawer(lasting and lasting / f"{of}.key") for of in ("summed", "sealed"))
        self.gate = Gate(policy, booked)
        self.summed = Summed(self.identity, policy.secure, place, summed)
        self.sealed = Sealed(self.identity, policy.secure, sealed)
        self.noise = max(config.noise, protect.noise)
        self.clip = math.inf if protect.clip is None else protect.clip
        self.test_noise = max(config.test_noise, protect.test_noise)
        self.notes = self.state_dir is not None and config.notes and policy.keep.notes

    @property
    def labels(self) -> bool:
        """Whether training may read labels here."""
        return self.role == "source"

    def chance(self, task: Task) -> tuple[object, ...]:
        """What this site's random draws of a training begin from: a secret, and all its settings.

        A server that knew or chose the draws could ask twice for steps that differ by one image.
        With the same settings a site draws the same again, so that a training can be resumed. A
        reproducible site's draws depend on the run's seed and its own name.
        """
        if self.reproducible:
            return task.seed, self.name
        assert self.state_dir is not None
        self._secret = self._secret or secret(self.state_dir / self.name)
        return self._secret, task.digest

    @property
    def least_batch(self) -> int:
        """The fewest images that a step of training may be over."""
        return 2 if self._lenient else self.min_images

    def check_batch(self, task: Task) -> None:
        """Check that a training's batches are as large as this site asks for.

        Raises:
            BatchError: they are smaller.
        """
        asked, least = task.train.batch_size, self.least_batch
        if asked < least:
            raise BatchError(
                f"The run's train.batch-size is {asked}, but this site takes no step over fewer "
                f"than {least} images, as a model shows what its last step was over; raise "
                "train.batch-size, or lower --min-images and the policy's protect.min-images."
            )

    def offer(self) -> dict[str, Any]:
        """What this site brings to a run: the only facts about its data that leave it."""
        described = data.describe(self.path, self.role, self.reading)
        if described != self._described:  # the data have changed: those in memory are out of date
            if self._described is not None:
                self.teacher.forget()
            self._sets, self._tests, self._blocks, self._described = {}, {}, None, described
            self.frozen.forget()
        made = offer(self.role, self.name, described, self.identity.complete)
        return made if made["tested"] >= self.few else made | {"tested": 0}

    @property
    def described(self) -> data.Description:
        """What its data are, as it offered them."""
        if self._described is None:
            self.offer()
        assert self._described is not None
        return self._described

    def check_fit(self, task: Task) -> None:
        """Check that this site's data fit a run, before its first round.

        Raises:
            DataError: they do not.
        """
        about = task.window, task.missing, task.inputs.columns
        self.described.check_fit(task.names, *about)
        counts = self.described.counts
        if self.labels and (lacks := [name for name in task.names if not counts.get(name)]):
            names = listed([naming.quoted(name) for name in lacks])  # a server chose them
            logger.warning("the run has classes of which this site has no example: [%s]", names)

    def check_classes(self, task: Task) -> None:
        """Check that a run does not name many classes that no site has.

        Raises:
            PolicyError: it does.
        """
        if self.origin is not None:
            self.gate.check_spare(task, len(self.described.classes) if self.labels else 0)

    @property
    def examples(self) -> int:
        """How many training examples this site offers."""
        return self.described.train

    def training(self, inputs: Inputs) -> "data.Labelled | data.Unlabelled":
        """The training images that are in whole blocks, as a model takes them.

        A target's have no labels.

        Raises:
            ConfigError: the site has too few images for a block.
            DataError: they are no such inputs, or have gaps that the run does not fill.
        """
        if inputs not in self._sets:
            self._sets = {}  # one shape at a time stays in memory
            images, used = self._load(inputs), self.blocks.used
            if len(used) < len(images):
                images = images.take(used)
            self._sets = {inputs: images}
        return self._sets[inputs]

    @property
    def blocks(self) -> Blocks:
        """How the training images are divided.

        Raises:
            ConfigError: the site has too few images for a block.
        """
        if self._blocks is None:
            images = data.identities(self.path, self.role, self.reading)
            least = min(self.min_images, len(images)) if self._lenient else self.min_images
            least = max(least, 2)  # BatchNorm cannot learn from one image
            if self.reproducible:
                found = blocks.fixed(self.name, images, least, self.min_examples)
            else:
                assert self.state_dir is not None
                place = self.state_dir / self.name
                found = blocks.kept(place, images, least, self.min_examples)
            if not found.blocks:
                lower = ", or lower --min-images" if least > 2 else ""
                raise ConfigError(
                    f"This site has {len(images)} images, {len(found.used)} of them in whole "
                    f"blocks, but it trains on {least} or more; add images{lower}."
                )
            self._blocks = found
        return self._blocks

    def _load(self, inputs: Inputs) -> "data.Labelled | data.Unlabelled":
        load = data.load_target if self.role == "target" else data.load_source
        with reading.shown("training images") as shown:
            images = load(self.path, **self._form(inputs), progress=shown)
        if not isinstance(images, data.Labelled):
            return images
        if self.config.poison:
            # The same labels are wrong in every round and run: a bad site, not a noisy one.
            images = data.poison(images, self.config.poison, generator("poison", self.name))
            logger.warning("poison: %g%% of this site's labels are flipped", self.config.poison)
        return images

    def draws_of_noise(self, seed: int) -> np.random.Generator:
        """What draws noise, at a real site by chance: the same twice would hide nothing."""
        return np.random.default_rng(seed if self.reproducible else None)

    def _form(self, inputs: Inputs) -> dict[str, Any]:
        """How images and vectors are converted.

        Which columns of a table are taken, and in which order, is the site's choice: it has offered
        their names, and no run chooses among them. A run says how to code those of texts.

        Raises:
            DataError: the run is of other columns, as if the site had come back with other data.
        """
        own = self.described.columns
        columns = inputs.columns if own else ()
        categories.check_are_of(self.path, columns, own)
        form = self.reading.form(inputs._replace(columns=columns))
        return form | {"cache": self.cache, "notice": self.say}

    def evaluation(self, inputs: Inputs, classes: tuple[str, ...]) -> "data.Labelled | None":
        """The labelled test files, apart from the training images; only a test opens them.

        Labels are numbered as the run numbers its classes, by name.
        """
        key = (inputs, classes)
        if key not in self._tests:
            with reading.shown("test images") as shown:
                form = self._form(inputs)
                tests = data.load_evaluation(self.path, classes=classes, **form, progress=shown)
            self._tests = {key: tests}
        return self._tests[key]

    def say(self, text: str) -> None:
        """Log once what each training would say again, such as what is odd about the data."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s: %s", self.name, text)

    def learnt_from(self, task: Task) -> "data.Labelled | data.Unlabelled":
        """What the run's model takes, for every training image: images, or a frozen part's outputs.

        Labels are numbered as the run numbers its classes, by name.

        Raises:
            ConfigError: the site has too few images for a block.
            DataError: the site has a class that the run has not.
            ModelError: the weights of the frozen part are not on this machine.
        """
        images = self.training(task.inputs)
        if task.model.freezes:
            images = self.frozen.outputs("train", task, images)
        return _named(images, task)

    def taught(self, task: Task) -> torch.Tensor | None:
        """What the site's own teacher says of its training images -> (N, C); None without one."""
        return self.teacher.answers(task.names, self.blocks.used, self.examples)

    def views(self, task: Task) -> torch.Tensor:
        """A frozen part's outputs for V augmented views of these images -> (V, N, *out).

        Raises:
            ConfigError: there is no such augmentation.
            ModelError: the weights of the frozen part are not on this machine.
        """
        return self.frozen.views(task, self.training(task.inputs))

    def tested_on(self, task: Task) -> "data.Labelled | None":
        """The same for the labelled test images; None if there are none, or too few to be told."""
        tests = self.evaluation(task.inputs, task.names)
        if tests is None or len(tests) < self.few:
            return None
        return self.frozen.outputs("test", task, tests) if task.model.freezes else tests

    def tells_classes(self, task: Task) -> bool:
        """Whether a test may tell how each class is answered: never beside noise on its numbers."""
        allowed = self.gate.policy.leaving.classes and not self.test_noise
        return allowed and task.classes <= MOST_TOLD

    def workspace(self, task: Task) -> Workspace:
        """The model and optimizer of one training; they stay in memory after the request."""
        computed = (task.train.precision, task.train.layout)
        key = (task.training, task.model, task.dims, task.names, task.options, computed)
        if key not in self._workspaces:
            self._workspaces = {key: Workspace(self, task)}
        return self._workspaces[key]


def offer(
    role: Role, name: str, description: data.Description, keys: bool = False
) -> dict[str, Any]:
    """Make a site's offer, all that it says about its data; a target does not name its classes."""
    return {
        "role": role,
        "name": name,
        "examples": description.train,
        "tested": description.test,
        "classes": list(description.classes) if role == "source" else [],
        "shape": list(description.shape),
        "columns": list(description.columns),
        "version": __version__,
        "keys": keys,
    }


def _named(images: T, task: Task) -> T:
    """The same examples, their labels numbered as the run numbers its classes; others unchanged."""
    if isinstance(images, data.Labelled) and task.names:
        return data.align(images, task.names)
    return images


def pick_device(text: str) -> torch.device:
    """Choose a device by name, auto, cpu, cuda or cuda:N -> a device that this machine has.

    Raises:
        ConfigError: this machine has no such device.
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


@cache
def resident(node: tuple[tuple[str, Any], ...]) -> Site:
    """The site of a node configuration, made once per process."""
    return Site(dict(node))
