"""FedAvg: the weighted mean of the models that sites trained.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629

    counts   (K,)   examples n_k at each site
    weights  (K,)   n_k / n, summing to 1; the mean itself is `fedda.maths.average`
"""

from typing import Literal

import torch
from torch import Tensor

from fedda.config.sections import Section
from fedda.methods import Hop, Method, Phase
from fedda.wire import EPSILON, LOSS, MODEL, SECONDS, STEPS, Part, Rule

Weighting = Literal["examples", "uniform"]


class Config(Section):
    """FedAvg's one setting."""

    weighting: Weighting = "examples"
    """weights of sites: by number of examples, or all equal"""


def weights(counts: Tensor, weighting: Weighting = "examples") -> Tensor:
    """Alg. 1: n_k / n, or 1 / K if uniform or if no site has examples -> (K,) float64."""
    n = counts.double()
    if weighting == "uniform" or not n.sum() > 0:
        n = torch.ones_like(n)
    return n / n.sum()


# With `privacy.noise`, epsilon in place of the loss, which would tell of the examples.
TRAINED = Rule(MODEL, frozenset({LOSS, EPSILON, STEPS, SECONDS}))

# Training on labels, which most methods request from the sources, and use each model.
TRAIN: Hop = {"source": Part(Rule(MODEL), TRAINED, labels=True)}

# The same where only the mean is needed.
AVERAGED: Hop = {"source": Part(Rule(MODEL), TRAINED, labels=True, private=True, needed="mean")}

METHOD = Method("fedavg", "FedAvg (source-only)", Config, (Phase("train", {"train": AVERAGED}),))
