"""What all clients share: reading a request, loading the model, testing it, packing the reply.

A method's client is a `Client` with a `train` that reads like the paper's lines for its role. Its
NumPyClient face is `fit` and `evaluate`: lists of flat arrays and a table of numbers, in and out.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor, optim
from torch.nn import functional as F

from fedda import exchange, models, wire
from fedda.config import LazyConfig, Task, validate
from fedda.errors import ConfigError, NotFiniteError, WireError
from fedda.exchange import Invitation, Stream
from fedda.lazy import LazySync
from fedda.train import batches, generator, learning_rate, round_images, seed_for, windows
from fedda.wire import Kind, Manifest, Packed, Role

from . import notes
from .site import Site

Numbers = dict[str, Any]
MANIFESTS = "manifests"  # the key under which the layouts of the arrays travel beside them
STEP = "step."  # prefix of this round's numbers, beside the task's
EXCHANGE = "exchange."  # prefix of the invitation to an exchange of gradients


@dataclass(frozen=True)
class Exchange:
    """Where gradients are summed in this round, and how."""

    invitation: Invitation
    lazy: LazyConfig

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "Exchange":
        """From the record beside the task's.

        Raises:
            WireError: the invitation cannot be read, or p is left open.
            ConfigError: a setting cannot.
        """
        keys = set(LazyConfig().flat())
        lazy = {k: v for k, v in table.items() if k in keys}
        rest = {k: v for k, v in table.items() if k not in keys}
        settings = validate(LazyConfig, lazy, "exchange")
        if settings.p < 1:  # the server settles what is left open
            raise WireError("The request leaves exchange.p open; it needs 1 step per sum or more.")
        return cls(Invitation.parse(rest), settings)


@dataclass(frozen=True)
class Request:
    """One training or evaluation request, as a method's client sees it."""

    task: Task
    round: int
    arrays: Mapping[str, Packed]
    numbers: Mapping[str, Any]
    exchange: Exchange | None = None

    @classmethod
    def read(cls, parameters: list[np.ndarray], config: Mapping[str, Any]) -> "Request":
        """From what Flower hands a NumPyClient."""
        layouts = json.loads(str(config[MANIFESTS]))
        packed = {
            name: Packed(Manifest.parse(text), flat.tobytes())
            for (name, text), flat in zip(layouts, parameters, strict=True)
        }
        step = {k.removeprefix(STEP): v for k, v in config.items() if k.startswith(STEP)}
        table = {k.removeprefix(EXCHANGE): v for k, v in config.items() if k.startswith(EXCHANGE)}
        rest = (MANIFESTS, STEP, EXCHANGE)
        told = {k: v for k, v in config.items() if not k.startswith(rest)}
        task, server_round = Task.parse(told), step.pop("round", None)
        if type(server_round) is not int or not 1 <= server_round <= task.rounds:
            raise WireError(f"The request is for round {server_round} of {task.rounds}.")
        return cls(task, server_round, packed, step, Exchange.read(table) if table else None)

    @property
    def steps(self) -> int:
        """Steps of this round, where the server counts them so that all take equally many.

        Raises:
            WireError: the request has no such number.
        """
        found = self.numbers.get("steps")
        if type(found) is not int or found < 1:
            raise WireError("The request says no whole number of steps to take, 1 or more.")
        return found


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

    def recall(self, request: Request) -> None:
        """Load a model that stays at this site, where the server sent none.

        Raises:
            WireError: the method has no such model.
        """
        raise WireError("The request came without a model.")

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
        if "model" in request.arrays:
            models.load_arrays(self.model, request.arrays["model"].unpack())
        else:
            self.recall(request)
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

    def step_batches(self, request: Request, first: int, count: int) -> Iterator[Tensor]:
        """Mini-batches of indices for steps first + 1 to first + count of a discriminator.

        A site takes as many steps as it is told, and as large ones, however few images it has; and
        a gradient that leaves it is over as many different images as it says (`train.windows`).

        Raises:
            ConfigError: this site has fewer images than it trains on.
        """
        assert request.exchange is not None
        self.check_enough("it trains on")
        seed = seed_for(request.task.seed, self.site.name)
        size, p = request.task.train.batch_size, request.exchange.lazy.p
        yield from windows(len(self.data), size, p, seed, first, count)

    def check_enough(self, what: str) -> None:
        """See that this site has as many images as anything that leaves must be made of.

        Args:
            what: is made of them, as a clause that a number follows.

        Raises:
            ConfigError: it has fewer.
        """
        least = max(self.site.min_images, 2)
        if len(self.data) < least:
            raise ConfigError(
                f"This site has {len(self.data)} images, but {what} {least} or more; "
                "add images, or lower --min-images."
            )

    @contextmanager
    def stream(self, request: Request) -> Iterator[Stream]:
        """This site's way into the round's exchange of gradients.

        Raises:
            WireError: the server convened none, or asks for gradients of too many groups.
            ExchangeError: it cannot be reached, refused this site, or ended early.
        """
        if request.exchange is None:
            raise WireError("The request came without an invitation to the exchange of gradients.")
        # Many discriminators' gradients over the same window tell more of it than one's.
        asked = len(request.exchange.invitation.groups)
        most = 1 if self.role == "source" else max(1, request.task.sites - 1)
        if asked > most:
            raise WireError(
                f"The request asks this {self.role} for gradients in {asked} groups, but it has a "
                f"part in {most} at most."
            )
        stream = exchange.connect(request.exchange.invitation, self.site.server)
        try:
            yield stream
        finally:
            stream.close()

    def lazy(self, stream: Stream, group: str, config: LazyConfig, halves: int = 2) -> LazySync:
        """This site's part in one group, as the run says or as this site does, whoever is stricter.

        Raises:
            ConfigError: this site has fewer images than a gradient must be over; a window would
                repeat them, and hide none of them.
        """
        least = max(config.min_examples, self.site.min_examples)
        if len(self.data) < least:
            raise ConfigError(
                f"This site has {len(self.data)} images, but a gradient leaves it only over "
                f"{least} or more; add images, or lower exchange.min-examples and --min-examples."
            )
        return LazySync(
            stream,
            group,
            config.p,
            halves=halves,
            overlap=config.overlap,
            clip=config.clip,
            noise=max(config.noise, self.site.noise),
            least=least,
        )

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
