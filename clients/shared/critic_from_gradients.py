"""What a critic's other side tells of its mean by the gradients that it adds to the sums."""

from collections import deque

import torch
from torch import Tensor

from fedda.adversarial import critic_estimate

from .shared_discriminator import Copy

SUMS = 5  # the last ones; further back the way to the end is longer than the rule is exact


class Overheard:
    """Listens to one group of two, as long as its critic is trained.

    Args:
        copy: this site's copy of the critic, before its first sum.
    """

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._travelling: deque[Tensor] = deque()  # weights whose gradients have no sum yet
        self._heard: deque[tuple[Tensor, Tensor]] = deque(maxlen=SUMS)
        copy.sync.heard = self._hear

    def sends(self) -> None:
        """Note where the critic is, just before this site's gradient is sent."""
        self._travelling.append(self._weights())

    def mean(self, v: Tensor) -> tuple[float, float]:
        """The other side's mean and how far off it may be, when all sums have come.

        Args:
            v: (N,) the critic's values on this site's images.
        """
        w, g = zip(*self._heard, strict=True)
        *_, W, b = self._copy.DI.parameters()
        last = W.numel() + b.numel()
        path = torch.stack([*w, self._weights()])
        return critic_estimate.told(
            path, -torch.stack(g), last, v.cpu()
        )  # a source's half is minus it

    def _hear(self, g: Tensor) -> None:
        self._heard.append((self._travelling.popleft(), g.double()))

    def _weights(self) -> Tensor:
        flat = [p.detach().reshape(-1) for p in self._copy.DI.parameters()]
        return torch.cat(flat).to("cpu", torch.float64, copy=True)
