"""How frequent a target's classes are, by what several models predict there, without labels.

Saerens, Latinne and Decaestecker, Neural Computation 2002, https://doi.org/10.1162/089976602753284446

    N, K, C  sizes        images of the target, models, classes
    p        (..., N, C)  a model's class probabilities of the images
    label    (K, N)       the class that each model gives an image
    q        (C,)         shares of the classes at the target; they sum to 1

An estimate is about as wrong as the models: where these overlook a class, so does it.
"""

import torch
from torch import Tensor

from .refine import Shares

PRIOR = 0.3  # images that each class has more in estimated shares, so that none is nil
# Where two models give an image the same class so often or more, estimated shares count: they are
# about as wrong as the models. On digits, where these agree on .1 to .4, they cost SHOT 2 points
# and DECISION 6: even shares bring back what models overlook (examples/benchmarks/shares.py).
AGREED = 0.8


def estimated(p: Tensor) -> Tensor:
    """The mean of the predictions p (N, C), each class with PRIOR images more -> q (C,)."""
    q = p.mean(dim=0) + PRIOR / len(p)
    return q / q.sum()


def alike(label: Tensor) -> float | None:
    """How often two of K models (K, N) give an image the same class -> share of pairs and images.

    Ours: a sign of whether the models are good enough here to learn from them how frequent classes
    are. None of one model.
    """
    K, N = label.shape
    if K < 2:
        return None
    count = torch.zeros(N, int(label.max()) + 1, dtype=torch.long, device=label.device)
    count.scatter_add_(1, label.T, torch.ones_like(label.T))  # models that give an image a class
    return float((count * (count - 1)).sum(dim=1).double().mean() / (K * (K - 1)))


def counts(shares: Shares, alike: float | None) -> bool:
    """Whether estimated shares count where models are so much `alike`; None: there is one model."""
    return shares == "estimated" or (shares == "auto" and alike is not None and alike >= AGREED)
