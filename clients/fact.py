"""FACT's clients: sources that train and refit their heads, a target that moves the encoder.

Schrod et al., https://arxiv.org/abs/2306.00607.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from fedda import wire
from fedda.algorithms import fact
from fedda.data import Unlabelled
from fedda.models import Model
from fedda.train import learning_rate, make_optimizer
from fedda.wire import Kind, Packed

from . import fedavg
from .base import Client
from .site.request import Numbers


class Source(fedavg.Source):
    """Cross entropy on the site's own images: by the whole model, then by the head alone."""

    def train(self) -> Numbers:
        """Train the whole model."""
        return self.minimise(self.loss_of)

    def refit(self) -> Numbers:
        """Fit the head to the features that the two sources' mean encoder gives."""
        return self.minimise(self.loss_of, half_optimizer(self, self.model.head))

    def loss_of(self, indices: Tensor) -> Tensor:
        """The cross entropy of a mini-batch's images; while the head is refitted, by it alone."""
        x = self.inputs(indices)
        with torch.no_grad() if self.request.hop == "refit" else nullcontext():
            z = self.model.features(x)
        logits = fact.answers(self.model.head(z), self.options.softmax)
        return F.cross_entropy(logits, self.labels(indices))

    def outgoing(self) -> dict[str, Packed]:
        """Return the model, or the head alone after it was refitted."""
        if self.request.hop != "refit":
            return super().outgoing()
        self.settle()
        head = {
            f"head.{n}": t.detach().cpu().numpy() for n, t in self.model.head.state_dict().items()
        }
        return {"head": wire.pack(head, Kind.MODEL, self.task.wire.dtype)}


class Target(Client):
    """Changes the encoder until the two heads agree about its images."""

    data: Unlabelled

    def cross(self) -> Numbers:
        """Minimise the discrepancy by the encoder's parameters, for the images of one round."""
        C1 = self.model.head
        C2 = copy.deepcopy(C1)
        came = self.request.arrays["head"].unpack()
        C2.load_state_dict({n.removeprefix("head."): torch.tensor(a) for n, a in came.items()})

        def loss(indices: Tensor) -> Tensor:
            z = self.features(indices)
            return fact.discrepancy(C1(z), C2(z), self.options.softmax)

        return self.minimise(loss, half_optimizer(self, self.model.encoder))


def half_optimizer(client: Client, half: nn.Module) -> optim.Optimizer:
    """The run's optimizer of an encoder's or a head's parameters, at the rates of the whole model.

    Its momentum is not kept from round to round.
    """
    train, request, model = client.task.train, client.request, client.model
    rate = learning_rate(train, request.round, client.task.rounds)
    return client.paced(make_optimizer(groups_of(model, half, rate), train, rate))


def groups_of(model: Model, half: nn.Module, rate: float) -> list[dict[str, Any]]:
    """Parameter groups of a half of a model, with the rates that they have in the whole."""
    own = {id(p) for p in half.parameters()}
    halves = [g | {"params": [p for p in g["params"] if id(p) in own]} for g in model.groups(rate)]
    return [group for group in halves if group["params"]]
