"""AdaBN's clients: FedAvg's sources, and a target that estimates BatchNorm's statistics anew.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779, algorithm 1.
"""

import torch
from torch import nn

from fedda import models
from fedda.algorithms import adabn
from fedda.data import Unlabelled
from fedda.models import batchnorms, inputs_of

from . import fedavg
from .base import Client
from .site.request import Numbers

Source = fedavg.Source


class Target(Client):
    """Replaces the running statistics, and changes no parameter."""

    data: Unlabelled

    @torch.no_grad()
    def estimate(self) -> Numbers:
        """Algorithm 1: forward passes over all images, in an order drawn anew each round.

        A layer's inputs depend on the statistics of the layers before it. So each batch is
        normalised by its own statistics, as in training. Dropout stays off, as in the test that
        follows.

        Raises:
            ConfigError: the model has no BatchNorm, or the site has too few images.
        """
        adabn.check_batchnorm(self.model.state_dict(), self.task.model.name)
        seen: dict[nn.Module, adabn.Moments] = {}
        layers = list(batchnorms(self.model).values())
        draws = self.generator("statistics")
        order, steps = torch.randperm(len(self.data), generator=draws), 0
        with models.batch_statistics(self.model), inputs_of(layers) as entering:
            for indices in self.split([order]):
                self.model(self.inputs(indices))
                for layer in layers:
                    batch = adabn.moments(entering[layer])
                    seen[layer] = adabn.merge(seen[layer], batch) if layer in seen else batch
                steps += 1
        for layer in layers:
            if layer.running_mean is not None and layer.running_var is not None:
                layer.running_mean.copy_(seen[layer].mean)
                layer.running_var.copy_(seen[layer].variance)
        return {"steps": steps}
