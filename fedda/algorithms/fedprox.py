"""FedProx: FedAvg with a penalty that keeps each site near the model it was sent.

Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127

    w        the site's parameters, a list of tensors
    w^t      the parameters the server sent this round, the anchor
    mu       strength of the penalty that pulls w towards w^t
"""

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor

from fedda.algorithms import fedavg
from fedda.methods import Method


class Config(fedavg.Config):
    """FedAvg's setting, and the strength of the penalty."""

    mu: float = Field(default=0.01, ge=0, le=100, description="strength of the proximal term")

    @property
    def pull(self) -> float:
        """How strongly a step pulls the weights back to those that were sent."""
        return self.mu


def proximal(parameters: Iterable[Tensor], anchor: Iterable[Tensor], mu: float) -> Tensor:
    """Eq. 2: mu / 2 |w - w^t|^2, added to the loss of every step -> scalar."""
    terms = [((w - a.detach()) ** 2).sum() for w, a in zip(parameters, anchor, strict=True)]
    return mu / 2 * torch.stack(terms).sum()


METHOD = Method(
    "fedprox",
    "FedProx (source-only)",
    Config,
    fedavg.METHOD.phases,
)
