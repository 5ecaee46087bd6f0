"""AdaBN's clients: FedAvg's sources, and a target that estimates BatchNorm's statistics anew.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779, algorithm 1.
"""

import torch

from fedda import models
from fedda.algorithms import adabn
from fedda.data import Unlabelled

from . import fedavg
from .base import Client
from .site.request import Numbers

Source = fedavg.Source


class Target(Client):
    """Replaces the running statistics, and changes no parameter."""

    data: Unlabelled

    def estimate(self) -> Numbers:
        """Algorithm 1: forward passes over all images, in an order drawn anew each round.

        Raises:
            ConfigError: the model has no BatchNorm, or the site has too few images.
        """
        adabn.check_batchnorm(self.model.state_dict(), self.task.model.name)
        order = torch.randperm(len(self.data), generator=self.generator("statistics"))
        with torch.no_grad():
            parts = map(self.inputs, self.split([order]))
            return {"steps": models.own_statistics(self.model, parts)}
