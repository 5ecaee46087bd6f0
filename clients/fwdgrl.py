"""f-WDGRL's clients: f-DANN's, against a critic that is a few steps ahead.

Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217, algorithm 1; federated by the exchange.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedda.adversary import Loss, discriminator_loss
from fedda.exchange import Stream

from . import fdann
from .adversarial import Copy
from .base import Request
from .fdann import Found


class Member(fdann.Member):
    """What both roles do otherwise than in f-DANN."""

    loss: ClassVar[Loss] = "wassda"

    def join(self, request: Request, stream: Stream) -> None:
        """As in f-DANN, with draws for the penalty's points and the critic's own batches."""
        super().join(request, stream)
        self.points = self.generator(request, "penalty")
        self.draws = self.generator(request, "critic")

    def align(self, z: Tensor, n: int) -> tuple[Tensor, Found]:
        """Critic steps first, then the encoder against what the critic has become.

        Shen et al. take all of a step's critic steps on one batch. Here the others are on batches
        of their own: a gradient must be summed over many examples before it may leave, and the
        same batch over again would add none. They are drawn each for itself, so that a window has
        somewhat fewer distinct images than examples: 207 of 256 at a site that has 600.
        """
        for _ in range(self.request.task.options.critic_steps - 1):
            indices = torch.randperm(len(self.data), generator=self.draws)[:n]
            with torch.no_grad():
                own = self.model.features(self.inputs(indices))
            self.discriminate(own, len(own))
        found = self.discriminate(z, n)
        return self.against(z), found

    def own(self, copy: Copy, z: Tensor) -> Tensor:
        gamma = self.request.task.options.penalty
        return discriminator_loss(self.half, copy.DI, z, gamma, self.points)


class Source(Member, fdann.Source):
    """Has labels."""


class Target(Member, fdann.Target):
    """Its encoder is moved by the critic alone."""
