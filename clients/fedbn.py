"""FedBN's clients: sources that keep their BatchNorm layers, and AdaBN's target.

Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623, algorithm 1.
"""

from torch import nn

from fedda.models import batchnorms

from . import adabn, fedavg
from .site.request import Numbers
from .site.workspace import Network

Target = adabn.Target


class Source(fedavg.Source):
    """Trains as FedAvg's source, with BatchNorm layers of its own."""

    def train(self) -> Numbers:
        """Line 4: b_k of this site's last round, then local steps."""
        layers = nn.ModuleList(batchnorms(self.model).values())
        self.register_state("norms", Network(layers))
        return super().train()
