"""FedProx's source: FedAvg's with a pull towards the model the server sent.

Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127, algorithm 2.
"""

from torch import Tensor

from fedda.algorithms.fedprox import proximal

from . import fedavg
from .site.request import Numbers

Target = fedavg.Target


class Source(fedavg.Source):
    """Cross entropy + mu/2 |w - w_t|^2."""

    def train(self) -> Numbers:
        self.anchor = [w.detach().clone() for w in self.model.parameters()]
        return super().train()

    def penalty(self) -> Tensor:
        return proximal(list(self.model.parameters()), self.anchor, self.options.mu)
