"""f-DANN's clients: each trains its own model, on labels where there are any, against a shared DI.

Ganin et al., JMLR 2016, https://arxiv.org/abs/1505.07818; federated by the exchange.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import wire
from fedda.adversary import HALVES, Discriminator, Loss, accuracy, discriminator_loss, reversed_loss
from fedda.data import Labelled, Unlabelled
from fedda.errors import WireError
from fedda.exchange import Group, Stream
from fedda.train import seed_for
from fedda.travelling import pick_up, put_down
from fedda.wire import Kind, Packed, Role

from .adversarial import Copy
from .base import Client, Numbers, Request

Found = dict[str, Any]  # numbers of one step; tensors stay on the device until the round is over


class Member(Client):
    """What both roles do in a round of a whole number of windows."""

    loss: ClassVar[Loss] = "grl"

    def train(self, request: Request) -> Numbers:
        """Cross entropy, if any, + lambda times what moves the encoder against the others."""
        task, count = request.task, request.steps
        per_step = self.critic_steps(request)
        optimizer = self.optimizer(request)
        totals: Found = {}
        with self.stream(request) as stream:
            images = self.windows(request, count * per_step)
            self.join(request, stream)
            for i in range(count):
                q = (request.round - 1 + i / count) / task.rounds
                self.lead(islice(images, per_step - 1))
                indices = next(images)
                z = self.model.features(self.inputs(indices))
                pull, found = self.align(z, len(indices))
                loss = task.options.reversal.at(q) * pull
                if self.role == "source":
                    found["loss"] = self.classify(z, indices)
                    loss = loss + found["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                totals = {n: totals.get(n, 0.0) + _value(v) for n, v in found.items()}
            self.leave()
        self.workspace.keep(optimizer, task, request.round)
        return {n: float(total) / count for n, total in totals.items()} | {"steps": count}

    def windows(self, request: Request, count: int) -> Iterator[Tensor]:
        """The round's batches, one for each step of the discriminators.

        Raises:
            WireError: they are no whole windows; then sums would not be over a window's images.
        """
        assert request.exchange is not None
        if count % request.exchange.lazy.p:
            raise WireError(
                f"The request is for {count} steps, which are no whole windows of "
                f"{request.exchange.lazy.p} (exchange.p)."
            )
        return self.step_batches(request, (request.round - 1) * count, count)

    def critic_steps(self, request: Request) -> int:
        """Steps that the discriminators make in one of the model's, the common one among them."""
        return 1

    def lead(self, images: Iterator[Tensor]) -> None:
        """The steps that the discriminators make before the common one, on images of their own."""
        for indices in images:
            with torch.no_grad():
                z = self.model.features(self.inputs(indices))
            self.discriminate(z, len(indices))

    def classify(self, z: Tensor, indices: Tensor) -> Tensor:
        """Cross entropy on the site's labels -> scalar."""
        assert isinstance(self.data, Labelled)
        return F.cross_entropy(self.model.head(z), self.data.y[indices].to(self.site.device))

    def join(self, request: Request, stream: Stream) -> None:
        """Take up the discriminators, or in the first round make those that all others make."""
        assert request.exchange is not None
        self.request, self.half = request, HALVES[self.loss, self.role]
        network = request.task.options.discriminator
        self.copies: dict[str, Copy] = {}
        self.part_of: dict[str, float] = {}
        for group in request.exchange.invitation.groups:
            seed = seed_for(request.task.seed, group.name)
            DI = Discriminator(self.model.width, network.hidden, seed).to(self.site.device)
            lazy = self.lazy(stream, group.name, request.exchange.lazy)
            copy = Copy(DI, network, lazy)
            found = request.arrays.get(array_of("discriminator", group))
            if found is not None:
                state = {n: torch.tensor(a) for n, a in found.unpack().items()}
                copy.sync.begin(pick_up(DI, copy.optimizer, state).to(self.site.device))
            self.copies[array_of("discriminator", group)] = copy
            self.part_of[array_of("discriminator", group)] = self.weight(group)

    def weight(self, group: Group) -> float:
        """A source's part in the mean over the group's sources; the target is all of its side."""
        return 1 / (len(group.members) - 1) if self.role == "source" else 1.0

    def align(self, z: Tensor, n: int) -> tuple[Tensor, Found]:
        """One step of the discriminators -> what moves the encoder against them, and numbers.

        The scalar's gradient is the encoder's; its value means nothing. Gradients of both kinds are
        taken at z and DI as they are before anything moves.
        """
        pull = self.against(z)
        return pull, self.discriminate(z, n)

    def against(self, z: Tensor) -> Tensor:
        """The reversal layer, in mean over the discriminators -> scalar."""
        fixed = z.detach().requires_grad_()
        losses = [reversed_loss(self.half, copy.DI, fixed) for copy in self.copies.values()]
        (g,) = torch.autograd.grad(torch.stack(losses).mean(), fixed)
        return (z * g).sum()

    def discriminate(self, z: Tensor, n: int) -> Found:
        """One step of every discriminator."""
        found: Found = {}
        for name, copy in self.copies.items():
            L_DI = self.own(copy, z)
            told: Found = {"discriminator-loss": L_DI.detach()}
            if not self.half.critic:
                with torch.no_grad():
                    told["discriminator-accuracy"] = accuracy(copy.DI(z), self.role)
            found = {k: found.get(k, 0.0) + v / len(self.copies) for k, v in told.items()}
            copy.step(self.part_of[name] * L_DI, n)
        return found

    def own(self, copy: Copy, z: Tensor) -> Tensor:
        """This site's half of a discriminator's loss -> scalar."""
        return discriminator_loss(self.half, copy.DI, z)

    def leave(self) -> None:
        """Wait for sums under way; the discriminators are put down with all that came."""
        for copy in self.copies.values():
            copy.sync.settle()


class Source(Member):
    """Has labels."""

    role: ClassVar[Role] = "source"
    data: Labelled


class Target(Member):
    """Its encoder is moved by the reversed gradient alone, its classifier by nothing."""

    role: ClassVar[Role] = "target"
    data: Unlabelled

    def outgoing(self, request: Request) -> dict[str, Packed]:
        """The model, and the discriminators for all."""
        return super().outgoing(request) | self.luggage()

    def luggage(self) -> dict[str, Packed]:
        """The discriminators, always in full precision."""
        found = {}
        for name, copy in self.copies.items():
            g_sync = copy.sync.latest
            assert g_sync is not None  # a round has a window or more
            state = put_down(copy.DI, copy.optimizer, g_sync)
            found[name] = wire.pack({n: t.numpy() for n, t in state.items()}, Kind.MODEL)
        return found


def array_of(name: str, group: Group) -> str:
    """The array that belongs to a group: the same, or the same source's."""
    _, slash, source = group.name.partition("/")
    return f"{name}{slash}{source}"


def _value(number: Any) -> Any:
    return number.detach() if isinstance(number, Tensor) else number
