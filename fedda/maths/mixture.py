"""A head made of several linear heads: their mean, or the surest of them."""

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

    def each(self, z: Tensor) -> Tensor:
        """Log probabilities of each head -> (N, K, C)."""
        return (torch.einsum("nd,kcd->nkc", z, self.weight) + self.bias).log_softmax(dim=2)

    def forward(self, z: Tensor) -> Tensor:
        """Log probabilities -> (N, C)."""
        weights = self.alpha.clamp_min(torch.finfo(z.dtype).tiny).log()
        return (self.each(z) + weights[:, None]).logsumexp(dim=1)


class Surest(Mixture):
    """The log probabilities of the head whose largest one is the largest, input by input."""

    def forward(self, z: Tensor) -> Tensor:
        """Log probabilities -> (N, C); of two heads that are equally sure the first one's."""
        log_p = self.each(z)
        surest = log_p.amax(dim=2).argmax(dim=1)[:, None, None]  # (N, 1, 1)
        return log_p.gather(1, surest.expand(-1, 1, self.out_features)).squeeze(1)
