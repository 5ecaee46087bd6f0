"""FADA's gap statistic: how tightly the target's features cluster under a model.

Peng et al., ICLR 2020, https://arxiv.org/abs/1911.02054, eq. 3 and dynamic attention

    z           (N, d)  features of the target's images
    assignment  (N,)    the cluster of each
    I           float   gap statistic; the tighter the clusters, the smaller
    T           float   the same with one cluster for all: the features' scatter
    gain        (K,)    I before minus I after each source's update
"""

from typing import Literal

import torch
from torch import Tensor

Unit = Literal["share", "sum"]  # a share of the features' scatter; eq. 3's own sum


def clusters(z: Tensor, C: int, seed: int) -> Tensor:
    """k-means of features z (N, d) into C clusters -> assignment (N,)."""
    from sklearn.cluster import KMeans  # takes 100 MB: import only on use

    assignment = KMeans(min(C, len(z)), random_state=seed).fit_predict(z.cpu().numpy())
    return torch.from_numpy(assignment).long().to(z.device)


def gap_statistic(z: Tensor, assignment: Tensor) -> Tensor:
    """FADA eq. 3: I = sum_r 1/(2 n_r) sum_{i,j in r} |f_i - f_j|^2 -> float64 scalar.

    A cluster's sum over pairs is 2 n_r times the sum of squared distances to its centre, so this
    takes O(N d) and needs no pairs.
    """
    z = z.double()
    count = assignment.bincount().clamp(min=1)
    centre = z.new_zeros(len(count), z.shape[1]).index_add_(0, assignment, z) / count[:, None]
    return ((z - centre[assignment]) ** 2).sum()


def scatter(z: Tensor) -> Tensor:
    """The sum of squared distances of features z (N, d) to their mean -> T, float64 scalar."""
    z = z.double()
    return ((z - z.mean(dim=0)) ** 2).sum()


def share(statistic: float, scatter: float) -> float:
    """I / T: what clusters leave of the scatter; 1, which is all, where features are all equal."""
    return statistic / scatter if scatter > 0 else 1.0


def gap_weights(gain: Tensor) -> Tensor:
    """FADA's dynamic attention: softmax of the gains -> (K,) float64."""
    return gain.double().softmax(dim=0)
