"""What is attacked: a run's model and settings, and a site's labelled examples.

x   (N, *shape)  examples as the network takes them: images in [0, 1], vectors, or the outputs
of a frozen part
y   (N,)         labels, as indices of the model's classes
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedda import data, models
from fedda.config import PrivacyConfig, TrainConfig
from fedda.config.sections import unflatten, validate
from fedda.errors import ConfigError, DataError, ModelError
from fedda.halves import load
from fedda.models import Model
from fedda.train import generator, learning_rate, make_optimizer

T = TypeVar("T", data.Labelled, data.Unlabelled)
MOST = 4000  # examples that an audit looks at, drawn at random


@dataclass(frozen=True)
class Subject:
    """What is attacked."""

    model: Model  # the run's last model, without its frozen part
    about: models.Meta  # its description
    train: TrainConfig  # how the run's sites train
    privacy: PrivacyConfig  # the noise of that training
    rounds: int  # of the run
    x: Tensor  # a site's training examples
    y: Tensor  # their labels
    held: tuple[Tensor, Tensor] | None  # labelled examples that the site does not train on, or None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.about.classes)

    @property
    def epochs(self) -> int:
        """How many passes over its examples a site made in the run."""
        return max(1, round(self.rounds / self.train.rounds_per_epoch_of(len(self.x))))

    @property
    def are_images(self) -> bool:
        """Whether the examples can be shown."""
        return self.x.dim() == 4

    def fresh(self, seed: int) -> Model:
        """A network like the run's with new random weights."""
        if self.about.extension is not None:
            raise ConfigError(
                f"The run's model has layers of {self.about.extension.method}, which this attack "
                "cannot train by itself; give a run of another method."
            )
        config = self.about.config
        if self.privacy.noise:  # it can hide no example in a network that mixes them
            config = config.model_copy(update={"norm": "group"})
        made = models.build(config, self.about.shape, self.classes, seed)
        return made.attach(None).to(self.x.device)

    def train_on(self, model: Model, chosen: Tensor, epochs: int, seed: int) -> Model:
        """Train a model in place, as a source does, on some of the examples -> the model.

        Args:
            model: to train.
            chosen: indices of the examples.
            epochs: passes over them; the learning rate falls as in a run of so many rounds.
            seed: of the batches.
        """
        draws = generator(seed, "audit")
        model.train()
        for epoch in range(epochs):
            rate = learning_rate(self.train, epoch + 1, epochs)
            optimizer = make_optimizer(model.parameters(), self.train, rate)
            if self.privacy.noise:
                self._privately(model, optimizer, chosen, draws)
                continue
            order = chosen[torch.randperm(len(chosen), generator=draws)]
            for batch in order.split(self.train.batch_size):
                if len(batch) < 2 and len(order) > 1:
                    continue  # BatchNorm needs two
                loss = F.cross_entropy(model(self.x[batch]), self.y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model.eval()

    def _privately(
        self, model: Model, inner: torch.optim.Optimizer, chosen: Tensor, draws: torch.Generator
    ) -> None:
        """Train for an epoch by DP-SGD, as `clients.site.noised` does."""
        noised = load("clients", "site.noised")
        size, q = self.train.batch_size, min(1.0, self.train.batch_size / len(chosen))
        noise = np.random.default_rng(draws.initial_seed())

        def loss_of(part: Tensor) -> Tensor:
            return F.cross_entropy(model(self.x[part]), self.y[part])

        with noised.per_example(model):
            for _ in range(max(1, round(len(chosen) / size))):
                batch = chosen[torch.rand(len(chosen), generator=draws) < q]
                about = self.privacy, q * len(chosen), noise
                noised.noisy_gradient(inner, loss_of, batch, *about)
                inner.step()


def subject(
    file: Path,
    config: Mapping[str, Any],
    folder: Path,
    reading: data.Reading,
    device: torch.device,
    seed: int = 0,
) -> Subject:
    """Read a run's model and a site's labelled data.

    Raises:
        ModelError: the data do not fit the model.
        DataError: there are too few examples, or no labels.
    """
    model, about, own, form = opened(data.load_source, file, folder, reading)
    own = data.align(own, about.classes)
    tests = data.load_evaluation(folder, classes=about.classes, **form)
    same = tests is not None and tests.x.shape == own.x.shape and bool((tests.x == own.x).all())
    held = None if tests is None or same else tests
    if len(own.y) < 4:
        raise DataError(f"{folder} has {len(own.y)} labelled examples; an audit needs 4 or more.")
    model.to(device)
    chosen = torch.randperm(len(own.y), generator=generator(seed, "audit"))[:MOST]
    x, y = _inputs(model, own.x[chosen], device), own.y[chosen].to(device)
    others = None
    if held is not None:
        few = torch.randperm(len(held.y), generator=generator(seed, "held"))[:MOST]
        others = _inputs(model, held.x[few], device), held.y[few].to(device)
    tree = unflatten(dict(config))
    train = validate(TrainConfig, tree.get("train", {}), "train")
    privacy = validate(PrivacyConfig, tree.get("privacy", {}), "privacy")
    model.attach(None)
    return Subject(model, about, train, privacy, int(config.get("rounds", 10)), x, y, others)


def opened(
    read: Callable[..., T], file: Path, folder: Path, reading: data.Reading
) -> tuple[Model, models.Meta, T, dict[str, Any]]:
    """Read a run's model and data that fit it -> the model, about it, the data, how to read them.

    Raises:
        ModelError: the data do not fit the model.
    """
    model, about = models.load(file)
    form = reading.form(about.inputs)
    own = read(folder, **form)
    if own.shape != about.shape:
        raise ModelError(
            f"{folder} holds examples of {'x'.join(map(str, own.shape))} and the model takes "
            f"{'x'.join(map(str, about.shape))}; give data that the model was trained for."
        )
    return model, about, own, form


def atoms_of(run: Path) -> tuple[Tensor, Tensor] | None:
    """The atoms in a run's folder: z (K, n, d) and y (K, n, C); None if it has none."""
    checkpoint = load("server", "checkpoint")
    for facts in sorted(run.glob("*/checkpoint.json")):
        state = checkpoint.read(facts.parent)
        if state is not None and "atoms" in state.arrays:
            atoms = state.arrays["atoms"].unpack()
            z, y = (torch.tensor(atoms[name]).float() for name in "zy")
            return z, y / y.sum(dim=2, keepdim=True)
    return None


@torch.no_grad()
def _inputs(model: Model, x: Tensor, device: torch.device) -> Tensor:
    """Examples as the part of the network that learns takes them."""
    parts = []
    for some in x.split(256):
        z = models.as_inputs(some, device)
        parts.append(z if model.backbone is None else model.backbone(z))
    return torch.cat(parts)


def copy_of(model: Model) -> Model:
    """A copy that can be trained."""
    return deepcopy(model).requires_grad_(True)


def flat(tensors: list[Tensor]) -> Tensor:
    """Tensors as one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def parameters_of(model: nn.Module) -> list[Tensor]:
    """The parameters that learn."""
    return [p for p in model.parameters() if p.requires_grad]
