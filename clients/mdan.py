"""MDAN's clients: f-DANN's with pairs, weighted at the target. Zhao et al., NeurIPS 2018."""

import torch
from torch import Tensor

from . import fdann
from .fdann import Source as Source  # unchanged


class Target(fdann.Target):
    """Trains its encoder by w_j times the reversed gradient of every DI_j."""

    def combined(self, losses: dict[str, Tensor]) -> Tensor:
        """Sum_j w_j d_j, with this side's half of every d_j -> scalar."""
        w = {n: self.request.numbers[n.replace(self.shared, "weight", 1)] for n in losses}
        return torch.stack([w[n] * loss for n, loss in losses.items()]).sum()

    def reported(self, each: dict[str, fdann.StepNumbers]) -> fdann.StepNumbers:
        """Return f-DANN's means, and this side's half of every d_j."""
        own = {n.replace("/", "-loss/", 1): of["discriminator-loss"] for n, of in each.items()}
        return super().reported(each) | own
