"""A site's part in adversarial training: its copy of a discriminator, moved by shared gradients.

Copy      a network that all members of a group have alike
Witness   a linear discriminator that is its own gradient, with the sign changed: MMD's
"""

import torch
from torch import Tensor

from fedda import wire
from fedda.adversarial import travelling
from fedda.adversarial.discriminators import (
    Discriminator,
    Network,
    flat_gradient,
    make_optimizer,
    set_gradient,
)
from fedda.adversarial.lazy import LazySync
from fedda.maths import fourier
from fedda.wire import Kind, Packed

from .state import Kept


class Copy:
    """One discriminator as one site has it; all members of its group have the same.

    Args:
        DI: the discriminator.
        network: how it learns.
        sync: this site's part in its group.
    """

    def __init__(self, DI: Discriminator, network: Network, sync: LazySync) -> None:
        self.DI = DI
        self.optimizer = make_optimizer(DI, network)
        self.sync = sync

    @classmethod
    def make(
        cls, d: int, network: Network, seed: int, sync: LazySync, device: torch.device
    ) -> "Copy":
        """A new one over d features, the same for all who make it from the seed."""
        return cls(Discriminator(d, network.hidden, seed).to(device), network, sync)

    def step(self, loss: Tensor, examples: int) -> None:
        """Move by the latest synchronised gradient, once this step's own has gone into the buffer.

        Args:
            loss: this site's half; its gradient never moves this copy by itself.
            examples: it is over.
        """
        self.apply(flat_gradient(loss, self.DI), examples)

    def apply(self, g: Tensor, examples: int) -> None:
        """As `step`, for a gradient (P,) that is there already."""
        g_sync = self.sync.step(g, examples)
        if g_sync is not None:
            set_gradient(self.DI, g_sync)
            self.optimizer.step()

    def pick_up(self, came: Packed) -> None:
        """Go on from a discriminator that travelled here."""
        state = {n: torch.tensor(a) for n, a in came.unpack().items()}
        device = next(self.DI.parameters()).device
        self.sync.begin(travelling.load_state(self.DI, self.optimizer, state).to(device))

    def packed(self) -> Packed:
        """It, as it travels with the round; always in full precision."""
        g_sync = self.sync.latest
        assert g_sync is not None  # a round has a window or more
        state = travelling.state_of(self.DI, self.optimizer, g_sync)
        return wire.pack({n: t.numpy() for n, t in state.items()}, Kind.MODEL)

    def put_down(self) -> Kept:
        """What the next round goes on from, where it stays at its site."""
        kept = Kept()
        kept.put("discriminator", self.DI.state_dict())
        kept.put_optimizer("optimizer", self.optimizer)
        kept.put("sync", self.sync.state())
        return kept

    def take_up(self, kept: Kept, device: torch.device) -> None:
        """Go on from what `put_down` gave."""
        self.DI.load_state_dict(kept.get("discriminator"))
        self.optimizer.load_state_dict(kept.get_optimizer("optimizer"))
        self.sync.restore(kept.get("sync"), device)


class Witness:
    """The witness of MMD in one group: w (2M,), by the latest mean embeddings.

    Args:
        sync: this site's part in the group.
    """

    def __init__(self, sync: LazySync) -> None:
        self.sync = sync

    def step(self, g: Tensor, examples: int) -> Tensor | None:
        """Put this site's mean embedding (2M,) into the buffer -> w, None before the first sum."""
        g_sync = self.sync.step(g, examples)
        return None if g_sync is None else fourier.witness(g_sync)

    def pick_up(self, came: Packed, device: torch.device) -> None:
        """Go on from a witness that travelled here."""
        self.sync.begin(-torch.tensor(came.unpack()["w"]).to(device))

    def packed(self) -> Packed:
        """It, as it travels with the round; always in full precision."""
        g_sync = self.sync.latest
        assert g_sync is not None  # a round has a window or more
        w = fourier.witness(g_sync).to("cpu", torch.float32)
        return wire.pack({"w": w.numpy()}, Kind.GRADIENT)
