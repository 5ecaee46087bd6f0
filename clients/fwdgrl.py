"""f-WDGRL's clients: f-DANN's, against a critic that is a few steps ahead.

Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217, algorithm 1; federated by the exchange.
"""

from typing import ClassVar

from torch import Tensor

from fedda.adversarial.discriminators import Loss, discriminator_loss
from fedda.exchange import Stream

from . import fdann
from .fdann import StepNumbers
from .site.shared_discriminator import Copy


class Member(fdann.Member):
    """What both parts do otherwise than in f-DANN."""

    loss: ClassVar[Loss] = "wassda"

    def critic_steps(self) -> int:
        """Shen et al. take all of a step's critic steps on one batch.

        Here each has a batch of its own: a gradient must be summed over many examples before it may
        leave, and the same batch over again would add none.
        """
        return self.options.critic_steps

    def join(self, stream: Stream) -> None:
        """As in f-DANN, with draws for the penalty's points."""
        super().join(stream)
        self.points = self.generator("penalty")

    def step(self, z: Tensor, n: int) -> tuple[Tensor, StepNumbers]:
        """The encoder is moved against what the critic has become."""
        numbers = self.discriminate(z, n)
        return self.against(z), numbers

    def own(self, copy: Copy, z: Tensor) -> Tensor:
        return discriminator_loss(self.half, copy.DI, z, self.options.penalty, self.points)


class Source(Member, fdann.Source):
    """Has labels."""


class Target(Member, fdann.Target):
    """Its encoder is moved by the critic alone."""
