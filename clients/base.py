"""What all clients share: reading a request, loading the model, testing it, packing the reply.

A method's client is a `Client` with a `train` that reads like the paper's lines for its role. Its
NumPyClient face is `fit` and `evaluate`: lists of flat arrays and a table of numbers, in and out.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor, optim
from torch.nn import functional as F

from fedda import models, wire
from fedda.config import Task
from fedda.errors import ConfigError, NotFiniteError, WireError
from fedda.train import batches, generator, learning_rate, round_images, seed_for
from fedda.wire import Kind, Manifest, Packed, Role

from . import notes
from .site import Site

Numbers = dict[str, Any]
MANIFESTS = "manifests"  # the key under which the layouts of the arrays travel beside them
STEP = "step."  # prefix of this round's numbers, beside the task's


@dataclass(frozen=True)
class Request:
    """One training or evaluation request, as a method's client sees it."""

    task: Task
    round: int
    arrays: Mapping[str, Packed]
    numbers: Mapping[str, Any]

    @classmethod
    def read(cls, parameters: list[np.ndarray], config: Mapping[str, Any]) -> "Request":
        """From what Flower hands a NumPyClient."""
        layouts = json.loads(str(config[MANIFESTS]))
        packed = {
            name: Packed(Manifest.parse(text), flat.tobytes())
            for (name, text), flat in zip(layouts, parameters, strict=True)
        }
        step = {k.removeprefix(STEP): v for k, v in config.items() if k.startswith(STEP)}
        told = {k: v for k, v in config.items() if k != MANIFESTS and not k.startswith(STEP)}
        task, server_round = Task.parse(told), step.pop("round", None)
        if type(server_round) is not int or not 1 <= server_round <= task.rounds:
            raise WireError(f"The request is for round {server_round} of {task.rounds}.")
        return cls(task, server_round, packed, step)


class Client(NumPyClient):
    """One role of one method at one site."""

    role: ClassVar[Role]

    def __init__(self, site: Site) -> None:
        self.site = site

    @property
    def trains(self) -> bool:
        """Whether this role has a part in the method's training."""
        return type(self).train is not Client.train

    def train(self, request: Request) -> Numbers:
        """Train `self.model` for one round -> the numbers that go back with it."""
        raise NotImplementedError

    def outgoing(self, request: Request) -> dict[str, Packed]:
        """The arrays that go back: the trained model, unless a method sends something else."""
        floats = request.task.wire.dtype
        return {"model": wire.pack(models.to_arrays(self.model), Kind.MODEL, floats)}

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities of what the test is about, the model -> (N, C), on the CPU."""
        return models.predict(self.model, x)

    def others(self, x: Tensor) -> dict[str, Tensor]:
        """What a method tests beside it, by name -> (N, C) each."""
        return {}

    def keepsakes(self) -> dict[str, np.ndarray]:
        """What a method adds to the notes of the last round, for the site's own eyes."""
        return {}

    def get_properties(self, config: Mapping[str, Any]) -> Numbers:
        """What this site offers a run."""
        return self.site.offer()

    def fit(
        self, parameters: list[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], int, Numbers]:
        """Flower's training call: flat arrays in, flat arrays out."""
        request = Request.read(parameters, config)
        start = time.perf_counter()
        self._begin(request)
        start += notes.received(self, request)  # its time is not the training's
        self.model.train()
        numbers = self.train(request)
        numbers["seconds"] = time.perf_counter() - start
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers.values()):
            raise NotFiniteError("The training's numbers are not finite; lower train.lr.")
        sent = self.outgoing(request)
        numbers[MANIFESTS] = json.dumps([[n, p.manifest.text] for n, p in sent.items()])
        flat = [np.frombuffer(p.buffer, np.uint8) for p in sent.values()]
        return flat, len(self.data), numbers

    @torch.no_grad()
    def evaluate(
        self, parameters: list[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[float, int, Numbers]:
        """Flower's evaluation call; the only code that reads a target's labelled test files."""
        request = Request.read(parameters, config)
        start = time.perf_counter()
        self._begin(request)
        numbers: Numbers = {"infomax": infomax(self.predict(self.data.x))}
        loss, p = 0.0, None
        tested = self.site.evaluation(request.task.dims, request.task.names)
        if tested is not None:
            p = self.predict(tested.x)
            loss = float(F.nll_loss(p.clamp_min(1e-12).log(), tested.y))
            accuracy = float((p.argmax(dim=1) == tested.y).float().mean())
            numbers |= {"loss": loss, "accuracy": accuracy, "tested": len(tested)}
            for name, q in self.others(tested.x).items():
                numbers[f"accuracy-{name}"] = float((q.argmax(dim=1) == tested.y).float().mean())
        numbers["seconds"] = time.perf_counter() - start
        notes.tested(self, request, tested, p)
        return loss, int(numbers.get("tested", 0)), numbers

    def _begin(self, request: Request) -> None:
        task = request.task
        self.data = self.site.training(task.dims)
        self.workspace = self.site.workspace(task)
        self.model = self.workspace.model
        models.load_arrays(self.model, request.arrays["model"].unpack())
        # Dropout draws from the global generator: it must stand where any engine would have it.
        torch.manual_seed(seed_for(task.seed, self.site.name, request.round))

    def optimizer(self, request: Request) -> optim.Optimizer:
        """The optimizer at this round's learning rate."""
        rate = learning_rate(request.task.train, request.round, request.task.rounds)
        return self.workspace.optimizer(request.task, rate, request.round)

    def shares(self, request: Request) -> list[Tensor]:
        """The images of this round, by index, one tensor per epoch it touches.

        Raises:
            ConfigError: a round's part of this site's images is less than the site allows; the
                model after a step on a few images tells too much about them.
        """
        task, rounds = request.task, request.task.train.rounds_per_epoch
        least = self.site.min_images
        if len(self.data) < least * rounds:
            raise ConfigError(
                f"train.rounds-per-epoch is {rounds:g}, which leaves less than {least} of this "
                f"site's {len(self.data)} images to a round; lower it to "
                f"{len(self.data) // least} or less."
            )
        seed = seed_for(task.seed, self.site.name)
        return round_images(len(self.data), request.round, rounds, seed)

    def batches(self, request: Request) -> Iterator[Tensor]:
        """This round's mini-batches of indices."""
        yield from batches(self.shares(request), request.task.train.batch_size)

    def inputs(self, indices: Tensor) -> Tensor:
        """Images as the model takes them, on the site's device: float in [0, 1] (N, C, H, W)."""
        return self.as_inputs(self.data.x[indices])

    def as_inputs(self, x: Tensor) -> Tensor:
        """Images as they are kept -> as the model takes them."""
        x = x.to(self.site.device, non_blocking=True)
        return x.float() / 255 if x.dtype == torch.uint8 else x.float()

    def generator(self, request: Request, purpose: str) -> torch.Generator:
        """A generator of this site, round and purpose alone."""
        return generator(request.task.seed, self.site.name, request.round, purpose)


def infomax(p: Tensor) -> float:
    """Label-free quality of predictions (N, C): entropy of the mean minus mean entropy, in nats.

    High where the model is sure of each image and uses all classes (Shi and Sha, ICML 2012).
    """

    def entropy(q: Tensor) -> Tensor:
        return -(q * q.clamp_min(1e-12).log()).sum(dim=-1)

    return float(entropy(p.mean(dim=0)) - entropy(p).mean())
