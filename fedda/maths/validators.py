"""What predictions are worth without labels: scores that tend to rise with the true accuracy.

Higher is better in all of them. None is a proof: a model may be sure, balanced and wrong.

    infomax   Shi and Sha, ICML 2012, https://arxiv.org/abs/1206.6438
    bnm       Cui et al., CVPR 2020, https://arxiv.org/abs/2003.12237
    snd       Saito et al., ICCV 2021, https://arxiv.org/abs/2108.10860
    ami       ClassAMI of Musgrave et al., https://arxiv.org/abs/2208.07360; the adjusted mutual
              information is that of Vinh et al., JMLR 2010

    p         (N, C)  predicted class probabilities of N images
    z         (N, d)  their features
    tau       float   temperature of the similarities
"""

import math

import torch
from torch import Tensor

TAU = 0.05  # the paper's
MOST = 1000  # images whose pairs or clusters are looked at; the costs grow with their square


def infomax(p: Tensor) -> float:
    """Entropy of the mean prediction minus mean entropy -> nats, at most ln C.

    High where the model is sure of each image and uses all classes.
    """
    return float(entropy(p.mean(dim=0)) - entropy(p).mean())


def bnm(p: Tensor) -> float:
    """Nuclear norm of the predictions, divided by its largest value sqrt(N min(N, C)) -> [0, 1].

    1 where every image has one sure class and all classes have equally many images.
    """
    N, C = p.shape
    return float(torch.linalg.svdvals(p.double()).sum() / math.sqrt(N * min(N, C)))


def snd(p: Tensor, tau: float = TAU) -> float:
    """Soft neighbourhood density: mean entropy of the similarities to all others -> [0, 1].

    Each image's cosine similarities to the other images' predictions become a distribution by a
    softmax at temperature tau. It is spread widely where many images are predicted alike. The
    paper's value is divided here by its largest, ln(N - 1), so that numbers of images compare.
    """
    N = len(p)
    if N < 3:
        return 0.0
    unit = torch.nn.functional.normalize(p.double(), dim=1)
    similar = unit @ unit.T / tau  # (N, N)
    similar.fill_diagonal_(-math.inf)
    return float(entropy(similar.softmax(dim=1)).mean() / math.log(N - 1))


def ami(z: Tensor, p: Tensor, seed: int) -> float:
    """ClassAMI: how well k-means of the features agrees with the predicted classes -> at most 1.

    The clusters are as many as the classes that are predicted. 0 is what chance gives, and what a
    model has that predicts one class only.

    Args:
        z: (N, d) features.
        p: (N, C) predictions of the same images.
        seed: seed of the clusters' first centres.
    """
    from sklearn.metrics import adjusted_mutual_info_score  # takes 100 MB: import only on use

    from .gap import clusters

    label = p.argmax(dim=1).cpu()
    count = int(label.unique().numel())
    if count < 2:
        return 0.0
    found = clusters(z, count, seed).cpu()
    return float(adjusted_mutual_info_score(label.numpy(), found.numpy()))


def largest(p: Tensor) -> float:
    """The share of the images that are given the class which most are given -> (0, 1]."""
    return float(p.argmax(dim=1).bincount().max() / len(p))


def subset(N: int, generator: torch.Generator, most: int = MOST) -> Tensor:
    """Indices of at most so many of N images, drawn without replacement, in order."""
    if most >= N:
        return torch.arange(N)
    return torch.randperm(N, generator=generator)[:most].sort().values


def entropy(q: Tensor) -> Tensor:
    """Entropies of distributions (..., C) -> (...), in nats."""
    return -(q * q.clamp_min(1e-12).log()).sum(dim=-1)
