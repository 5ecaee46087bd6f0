"""f-DAN's clients: f-DANN's, against the witness of MMD between everybody's mean embeddings.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedda.exchange import Group, Stream
from fedda.maths import fourier
from fedda.models import evaluating
from fedda.train import generator
from fedda.wire import Packed

from . import fdann
from .fdann import StepNumbers
from .site.request import Numbers
from .site.shared_discriminator import Witness


class Member(fdann.Member):
    """What both parts do otherwise than in f-DANN."""

    shared: ClassVar[str] = "witness"

    def join(self, stream: Stream) -> None:
        """The frequencies that all others draw too, and the last round's witnesses."""
        options, scale = self.options, float(self.request.numbers["scale"])
        draws, d = generator(self.task.seed, "frequencies"), self.model.width
        W = fourier.frequencies(d, options.frequencies, scale, options.bandwidths, draws)
        self.W = W.to(self.device)
        super().join(stream)

    def take_up(self, stream: Stream, group: Group, came: Packed | None) -> Witness:
        """This site's part in one witness."""
        witness = Witness(self.lazy(stream, group.name, halves=1))
        if came is not None:
            witness.pick_up(came, self.device)
        return witness

    def step(self, z: Tensor, n: int) -> tuple[Tensor, StepNumbers]:
        """Mean embeddings out, witnesses in; with p = 1 they are this very step's."""
        g = fourier.half_gradient(z, self.W, self.side)
        pull, mmd = z.sum() * 0, z.new_zeros(())  # nothing to go by before the first sum
        for name, witness in self.copies.items():
            w = witness.step(self.part_of[name] * g, n)
            if w is not None:
                loss = fourier.mapping_loss(z, self.W, w, self.side)
                pull = pull + loss / len(self.copies)
                mmd = mmd + w @ w / len(self.copies)
        return pull, {"mmd": mmd}


class Source(Member, fdann.Source):
    """Has labels; while there is no scale there is nothing but these."""


class Target(Member, fdann.Target):
    """Its encoder is moved by the witness alone."""

    @torch.no_grad()
    def measure(self) -> Numbers:
        """The median distance of some of its features, the same for every batch size."""
        self.check_enough("a median of distances leaves it only over")
        draws = self.generator("scale")
        indices = torch.randperm(len(self.data), generator=draws)[: fourier.PAIRED]
        with evaluating(self.model):
            parts = indices.split(self.task.train.batch_size)
            z = torch.cat([self.features(part) for part in parts])
        return {"median": fourier.median_distance(z), "steps": 0}

    def outgoing(self) -> dict[str, Packed]:
        """Model and witnesses, or none of them where the scale was asked for."""
        return super().outgoing() if self.request.hop == "align" else {}
