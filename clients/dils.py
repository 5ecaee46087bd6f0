"""DILS's clients: a collaborator and a target that share a discriminator's gradients.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from fedda import models
from fedda.adversarial.discriminators import (
    HALVES,
    Half,
    accuracy,
    discriminator_loss,
    flat_gradient,
    mapping_loss,
)
from fedda.errors import WireError
from fedda.models import evaluating
from fedda.wire import Packed

from . import fedavg
from .base import lost
from .site import state
from .site.exchanging import Summing
from .site.memory import Network
from .site.request import Numbers
from .site.shared_discriminator import Copy


class Pair(Summing):
    """What both do: algorithm 1, with the half of the losses that is their side's."""

    def adapt(self) -> Numbers:
        """All lines, for one round's steps; the phase's first round initialises."""
        options, count = self.options, self.request.steps
        half, done = HALVES[options.loss, self.side], count * self.rounds_before
        draws = self.generator("penalty")
        totals: dict[str, Tensor | float] = {}
        with self.stream() as stream, self.mode(half):
            sync, d = self.lazy(stream, "discriminator"), self.model.head.in_features
            copy = Copy.make(d, options.discriminator, self.task.seed, sync, self.device)
            encoder = optim.Adam(self.moved(), lr=options.lr) if half.mapping else None
            head = {n: w.clone() for n, w in self.model.head.state_dict().items()}
            self.stays("discriminator", copy, strict=True)
            self.stays("model", Network(self.model, encoder), strict=True)
            if "model" in self.request.arrays:  # CADA: the classifier that came
                self.model.head.load_state_dict(head)
            if sync.steps != done:  # then it counts on other sums
                raise WireError(
                    f"The request is for steps {done + 1} and following, but this site has taken "
                    f"{sync.steps}."
                )
            for indices in self.windows(done, count):
                with nullcontext() if half.mapping else torch.no_grad():
                    z = self.features(indices)  # line 3
                L_DI = discriminator_loss(half, copy.DI, z, options.penalty, draws)
                g = flat_gradient(L_DI, copy.DI)  # line 4
                numbers: dict[str, Any] = {"discriminator-loss": L_DI.detach()}
                if not half.critic:
                    with torch.no_grad():
                        numbers["discriminator-accuracy"] = accuracy(copy.DI(z), self.side)
                if encoder:  # lines 6 and 7
                    loss = mapping_loss(half, copy.DI, z)
                    numbers["loss"] = loss.detach()
                    loss = loss + self.beside(z, indices)
                    encoder.zero_grad()
                    loss.backward()
                    encoder.step()
                copy.apply(g, len(indices))  # lines 5 and 8 to 11
                totals = {n: totals.get(n, 0.0) + value for n, value in numbers.items()}
            sync.settle()
        return {n: float(total) / count for n, total in totals.items()} | {"steps": count}

    @property
    def rounds_before(self) -> int:
        """Rounds of the adaptation before this one."""
        return self.request.stage.rounds_before(self.request.round)

    def recall(self) -> None:
        """The model as this site last adapted it, in this round (a test) or in the one before."""
        last = self.request.round - (not self.request.is_test)
        kept = self.workspace.left(self.task, "model", last, last)
        if kept is None:
            raise lost(last)
        self.model.load_state_dict(kept.get("module"))

    def moved(self) -> list[nn.Parameter]:
        """The parameters that a mapping loss moves."""
        return list(self.model.encoder.parameters())

    def beside(self, z: Tensor, indices: Tensor) -> Tensor | float:
        """What is trained in the same step."""
        return 0.0

    @contextmanager
    def mode(self, half: Half) -> Iterator[None]:
        """An encoder that does not move is used as it was left: no dropout, running statistics."""
        with nullcontext() if half.mapping else evaluating(self.model):
            yield


class Collaborator(Pair, fedavg.Source):
    """Its model is trained on labels first, and then helps the target to adapt."""

    def moved(self) -> list[nn.Parameter]:
        """CADA: the classifier is trained beside the encoder."""
        return list(self.model.parameters())

    def beside(self, z: Tensor, indices: Tensor) -> Tensor:
        """CADA: the classifier follows the features, and does not move them."""
        return F.cross_entropy(self.model.head(z.detach()), self.labels(indices))

    def outgoing(self) -> dict[str, Packed]:
        """The model, where it has changed."""
        changed = self.request.hop == "train" or self.options.loss == "cada"
        return super().outgoing() if changed else {}


class Target(Pair):
    """Moves its own encoder; it leaves this site only with `dils.share`."""

    def adapt(self) -> Numbers:
        """Algorithm 1; with CADA on the classifier that the collaborator has trained meanwhile."""
        numbers, task = super().adapt(), self.task
        path = state.model_path(self.site, task)
        if path is not None:
            models.save(path, self.model, config=task.model, shape=task.dims, classes=task.names)
        return numbers

    def outgoing(self) -> dict[str, Packed]:
        """Nothing, unless the target shares its model."""
        return super().outgoing() if self.options.share else {}
