"""A head made of several linear heads, whose probabilities are averaged."""

import torch
from torch import Tensor, nn


class Mixture(nn.Module):
    """log sum_k alpha_k softmax(W_k z + b_k), so that its softmax is the average itself.

    W (K, C, d), b (K, C), alpha (K,) in the simplex.
    """

    weight: Tensor
    bias: Tensor
    alpha: Tensor

    def __init__(self, heads: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.heads, self.in_features, self.out_features = heads, in_features, out_features
        self.register_buffer("weight", torch.zeros(heads, out_features, in_features))
        self.register_buffer("bias", torch.zeros(heads, out_features))
        self.register_buffer("alpha", torch.full((heads,), 1 / heads))

    def forward(self, z: Tensor) -> Tensor:
        """Log probabilities -> (N, C)."""
        logits = torch.einsum("nd,kcd->nkc", z, self.weight) + self.bias
        weights = self.alpha.clamp_min(torch.finfo(z.dtype).tiny).log()
        return (logits.log_softmax(dim=2) + weights[:, None]).logsumexp(dim=1)
