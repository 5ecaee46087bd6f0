"""DILS's clients: a collaborator and a target that share a discriminator's gradients.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import functional as F

from fedda import models
from fedda.adversary import (
    HALVES,
    Discriminator,
    Half,
    accuracy,
    discriminator_loss,
    flat_gradient,
    mapping_loss,
)
from fedda.data import Labelled
from fedda.errors import LostError, WireError
from fedda.models import evaluating
from fedda.wire import Packed

from . import fedavg, state
from .adversarial import Copy
from .base import Client, Numbers, Request


class Pair(Client):
    """What both do: algorithm 1, with the half of the losses that is their role's."""

    def adapt(self, request: Request) -> Numbers:
        """All lines, for one round's steps; the first round after the pretraining initialises."""
        options, device = request.task.options, self.site.device
        half = HALVES[options.loss, self.role]
        adapted = request.round - options.pretrain - 1  # rounds before this one
        count = request.steps
        kept = self.kept(request, request.round - 1) if adapted else None
        draws = self.generator(request, "penalty")
        totals: dict[str, Tensor | float] = {}
        with self.stream(request) as stream, self.mode(half):
            assert request.exchange is not None
            d, network = self.model.head.in_features, options.discriminator
            DI = Discriminator(d, network.hidden, request.task.seed).to(device)
            lazy = self.lazy(stream, "discriminator", request.exchange.lazy)
            copy = Copy(DI, network, lazy)
            encoder = optim.Adam(self.moved(half), lr=options.lr) if half.mapping else None
            if kept:
                copy.restore(kept, device)
                if encoder:
                    encoder.load_state_dict(kept.get_optimizer("encoder-optimizer"))
            if copy.sync.steps != adapted * count:  # then it counts on other sums
                raise WireError(
                    f"The request is for steps {adapted * count + 1} and following, but this site "
                    f"has taken {copy.sync.steps}."
                )
            for indices in self.step_batches(request, copy.sync.steps, count):
                with nullcontext() if half.mapping else torch.no_grad():
                    z = self.model.features(self.inputs(indices))  # line 3
                L_DI = discriminator_loss(half, DI, z, options.penalty, draws)
                g = flat_gradient(L_DI, DI)  # line 4
                found: dict[str, Any] = {"discriminator-loss": L_DI.detach()}
                if not half.critic:
                    with torch.no_grad():
                        found["discriminator-accuracy"] = accuracy(DI(z), self.role)
                if encoder:  # lines 6 and 7
                    loss = mapping_loss(half, DI, z)
                    found["loss"] = loss.detach()
                    loss = loss + self.beside(z, indices)
                    encoder.zero_grad()
                    loss.backward()
                    encoder.step()
                copy.apply(g, len(indices))  # lines 5 and 8 to 11
                totals = {n: totals.get(n, 0.0) + value for n, value in found.items()}
            kept = state.Kept()
            copy.keep(kept)
        kept.put("model", self.model.state_dict())
        if encoder:
            kept.put_optimizer("encoder-optimizer", encoder)
        self.workspace.remember(request.task, request.round, state.METHOD, kept)
        return {n: float(total) / count for n, total in totals.items()} | {"steps": count}

    def recall(self, request: Request) -> None:
        """The model as this site last adapted it, in this round (a test) or in the one before."""
        last = request.round - (request.exchange is not None)
        self.model.load_state_dict(self.kept(request, last).get("model"))

    def kept(self, request: Request, server_round: int) -> state.Kept:
        """What this site kept in a round.

        Raises:
            LostError: nothing is left of it.
        """
        kept = self.workspace.recall(request.task, server_round, state.METHOD)
        if kept is None:
            raise LostError(
                f"This site has nothing left of round {server_round}, which only it has seen; "
                "restart its client with the same --state-dir as before, or begin a new run."
            )
        return kept

    def moved(self, half: Half) -> list[torch.nn.Parameter]:
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


class Source(Pair, fedavg.Source):
    """The collaborator."""

    data: Labelled

    def train(self, request: Request) -> Numbers:
        """Cross entropy in the first rounds, then algorithm 1."""
        if request.round <= request.task.options.pretrain:
            return super().train(request)
        return self.adapt(request)

    def moved(self, half: Half) -> list[torch.nn.Parameter]:
        """CADA: the classifier is trained beside the encoder."""
        return list(self.model.parameters())

    def beside(self, z: Tensor, indices: Tensor) -> Tensor:
        """CADA: the classifier follows the features, and does not move them."""
        y = self.data.y[indices].to(self.site.device)
        return F.cross_entropy(self.model.head(z.detach()), y)

    def outgoing(self, request: Request) -> dict[str, Packed]:
        """The model, where it has changed."""
        options = request.task.options
        changed = request.round <= options.pretrain or options.loss == "cada"
        return super().outgoing(request) if changed else {}


class Target(Pair):
    """Moves its own encoder; it leaves this site only with `dils.share`."""

    role = "target"

    def train(self, request: Request) -> Numbers:
        """Algorithm 1; with CADA on the classifier that the collaborator has trained meanwhile."""
        if "model" in request.arrays and request.round > request.task.options.pretrain + 1:
            head = {n: p.clone() for n, p in self.model.head.state_dict().items()}
            self.model.load_state_dict(self.kept(request, request.round - 1).get("model"))
            self.model.head.load_state_dict(head)
        numbers = self.adapt(request)
        path = state.model_path(self.site, request.task)
        if path is not None:
            task = request.task
            models.save(path, self.model, config=task.model, shape=task.dims, classes=task.names)
        return numbers

    def outgoing(self, request: Request) -> dict[str, Packed]:
        """Nothing, unless the target shares its model."""
        return super().outgoing(request) if request.task.options.share else {}
