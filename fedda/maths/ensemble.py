"""Models side by side: several encoders, each with a linear head, answer for the same inputs.

K, N, C, d   sizes         models, inputs, classes, features of one model
z            (N, K d)      the features of all models, one model's after the other's
logits       (K, N, C)     each model's own answer
w            (K,)          weights of the models, summing to 1
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Mean = Literal["probabilities", "logits"]
Weights = Literal["softmax", "ratio"]


def weights_of(a: Tensor, form: Weights) -> Tensor:
    """Softmax of a, or the ratio sigmoid(a) / sum_k sigmoid(a_k); none is negative -> w (K,)."""
    return a.softmax(dim=0) if form == "softmax" else a.sigmoid() / a.sigmoid().sum()


class SideBySide(nn.Module):
    """Encoders whose features stand side by side, z = (z_1, .., z_K)."""

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(encoders)

    def forward(self, x: Tensor) -> Tensor:
        """Features of all models -> (N, K d)."""
        return torch.cat([encoder(x) for encoder in self.members], dim=1)


class Heads(nn.Module):
    """A linear head per model, and what they say together; the heads themselves are not trained.

    W (K, C, d), b (K, C), a (K,) from which the weights w follow.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self, models: int, d: int, classes: int, mean: Mean, weights: Weights = "softmax"
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = models * d, classes
        self.models = models
        self.mean: Mean = mean
        self.weights: Weights = weights
        self.register_buffer("weight", torch.zeros(models, classes, d))
        self.register_buffer("bias", torch.zeros(models, classes))
        self.a = nn.Parameter(torch.ones(models))

    @property
    def w(self) -> Tensor:
        """The weights of the models -> (K,)."""
        return weights_of(self.a, self.weights)

    def apart(self, z: Tensor) -> Tensor:
        """Split the features of all models -> (K, N, d)."""
        return z.unflatten(1, (self.models, -1)).transpose(0, 1)

    def each(self, z: Tensor) -> Tensor:
        """Every model's own logits, W_k z_k + b_k -> (K, N, C)."""
        return torch.einsum("knd,kcd->knc", self.apart(z), self.weight) + self.bias[:, None]

    def together(self, logits: Tensor) -> Tensor:
        """sum_k w_k logits_k; or log sum_k w_k softmax(logits_k) -> (N, C)."""
        if self.mean == "logits":
            return torch.einsum("k,knc->nc", self.w, logits)
        w = self.w.clamp_min(torch.finfo(logits.dtype).tiny).log()
        return (logits.log_softmax(dim=2) + w[:, None, None]).logsumexp(dim=0)

    def forward(self, z: Tensor) -> Tensor:
        """Logits whose softmax is the prediction of all models together -> (N, C)."""
        return self.together(self.each(z))
