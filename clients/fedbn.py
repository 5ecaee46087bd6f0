"""FedBN's clients: sources that keep their BatchNorm layers, and AdaBN's target.

Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623, algorithm 1.
"""

import torch

from fedda.models import Model, batchnorms

from . import adabn, fedavg
from .site.request import Numbers
from .site.state import Kept

Target = adabn.Target


class Norms:
    """The BatchNorm layers of a model, which stay at their site."""

    def __init__(self, model: Model) -> None:
        self.layers = batchnorms(model)

    def put_down(self) -> Kept:
        """Return weights and statistics of all layers, by name."""
        kept = Kept()
        for name, layer in self.layers.items():
            kept.put(name, layer.state_dict())
        return kept

    def take_up(self, kept: Kept, device: torch.device) -> None:
        """Replace what the server sent by what this site trained."""
        for name, layer in self.layers.items():
            layer.load_state_dict(kept.get(name))


class Source(fedavg.Source):
    """Trains as FedAvg's source, with BatchNorm layers of its own."""

    def train(self) -> Numbers:
        """Line 4: b_k of this site's last round, then local steps."""
        self.stays("norms", Norms(self.model))
        return super().train()
