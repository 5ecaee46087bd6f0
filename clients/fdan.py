"""f-DAN's clients: f-DANN's, against the witness of MMD between everybody's mean embeddings.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange.
"""

import torch
from torch import Tensor

from fedda import fourier, wire
from fedda.exchange import Stream
from fedda.lazy import LazySync
from fedda.models import evaluating
from fedda.train import generator
from fedda.wire import Kind, Packed

from . import fdann, fedavg
from .base import Numbers, Request
from .fdann import Found, array_of


class Member(fdann.Member):
    """What both roles do otherwise than in f-DANN."""

    def join(self, request: Request, stream: Stream) -> None:
        """The frequencies that all others draw too, and the last round's witnesses."""
        assert request.exchange is not None
        options, device = request.task.options, self.site.device
        draws = generator(request.task.seed, "frequencies")
        scale, d = float(request.numbers["scale"]), self.model.width
        W = fourier.frequencies(d, options.frequencies, scale, options.bandwidths, draws)
        self.W = W.to(device)
        self.syncs: dict[str, LazySync] = {}
        self.part_of: dict[str, float] = {}
        for group in request.exchange.invitation.groups:
            name = array_of("witness", group)
            self.syncs[name] = self.lazy(stream, group.name, request.exchange.lazy, halves=1)
            if name in request.arrays:
                w = torch.tensor(request.arrays[name].unpack()["w"])
                self.syncs[name].begin(-w.to(device))
            self.part_of[name] = self.weight(group)

    def align(self, z: Tensor, n: int) -> tuple[Tensor, Found]:
        """Mean embeddings out, witnesses in; with p = 1 they are this very step's."""
        g = fourier.half_gradient(z, self.W, self.role)
        pull, mmd = z.sum() * 0, z.new_zeros(())  # nothing to go by before the first sum
        for name, sync in self.syncs.items():
            g_sync = sync.step(self.part_of[name] * g, n)
            if g_sync is not None:
                w = fourier.witness(g_sync)
                pull = pull + fourier.mapping_loss(z, self.W, w, self.role) / len(self.syncs)
                mmd = mmd + w @ w / len(self.syncs)
        return pull, {"mmd": mmd}

    def leave(self) -> None:
        for sync in self.syncs.values():
            sync.settle()


class Source(Member, fdann.Source, fedavg.Source):
    """Has labels."""

    def train(self, request: Request) -> Numbers:
        """While there is no scale there is nothing but labels."""
        if request.exchange is None:
            return fedavg.Source.train(self, request)
        return super().train(request)


class Target(Member, fdann.Target):
    """Its encoder is moved by the witness alone."""

    def train(self, request: Request) -> Numbers:
        """While there is no scale the target finds it, and does not train."""
        if request.exchange is None:
            return self.measure(request)
        return super().train(request)

    @torch.no_grad()
    def measure(self, request: Request) -> Numbers:
        """The median distance of some of its features, the same for every batch size."""
        self.check_enough("a median of distances leaves it only over")
        draws = self.generator(request, "scale")
        indices = torch.randperm(len(self.data), generator=draws)[: fourier.PAIRED]
        with evaluating(self.model):
            parts = indices.split(request.task.train.batch_size)
            z = torch.cat([self.model.features(self.inputs(part)) for part in parts])
        return {"median": fourier.median_distance(z), "steps": 0}

    def outgoing(self, request: Request) -> dict[str, Packed]:
        """Model and witnesses, or none of them where the scale was asked for."""
        return super().outgoing(request) if request.exchange is not None else {}

    def luggage(self) -> dict[str, Packed]:
        found = {}
        for name, sync in self.syncs.items():
            assert sync.latest is not None  # a round has a window or more
            w = fourier.witness(sync.latest).to("cpu", torch.float32)
            found[name] = wire.pack({"w": w.numpy()}, Kind.GRADIENT)
        return found
