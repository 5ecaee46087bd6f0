"""DILS's clients: a collaborator and a target that share a discriminator's gradients.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import functional as F

from fedda.adversarial.discriminators import (
    HALVES,
    accuracy,
    discriminator_loss,
    flat_gradient,
    mapping_loss,
)
from fedda.errors import WireError
from fedda.exchange import Stream
from fedda.models import evaluating
from fedda.train import seed_for
from fedda.wire.packing import Packed

from . import fedavg
from .shared.exchanging import Summing
from .shared.shared_discriminator import Copy
from .site import state
from .site.request import Numbers
from .site.trainer import lost
from .site.workspace import Network


class Pair(Summing):
    """What both sites do: algorithm 1, each with its side's half of the losses."""

    def adapt(self) -> Numbers:
        """Run all lines for the steps of one round; the first round of the phase initialises."""
        options, count = self.options, self.request.steps
        half, per_step = HALVES[options.loss, self.side], self.steps_of_discriminator
        done = count * per_step * self.rounds_before
        draws = self.generator("penalty")
        totals: dict[str, Tensor | float] = {}
        # An encoder that is not trained has no dropout, and its running statistics stay.
        still = nullcontext() if half.mapping else evaluating(self.model)
        with self.stream() as stream, still:
            copies = [self.copy(stream, group.name) for group in self.exchange.groups]
            encoder = self.paced(self.adam()) if half.mapping else None
            self.register_state("model", Network(self.model, encoder), strict=True)
            for copy in copies:
                if copy.sync.steps != done:  # then it would wait for sums of other steps
                    raise WireError(
                        f"The request begins at step {done + 1}, so this site must have taken "
                        f"{done} steps, but it has taken {copy.sync.steps}."
                    )
                copy.bounded = half.critic and options.spectral
            for i, indices in enumerate(self.windows(done, count * per_step), start=1):
                moves = encoder is not None and i % per_step == 0
                with nullcontext() if moves else torch.no_grad():
                    z = self.features(indices)  # line 3
                L_DI = [discriminator_loss(half, c.DI, z, options.penalty, draws) for c in copies]
                g = [flat_gradient(L, c.DI) for L, c in zip(L_DI, copies, strict=True)]  # line 4
                numbers: dict[str, Any] = {"discriminator-loss": mean([L.detach() for L in L_DI])}
                if not half.critic:
                    with torch.no_grad():
                        right = [accuracy(c.DI(z), self.side) for c in copies]
                    numbers["discriminator-accuracy"] = mean(right)
                if per_step > 1:  # a critic is ahead of the encoder: it moves before
                    apply(copies, g, z)
                if encoder is not None and moves:  # lines 6 and 7
                    loss = self.against([mapping_loss(half, c.DI, z) for c in copies])
                    numbers["loss"] = loss.detach()
                    loss = loss + self.beside(z, indices)
                    encoder.zero_grad()
                    loss.backward()
                    encoder.step()
                if per_step == 1:
                    apply(copies, g, z)  # lines 5 and 8 to 11
                totals = {n: totals.get(n, 0.0) + value for n, value in numbers.items()}
            for copy in copies:
                copy.sync.settle()
        each = {"loss": count}  # all others are of the discriminator's steps
        numbers = {n: float(t) / each.get(n, count * per_step) for n, t in totals.items()}
        return numbers | {"steps": count} | self.clipped(copies)

    def copy(self, stream: Stream, group: str) -> Copy:
        """Make this site's copy of a group's discriminator, from the last round if it has one."""
        seed = seed_for(self.task.seed, group) if "/" in group else self.task.seed
        sync, d = self.lazy(stream, group), self.model.head.in_features
        copy = Copy.make(d, self.options.discriminator, seed, sync, self.device)
        self.register_state(group, copy, strict=True)
        return copy

    def against(self, losses: Sequence[Tensor]) -> Tensor:
        """Make one loss of the encoder's losses against each discriminator; in DILS there is one.

        Raises:
            WireError: there are several.
        """
        if len(losses) > 1:
            raise WireError(f"The request has {len(losses)} discriminators, but DILS has one.")
        return losses[0]

    @property
    def steps_of_discriminator(self) -> int:
        """Steps of the discriminator per step of the encoders."""
        return self.options.steps_of_discriminator(self.exchange.lazy.p)

    @property
    def rounds_before(self) -> int:
        """Rounds of the adaptation before this one."""
        return self.request.stage.rounds_before(self.request.round)

    def recall(self) -> None:
        """Load the model as this site last adapted it: in this round for a test, else before it."""
        self.load_adapted(self.request.round - (not self.request.is_test))

    def load_adapted(self, server_round: int) -> None:
        """Load the model as this site adapted it in a round.

        Raises:
            LostError: this site no longer has it.
        """
        saved = self.kept("model", server_round, server_round)
        self.model.load_state_dict(saved.get("module"))

    def adam(self) -> optim.Optimizer:
        """Make the optimizer of what a mapping loss trains: here the encoder."""
        betas = (self.options.beta1, self.options.beta2)
        return optim.Adam(self.model.encoder.parameters(), lr=self.options.lr, betas=betas)

    def beside(self, z: Tensor, indices: Tensor) -> Tensor | float:
        """Return a further loss that the same step minimises: here none."""
        return 0.0


class Collaborator(Pair, fedavg.Source):
    """Trains its model on labels first, and then helps the target to adapt."""

    def adam(self) -> optim.Optimizer:
        """CADA: the classifier is trained in the same steps, at its own rate."""
        optimizer, o = super().adam(), self.options
        rest = {"params": list(self.model.head.parameters()), "lr": o.head_lr}
        optimizer.add_param_group(rest)
        return optimizer

    def beside(self, z: Tensor, indices: Tensor) -> Tensor:
        """CADA: train the classifier on the features; this does not change the features."""
        return F.cross_entropy(self.model.head(z.detach()), self.labels(indices))

    def outgoing(self) -> dict[str, Packed]:
        """Return the model, if it has changed."""
        changed = self.request.hop == "train" or self.options.loss == "cada"
        return super().outgoing() if changed else {}


class Target(Pair):
    """Trains its own encoder, which leaves this site only with `dils.share`."""

    def adapt(self) -> Numbers:
        """Run algorithm 1, and save the model."""
        numbers = super().adapt()
        self.settle()  # before the model is saved
        self.save_adapted()
        return numbers

    def take(self) -> Numbers:
        """CADA: take over the classifier of the model that came, for tests and later rounds."""
        head = {n: w.clone() for n, w in self.model.head.state_dict().items()}
        task, server_round = self.task, self.request.round
        kept = self.workspace.recall(task, server_round, state.METHOD)
        if kept is None:
            raise lost(server_round)
        self.model.load_state_dict(kept.get("model/module"))
        self.model.head.load_state_dict(head)
        kept.tensors |= {f"model/module/head.{n}": w.cpu() for n, w in head.items()}
        self.workspace.remember(task, server_round, state.METHOD, kept)
        self.save_adapted()
        return {"steps": 0}

    def outgoing(self) -> dict[str, Packed]:
        """Return nothing, unless the target shares its model."""
        shares = self.options.share and self.request.hop == "adapt"
        return super().outgoing() if shares else {}


def apply(copies: Sequence[Copy], gradients: Sequence[Tensor], z: Tensor) -> None:
    """Take one step of each copy; a site of several waits once for all their sums."""
    for copy, g in zip(copies, gradients, strict=True):
        copy.sync.put(g, z)
    for copy in copies:
        copy.move()


def mean(values: Sequence[Any]) -> Any:
    """The mean of numbers or of scalar tensors."""
    return sum(values) / len(values)
