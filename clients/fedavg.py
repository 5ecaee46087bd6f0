"""FedAvg's clients: a source trains on its labels, the target takes no part in training.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1, ClientUpdate.
"""

from torch import Tensor
from torch.nn import functional as F

from fedda import models
from fedda.data import Labelled
from fedda.train import balanced

from .base import Client
from .site import noised
from .site.request import Numbers


class Source(Client):
    """Cross entropy on the site's own images."""

    data: Labelled

    def train(self) -> Numbers:
        """Lines 2 to 4; with `privacy.noise` by DP-SGD."""
        if self.task.privacy.noise:
            return noised.train(self, self.labels, self.penalty)
        return self.minimise(self.loss_of)

    def loss_of(self, indices: Tensor) -> Tensor:
        """The loss of a mini-batch's images."""
        loss = F.cross_entropy(self.model(self.inputs(indices)), self.labels(indices))
        return loss + self.penalty()

    def labels(self, indices: Tensor) -> Tensor:
        """The labels of images, on the site's device -> (N,)."""
        return models.to_device(self.data.y[indices], self.device)

    def sampled(self, shares: list[Tensor]) -> list[Tensor]:
        """With `train.sampler=balanced`, images of rare classes come several times."""
        if self.task.train.sampler == "shuffle":
            return shares
        draws = self.generator("balance")
        return [balanced(share, self.data.y, draws) for share in shares]

    def penalty(self) -> Tensor | float:
        """What a method adds to the loss; nothing in FedAvg."""
        return 0.0


class Target(Client):
    """Tests the model; has nothing to train on."""
