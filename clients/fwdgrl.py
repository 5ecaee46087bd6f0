"""f-WDGRL's clients: f-DANN's, against a critic that is a few steps ahead.

Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217, algorithm 1; federated by the exchange.
"""

from typing import ClassVar

from torch import Tensor

from fedda.adversarial.discriminators import (
    Discriminator,
    Loss,
    discriminator_loss,
    reversed_loss,
)
from fedda.exchange import Stream

from . import fdann
from .fdann import StepNumbers
from .shared.shared_discriminator import Copy


class Member(fdann.Member):
    """What both parts do differently from f-DANN."""

    loss: ClassVar[Loss] = "wassda"

    def critic_steps(self) -> int:
        """Shen et al. take all critic steps of one training step on one batch.

        Here each has a window of p batches of its own: a gradient must be summed over many examples
        before it may leave, and repeating a batch would add no examples.
        """
        return max(1, self.options.critic_steps * self.exchange.lazy.p)

    def join(self, stream: Stream) -> None:
        """Join as in f-DANN; bound the critic, and make the generator of the penalty's points."""
        super().join(stream)
        for copy in self.copies.values():
            copy.bounded = self.options.spectral
        self.points = self.generator("penalty")

    def step(self, z: Tensor) -> tuple[Tensor, StepNumbers]:
        """Take the critic's step first, then train the encoder against the new critic."""
        numbers = self.discriminate(z)
        return self.against(z), numbers

    def deceive(self, DI: Discriminator, z: Tensor) -> Tensor:
        """The encoder's side of the minimax: there are no labels to invert."""
        return reversed_loss(self.half, DI, z)

    def own(self, copy: Copy, z: Tensor) -> Tensor:
        return discriminator_loss(self.half, copy.DI, z, self.options.penalty, self.points)


class Source(Member, fdann.Source):
    """Has labels."""


class Target(Member, fdann.Target):
    """Trains its encoder against the critic alone."""
