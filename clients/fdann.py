"""f-DANN's clients: each trains its own model, on labels where there are any, against a shared DI.

Ganin et al., JMLR 2016, https://arxiv.org/abs/1505.07818; federated by the exchange.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.adversarial.discriminators import (
    HALVES,
    Loss,
    accuracy,
    discriminator_loss,
    reversed_loss,
)
from fedda.data import Labelled, Unlabelled
from fedda.errors import WireError
from fedda.exchange import Group, Stream
from fedda.train import seed_for
from fedda.wire import Packed

from . import fedavg
from .site.exchanging import Summing
from .site.request import Numbers
from .site.shared_discriminator import Copy

StepNumbers = dict[str, Any]  # of one step; tensors stay on the device until the round is over


class Member(Summing):
    """What both parts do in a round of a whole number of windows."""

    loss: ClassVar[Loss] = "grl"
    shared: ClassVar[str] = "discriminator"  # the array, and behind a / the source of a pair

    def align(self) -> Numbers:
        """Cross entropy, if any, + lambda times what moves the encoder against the others."""
        task, count = self.task, self.request.steps
        per_step = self.critic_steps()
        optimizer = self.optimizer()
        totals: StepNumbers = {}
        with self.stream() as stream:
            images = self.whole_windows(count * per_step)
            self.join(stream)
            for i in range(count):
                q = (self.request.round - 1 + i / count) / task.rounds
                self.lead(islice(images, per_step - 1))
                indices = next(images)
                z = self.features(indices)
                pull, numbers = self.step(z, len(indices))
                loss = self.options.reversal.at(q) * pull
                if (labelled := self.classify(z, indices)) is not None:
                    numbers["loss"] = labelled
                    loss = loss + labelled
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                totals = {n: totals.get(n, 0.0) + _value(v) for n, v in numbers.items()}
            self.leave()
        return {n: float(total) / count for n, total in totals.items()} | {"steps": count}

    def whole_windows(self, count: int) -> Iterator[Tensor]:
        """The round's batches, one for each step of the discriminators.

        Raises:
            WireError: they are no whole windows; then sums would not be over a window's images.
        """
        if count % self.exchange.lazy.p:
            raise WireError(
                f"The request is for {count} steps, which are no whole windows of "
                f"{self.exchange.lazy.p} (exchange.p)."
            )
        return self.windows((self.request.round - 1) * count, count)

    def critic_steps(self) -> int:
        """Steps that the discriminators make in one of the model's, the common one among them."""
        return 1

    def lead(self, images: Iterator[Tensor]) -> None:
        """The steps that the discriminators make before the common one, on images of their own."""
        for indices in images:
            with torch.no_grad():
                z = self.features(indices)
            self.discriminate(z, len(indices))

    def classify(self, z: Tensor, indices: Tensor) -> Tensor | None:
        """Cross entropy on the site's labels -> scalar; None where there are none."""
        return None

    def join(self, stream: Stream) -> None:
        """Take up the discriminators, or in the first round make those that all others make."""
        self.half = HALVES[self.loss, self.side]
        self.copies: dict[str, Any] = {}
        self.part_of: dict[str, float] = {}
        for group in self.exchange.invitation.groups:
            name = array_of(self.shared, group)
            self.copies[name] = self.take_up(stream, group, self.request.arrays.get(name))
            # Of the mean over a group's sources each is a part; the target is all of its side.
            sources = len(group.members) - 1
            self.part_of[name] = 1 / sources if self.side == "source" else 1.0

    def take_up(self, stream: Stream, group: Group, came: Packed | None) -> Any:
        """This site's copy of one group's discriminator, as it came or as all begin with it."""
        seed, network = seed_for(self.task.seed, group.name), self.options.discriminator
        sync = self.lazy(stream, group.name)
        copy = Copy.make(self.model.width, network, seed, sync, self.device)
        if came is not None:
            copy.pick_up(came)
        return copy

    def step(self, z: Tensor, n: int) -> tuple[Tensor, StepNumbers]:
        """One step of the discriminators -> what moves the encoder against them, and numbers.

        The scalar's gradient is the encoder's; its value means nothing. Gradients of both kinds are
        taken at z and DI as they are before anything moves.
        """
        pull = self.against(z)
        return pull, self.discriminate(z, n)

    def against(self, z: Tensor) -> Tensor:
        """The reversal layer, over all discriminators -> scalar."""
        fixed = z.detach().requires_grad_()
        losses = {n: reversed_loss(self.half, c.DI, fixed) for n, c in self.copies.items()}
        (g,) = torch.autograd.grad(self.combined(losses), fixed)
        return (z * g).sum()

    def combined(self, losses: dict[str, Tensor]) -> Tensor:
        """One loss of those against each discriminator, by its array's name: their mean."""
        return torch.stack(list(losses.values())).mean()

    def discriminate(self, z: Tensor, n: int) -> StepNumbers:
        """One step of every discriminator -> what the site reports of it."""
        each: dict[str, StepNumbers] = {}
        for name, copy in self.copies.items():
            L_DI = self.own(copy, z)
            each[name] = {"discriminator-loss": L_DI.detach()}
            if not self.half.critic:
                with torch.no_grad():
                    each[name]["discriminator-accuracy"] = accuracy(copy.DI(z), self.side)
            copy.step(self.part_of[name] * L_DI, n)
        return self.reported(each)

    def reported(self, each: dict[str, StepNumbers]) -> StepNumbers:
        """What becomes of every discriminator's numbers, by its array's name: their means."""
        numbers: StepNumbers = {}
        for of_copy in each.values():
            numbers = {k: numbers.get(k, 0.0) + v / len(each) for k, v in of_copy.items()}
        return numbers

    def own(self, copy: Copy, z: Tensor) -> Tensor:
        """This site's half of a discriminator's loss -> scalar."""
        return discriminator_loss(self.half, copy.DI, z)

    def leave(self) -> None:
        """Wait for sums under way; the discriminators are put down with all that came."""
        for copy in self.copies.values():
            copy.sync.settle()


class Source(Member, fedavg.Source):
    """Has labels."""

    data: Labelled

    def classify(self, z: Tensor, indices: Tensor) -> Tensor:
        return F.cross_entropy(self.model.head(z), self.labels(indices))


class Target(Member):
    """Its encoder is moved by the reversed gradient alone, its classifier by nothing."""

    data: Unlabelled

    def outgoing(self) -> dict[str, Packed]:
        """The model, and the discriminators for all, always in full precision."""
        return super().outgoing() | {name: copy.packed() for name, copy in self.copies.items()}


def array_of(name: str, group: Group) -> str:
    """The array that belongs to a group: the same, or the same source's."""
    _, slash, source = group.name.partition("/")
    return f"{name}{slash}{source}"


def _value(number: Any) -> Any:
    return number.detach() if isinstance(number, Tensor) else number
