"""FedBN: FedAvg with BatchNorm layers that each source keeps for itself.

Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623, algorithm 1

    w_k    a source's weights without BatchNorm, averaged in every round
    b_k    its BatchNorm layers, weights and statistics, which are never overwritten there

A target has no labels to train such layers with. It is the paper's client that joins later: it
takes the mean of the sources' BatchNorm weights, and statistics of its own images (section 5.3).
"""

from fedda.algorithms import adabn
from fedda.methods import Method


class Config(adabn.Config):
    """FedAvg's setting; FedBN adds none."""


METHOD = Method(
    "fedbn",
    "FedBN",
    Config,
    adabn.METHOD.phases,
    batchnorm=True,
)
