"""DECISION's clients: SHOT's sources, and a target that adapts all models and weights together.

Ahmed et al., CVPR 2021, https://arxiv.org/abs/2104.01845.
"""

from typing import Any

import torch
from torch import Tensor

from fedda.algorithms import shot
from fedda.clients import shot as clients
from fedda.clients.shared.side_by_side import parts_of
from fedda.clients.site.request import Numbers
from fedda.maths.ensemble import Weights

from .algorithm import WEIGHT, nearest_together

Source = clients.Source


class Target(clients.Target):
    """One objective for the weighted logits, by the encoders and the weights."""

    mean = "logits"

    @property
    def weighted(self) -> Weights:
        """How the models' weights follow from the parameters that they have."""
        return self.options.weights

    def initialise(self) -> None:
        """Set the parameters of the weights: all the same, or drawn as in the authors' code."""
        super().initialise()
        if self.options.weights == "ratio":
            _, heads = parts_of(self.model)
            drawn = 2 * torch.rand(heads.models, generator=self.generator("weights")) - 1
            heads.a.data.copy_(drawn)

    def adapt(self) -> Numbers:
        """Adapt, and tell the weights of the sources' models."""
        numbers = super().adapt()
        w = parts_of(self.model)[1].w.tolist()
        told, N = zip(self.names, w, strict=True), len(self.data)
        return numbers | {f"weight/{n}": self.privatise(WEIGHT, v, N) for n, v in told if n}

    def beside(self, rate: float) -> list[dict[str, Any]]:
        """The parameters of the weights, at the rate of new layers."""
        return [{"params": [parts_of(self.model)[1].a], "lr": rate}]

    @torch.no_grad()
    def relabel(self) -> None:
        """Compare all images anew: each model's points, and its centroids of its own labels."""
        answers = self.answers()
        self.v = torch.stack([v for v, _ in answers])  # (K, N, d)
        self.mu = torch.stack([shot.pseudo_labels(v, p)[1] for v, p in answers])  # (K, C, d)

    def objectives(self, logits: Tensor, indices: Tensor) -> Tensor:
        """SHOT's objective of the weighted logits, with labels by the present weights -> (1,)."""
        _, heads = parts_of(self.model)
        label = None
        if self.options.beta:
            v = self.v[:, indices.to(self.v.device)]
            label = nearest_together(v, self.mu, heads.w.detach())
        return shot.target_loss(heads.together(logits), label, self.options.beta, self.q)[None]
