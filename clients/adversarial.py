"""A site's part in adversarial training: its copy of a discriminator, moved by shared gradients."""

import torch
from torch import Tensor

from fedda.adversary import (
    Discriminator,
    Network,
    flat_gradient,
    make_optimizer,
    set_gradient,
)
from fedda.lazy import LazySync

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

    def keep(self, kept: Kept) -> None:
        """Put down what the next round goes on from."""
        kept.put("discriminator", self.DI.state_dict())
        kept.put_optimizer("discriminator-optimizer", self.optimizer)
        kept.put("sync", self.sync.state())

    def restore(self, kept: Kept, device: torch.device) -> None:
        """Go on from what `keep` put down."""
        self.DI.load_state_dict(kept.get("discriminator"))
        self.optimizer.load_state_dict(kept.get_optimizer("discriminator-optimizer"))
        self.sync.restore(kept.get("sync"), device)
