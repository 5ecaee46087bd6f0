"""FedAvg's clients: a source trains on its labels, the target takes no part in training.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1, ClientUpdate.
"""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from fedda.data import Labelled
from fedda.wire import Role

from .base import Client, Numbers, Request


class Source(Client):
    """Cross entropy on the site's own images."""

    role: ClassVar[Role] = "source"
    data: Labelled

    def train(self, request: Request) -> Numbers:
        optimizer = self.optimizer(request)
        total, steps = 0.0, 0
        for indices in self.batches(request):
            y = self.data.y[indices].to(self.site.device)
            loss = F.cross_entropy(self.model(self.inputs(indices)), y) + self.penalty(request)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1  # summed on the device: no stall
        self.workspace.keep(optimizer, request.task, request.round)
        return {"loss": float(total) / max(steps, 1), "steps": steps}

    def penalty(self, request: Request) -> Tensor | float:
        """What a method adds to the loss; nothing in FedAvg."""
        return 0.0


class Target(Client):
    """Tests the model; has nothing to train on."""

    role: ClassVar[Role] = "target"
