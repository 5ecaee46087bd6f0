"""A site's part in adversarial training: its copy of a discriminator, moved by shared gradients.

Copy      a network of which all members of a group have equal copies
Witness   a linear discriminator that is its own gradient, with the sign changed: MMD's
"""

import torch
from torch import Tensor

from fedda.adversarial import travelling
from fedda.adversarial.discriminators import (
    Discriminator,
    DiscriminatorConfig,
    bound,
    flat_gradient,
    make_optimizer,
    set_gradient,
)
from fedda.adversarial.lazy import LazySync
from fedda.maths import fourier
from fedda.wire import packing
from fedda.wire.packing import Kind, Packed

from ..site.state import SiteState


class Copy:
    """One site's copy of a discriminator; the copies of all members of a group are equal.

    Attributes:
        bounded: whether no layer's spectral norm may be above 1 after a step.
    """

    def __init__(self, DI: Discriminator, network: DiscriminatorConfig, sync: LazySync) -> None:
        self.DI = DI
        self.optimizer = make_optimizer(DI, network)
        self.sync = sync
        self.bounded = False

    @classmethod
    def make(
        cls, d: int, network: DiscriminatorConfig, seed: int, sync: LazySync, device: torch.device
    ) -> "Copy":
        """Make a new one for d features; the same seed gives the same network."""
        return cls(Discriminator(d, network.hidden, seed).to(device), network, sync)

    def step(self, loss: Tensor, z: Tensor) -> None:
        """Put this step's gradient into the buffer, then move by the latest synchronised gradient.

        Args:
            loss: this site's half; its gradient never moves this copy by itself.
            z: (N, d) the features that the loss is over.
        """
        self.sync.put(flat_gradient(loss, self.DI), z)
        self.move()

    def move(self) -> None:
        """Move by the latest synchronised gradient, once this step's gradient is in the buffer."""
        g_sync = self.sync.take()
        if g_sync is not None:
            set_gradient(self.DI, g_sync)
            self.optimizer.step()
            if self.bounded:
                bound(self.DI)

    def pick_up(self, came: Packed) -> None:
        """Continue from a discriminator that came with the request."""
        state = {n: torch.tensor(a) for n, a in came.unpack().items()}
        device = next(self.DI.parameters()).device
        self.sync.begin(travelling.load_state(self.DI, self.optimizer, state).to(device))

    def packed(self) -> Packed:
        """Pack it for the reply; always in full precision."""
        g_sync = self.sync.latest
        assert g_sync is not None  # a round has at least one window
        state = travelling.state_of(self.DI, self.optimizer, g_sync)
        return packing.pack({n: t.numpy() for n, t in state.items()}, Kind.MODEL)

    def state_dict(self) -> SiteState:
        """Return the state from which the next round continues, if it stays at its site."""
        state = SiteState()
        state.put("discriminator", self.DI.state_dict())
        state.put_optimizer("optimizer", self.optimizer)
        state.put("sync", self.sync.state())
        return state

    def load_state_dict(self, kept: SiteState, device: torch.device) -> None:
        """Continue from the state that `state_dict` returned."""
        self.DI.load_state_dict(kept.get("discriminator"))
        self.optimizer.load_state_dict(kept.get_optimizer("optimizer"))
        self.sync.restore(kept.get("sync"), device)


class Witness:
    """The witness of MMD in one group: w (2M,), from the latest mean embeddings."""

    def __init__(self, sync: LazySync) -> None:
        self.sync = sync

    def step(self, g: Tensor, z: Tensor) -> Tensor | None:
        """Put the mean embedding (2M,) of z into the buffer -> w, None before the first sum."""
        g_sync = self.sync.step(g, z)
        return None if g_sync is None else fourier.witness(g_sync)

    def pick_up(self, came: Packed, device: torch.device) -> None:
        """Continue from a witness that came with the request."""
        self.sync.begin(-torch.tensor(came.unpack()["w"]).to(device))

    def packed(self) -> Packed:
        """Pack it for the reply; always in full precision."""
        g_sync = self.sync.latest
        assert g_sync is not None  # a round has at least one window
        w = fourier.witness(g_sync).to("cpu", torch.float32)
        return packing.pack({"w": w.numpy()}, Kind.GRADIENT)
