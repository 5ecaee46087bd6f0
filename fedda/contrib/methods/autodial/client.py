"""AutoDIAL's clients: both sides train the same model, each with the other's moments.

Carlucci et al., ICCV 2017, https://arxiv.org/abs/1704.08082.
"""

import torch
from torch import Tensor, optim

from fedda.clients import fedavg
from fedda.clients.base import Client
from fedda.clients.site.request import Numbers
from fedda.data import Unlabelled
from fedda.train import Paced

from . import algorithm as autodial


class Source(fedavg.Source):
    """Cross entropy on the site's own images."""

    def train(self) -> Numbers:
        """Train on labels, normalised by the mixture with the target's moments."""
        mix(self)
        return super().train()

    def optimizer(self, *args: object, **more: object) -> optim.Optimizer:
        """The run's optimizer, after whose steps alpha is within its bounds."""
        return bounded(self, super().optimizer(*args, **more))  # type: ignore[arg-type]


class Target(Client):
    """The entropy of its predictions, by the mixture with the sources' moments."""

    data: Unlabelled

    def train(self) -> Numbers:
        """Minimise lambda times the entropy; the sources' steps already decay the weights."""
        mix(self)
        optimizer = bounded(self, self.optimizer())
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0

        def H(indices: Tensor) -> Tensor:
            return autodial.entropy(self.model(self.inputs(indices)))

        q = (self.request.round - 1) / self.task.rounds
        return self.minimise(H, optimizer, times=self.options.entropy_at(q))


def mix(client: Client) -> None:
    """Let the layers know their side, and whether the other side's moments have come yet."""
    for layer in autodial.layers(client.model):
        layer.side = client.side
        layer.mixes = client.request.round > client.request.stage.first


def bounded(client: Client, optimizer: optim.Optimizer) -> optim.Optimizer:
    """Keep every alpha between 1/2 and 1 after each step of an optimizer."""

    @torch.no_grad()
    def bound(*_: object) -> None:
        for layer in autodial.layers(client.model):
            layer.alpha.clamp_(autodial.LOWEST, 1.0)

    moving = optimizer.inner if isinstance(optimizer, Paced) else optimizer
    moving.register_step_post_hook(bound)
    return optimizer
