"""What predictions are worth without labels: infomax, which tends to rise with the true accuracy.

Shi and Sha, ICML 2012, https://arxiv.org/abs/1206.6438. It is no proof: a model may be sure,
balanced and wrong. Runs name their selected round by it, and `run.patience` ends them by it.

    p         (N, C)  predicted class probabilities of N images
"""

from torch import Tensor


def infomax(p: Tensor) -> float:
    """Entropy of the mean prediction minus mean entropy -> nats, at most ln C.

    High where the model is sure of each image and uses all classes.
    """
    return float(entropy(p.mean(dim=0)) - entropy(p).mean())


def entropy(q: Tensor) -> Tensor:
    """Entropies of distributions (..., C) -> (...), in nats."""
    return -(q * q.clamp_min(1e-12).log()).sum(dim=-1)
