"""f-DANN's clients: each trains its own model against a shared DI, sources also on labels.

Ganin et al., JMLR 2016, https://arxiv.org/abs/1505.07818; federated by the exchange.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.adversarial.discriminators import (
    HALVES,
    Discriminator,
    Loss,
    accuracy,
    discriminator_loss,
    inverted_loss,
    reversed_loss,
)
from fedda.adversarial.lazy import LazySync
from fedda.data import Labelled, Unlabelled
from fedda.errors import WireError
from fedda.exchange import Group, Stream
from fedda.train import seed_for, windows
from fedda.wire.packing import Packed

from . import fedavg
from .shared.exchanging import Summing
from .shared.shared_discriminator import Copy
from .site import origin
from .site.request import Numbers

StepNumbers = dict[str, Any]  # of one step; tensors stay on the device until the round is over


class Member(Summing):
    """What both parts do: train for a round of a whole number of windows."""

    loss: ClassVar[Loss] = "grl"
    shared: ClassVar[str] = "discriminator"  # name of the array; for a pair, /SOURCE follows
    halves: ClassVar[int] = 2  # of a loss, in a sum over the members

    def align(self) -> Numbers:
        """Train on cross entropy, if there are labels, + lambda times the adversarial loss.

        The server invites no source that has too few images to sum gradients over; such a one
        trains on its labels alone.
        """
        count, ahead = self.request.steps, 0
        self.copies: dict[str, Any] = {}
        optimizer = self.optimizer()
        self.prepare()
        totals: StepNumbers = {}
        summing = self.request.exchange or self.side == "target"  # which learns from nothing else
        with self.stream() if summing else nullcontext() as stream:
            if stream is None:
                images = self.unsummed(count)
            else:
                ahead = self.critic_steps() - 1
                images = self.whole_windows(count * (ahead + 1))
                self.join(stream)
            for i in range(count):
                q = (self.request.round - 1 + i / count) / self.task.rounds
                self.lead(islice(images, ahead))
                numbers = self.train_step(next(images), optimizer, q)
                totals = {n: totals.get(n, 0.0) + value for n, value in numbers.items()}
            self.leave()
        means = {n: float(total) / count for n, total in totals.items()}
        return means | self.clipped(self.copies.values()) | {"steps": count}

    def prepare(self) -> None:
        """Make what else is trained in this round, before its first step: here nothing."""

    def train_step(
        self, indices: Tensor, optimizer: torch.optim.Optimizer, q: float
    ) -> StepNumbers:
        """Take one step of the model and of the discriminators, if there are any."""
        z = self.features(indices)
        loss, numbers = z.new_zeros(()), {}
        if self.copies:
            pull, numbers = self.step(z)
            loss = self.options.reversal.at(q) * pull
        if (labelled := self.classify(z, indices)) is not None:
            numbers["loss"] = labelled.detach()
            loss = loss + labelled
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return numbers

    def unsummed(self, count: int) -> Iterator[Tensor]:
        """Batches for so many steps of a site whose gradients stay there."""
        seed, size = seed_for(*self.site.chance(self.task)), self.task.train.batch_size
        first = (self.request.round - 1) * count
        return windows(self.site.blocks.blocks, size, 1, seed, first, count)

    def whole_windows(self, count: int) -> Iterator[Tensor]:
        """Return the round's batches, one for each step of the discriminators.

        Raises:
            WireError: they are no whole windows; then a sum would not be over a window's images.
        """
        if count % self.exchange.lazy.p:
            raise WireError(
                f"The request is for {count} steps, which is not a multiple of exchange.p, "
                f"{self.exchange.lazy.p}."
            )
        return self.windows((self.request.round - 1) * count, count)

    def critic_steps(self) -> int:
        """Return how many steps the discriminators take per step of the model."""
        return 1

    def lead(self, images: Iterator[Tensor]) -> None:
        """Take all but the last of the discriminators' steps, on images of their own."""
        for indices in images:
            with torch.no_grad():
                z = self.features(indices)
            self.discriminate(z)

    def classify(self, z: Tensor, indices: Tensor) -> Tensor | None:
        """Cross entropy on the site's labels -> scalar; None if it has no labels."""
        return None

    def join(self, stream: Stream) -> None:
        """Load the discriminators; in the first round make new ones, the same at all sites."""
        self.half = HALVES[self.loss, self.side]
        for group in self.exchange.groups:
            name = array_of(self.shared, group)
            # 1/K for each of K sources; 1 for the target.
            share = 1 / (len(group.members) - 1) if self.side == "source" else 1.0
            sync = self.lazy(stream, group.name, self.halves, share)
            self.copies[name] = self.copy_of(sync, group, self.request.arrays.get(name))

    def copy_of(self, sync: LazySync, group: Group, came: Packed | None) -> Any:
        """Make this site's copy of a group's discriminator, new or as received."""
        seed, network = seed_for(self.task.seed, group.name), self.options.discriminator
        copy = Copy.make(self.model.width, network, seed, sync, self.device)
        if self.site.origin is not None:
            # All members have equal copies, so the server's is taken only where one's own is lost.
            name, last = f"copy/{group.name}", self.request.round - 1
            own = self.workspace.left(self.task, name, last, last)
            self._stateful[name] = copy
            if own is not None:
                copy.load_state_dict(own, self.device)
                return copy
            if came is not None:
                drawn, values = copy.DI.state_dict(), came.unpack()
                origin.check_discriminator(
                    name, values, {n: t.cpu().numpy() for n, t in drawn.items()}
                )
                # Not its optimizer's state, which could carry it anywhere in the next step.
                copy.DI.load_state_dict({n: torch.tensor(values[n]) for n in drawn})
            return copy
        if came is not None:
            copy.pick_up(came)
        return copy

    def step(self, z: Tensor) -> tuple[Tensor, StepNumbers]:
        """Take one step of the discriminators -> the encoder's adversarial loss, and numbers.

        Only the gradient of this scalar loss has a meaning, not its value. The gradients of encoder
        and discriminators are both taken at z and DI before either changes.
        """
        pull = self.against(z)
        return pull, self.discriminate(z)

    def against(self, z: Tensor) -> Tensor:
        """Let every discriminator pull at the features; its own weights do not move -> scalar."""
        fixed = z.detach().requires_grad_()
        losses = {n: self.deceive(c.DI, fixed) for n, c in self.copies.items()}
        (g,) = torch.autograd.grad(self.combined(losses), fixed)
        return (z * g).sum()

    def deceive(self, DI: Discriminator, z: Tensor) -> Tensor:
        """The encoder's loss against one discriminator, by `reversal.loss` -> scalar."""
        if self.options.reversal.loss == "inverted":
            return inverted_loss(self.side, DI, z)
        return reversed_loss(self.half, DI, z)

    def combined(self, losses: dict[str, Tensor]) -> Tensor:
        """Make one loss of the losses against each discriminator, by array name: here the mean."""
        return torch.stack(list(losses.values())).mean()

    def discriminate(self, z: Tensor) -> StepNumbers:
        """Take one step of every discriminator -> the numbers that the site reports."""
        each: dict[str, StepNumbers] = {}
        for name, copy in self.copies.items():
            L_DI = self.own(copy, z)
            each[name] = {"discriminator-loss": L_DI.detach()}
            if not self.half.critic:
                with torch.no_grad():
                    each[name]["discriminator-accuracy"] = accuracy(copy.DI(z), self.side)
            copy.step(L_DI, z)
        return self.reported(each)

    def reported(self, each: dict[str, StepNumbers]) -> StepNumbers:
        """Make the reported numbers of each discriminator's, by array name: here the means."""
        numbers: StepNumbers = {}
        for of_copy in each.values():
            numbers = {k: numbers.get(k, 0.0) + v / len(each) for k, v in of_copy.items()}
        return numbers

    def own(self, copy: Copy, z: Tensor) -> Tensor:
        """This site's half of a discriminator's loss -> scalar."""
        return discriminator_loss(self.half, copy.DI, z)

    def leave(self) -> None:
        """Wait for sums that are under way, so that every copy has them for the next round."""
        for copy in self.copies.values():
            copy.sync.settle()


class Source(Member, fedavg.Source):
    """Has labels."""

    data: Labelled

    def classify(self, z: Tensor, indices: Tensor) -> Tensor:
        return F.cross_entropy(self.model.head(z), self.labels(indices))


class Target(Member):
    """Trains its encoder by the reversed gradient alone, and its classifier not at all."""

    data: Unlabelled

    def outgoing(self) -> dict[str, Packed]:
        """Return the model, and for all sites the discriminators, always in full precision."""
        return super().outgoing() | {name: copy.packed() for name, copy in self.copies.items()}


def array_of(name: str, group: Group) -> str:
    """Return the name of a group's array; it has the same /SOURCE as the group, if any."""
    _, slash, source = group.name.partition("/")
    return f"{name}{slash}{source}"
