"""f-DAN's clients: f-DANN's, but against the witness of MMD between the sites' mean embeddings.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedda.adversarial.lazy import LazySync
from fedda.clients import fdann
from fedda.clients.fdann import StepNumbers
from fedda.clients.shared.shared_discriminator import Witness
from fedda.clients.site.request import Numbers
from fedda.exchange import Group, Stream
from fedda.maths import fourier
from fedda.models import evaluating
from fedda.train import generator
from fedda.wire.packing import Packed


class Member(fdann.Member):
    """What both parts do differently from f-DANN."""

    shared: ClassVar[str] = "witness"
    halves: ClassVar[int] = 1

    def join(self, stream: Stream) -> None:
        """Draw the frequencies, which are the same at all sites, and load the witnesses."""
        options, scale = self.options, float(self.request.numbers["scale"])
        draws, d = generator(self.task.seed, "frequencies"), self.model.width
        W = fourier.frequencies(d, options.frequencies, scale, options.bandwidths, draws)
        self.W = W.to(self.device)
        super().join(stream)

    def copy_of(self, sync: LazySync, group: Group, came: Packed | None) -> Witness:
        """Make this site's part in one witness, new or as received."""
        witness = Witness(sync)
        if came is not None:
            witness.pick_up(came, self.device)
        return witness

    def step(self, z: Tensor) -> tuple[Tensor, StepNumbers]:
        """Send mean embeddings, get witnesses; with p = 1 these already include this step."""
        g = fourier.half_gradient(z, self.W, self.side)
        pull, mmd = z.sum() * 0, z.new_zeros(())  # zero before the first sum
        for witness in self.copies.values():
            w = witness.step(g, z)
            if w is not None:
                loss = fourier.mapping_loss(z, self.W, w, self.side)
                pull = pull + loss / len(self.copies)
                mmd = mmd + w @ w / len(self.copies)
        return pull, {"mmd": mmd}


class Source(Member, fdann.Source):
    """Has labels; in the phase that measures the scale it trains on labels alone."""


class Target(Member, fdann.Target):
    """Trains its encoder against the witness alone."""

    def align(self) -> Numbers:
        """Train as f-DANN's target, then measure the scale of the next round's kernels."""
        numbers = super().align()
        return numbers if self.options.scale else numbers | {"median": self.median()}

    def measure(self) -> Numbers:
        """Measure the scale of the first kernels, before any alignment."""
        return {"median": self.median(), "steps": 0}

    @torch.no_grad()
    def median(self) -> float:
        """Measure the median distance of some of its features; the batch size does not matter."""
        draws = self.generator("scale")
        indices = torch.randperm(len(self.data), generator=draws)[: fourier.PAIRED]
        with evaluating(self.model):
            parts = indices.split(self.task.train.batch_size)
            z = torch.cat([self.features(part) for part in parts])
        return fourier.median_distance(self.spread(z))

    def outgoing(self) -> dict[str, Packed]:
        """Return model and witnesses; nothing if the request was for the scale."""
        return super().outgoing() if self.request.hop == "align" else {}
