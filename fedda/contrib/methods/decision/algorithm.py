"""DECISION: SHOT's models adapt together, and the target learns how much each of them counts.

Ahmed et al., CVPR 2021, https://arxiv.org/abs/2104.01845, section 3, and the authors' code,
https://github.com/driptaRC/DECISION. The losses are SHOT's (`fedda.algorithms.shot`).

    N, C, K, d  sizes       images of the target, classes, models, features
    logits      (K, N, C)   of the models, whose heads are frozen
    w           (K,)        their weights, learnt beside the encoders, summing to 1
    v           (K, N, d)   each model's points, and mu (K, C, d) its centroids
    beta        float       weight of the cross entropy on pseudo-labels

The target's prediction is softmax(sum_k w_k logits_k), with w = softmax(a) of parameters a that
begin equal. In the authors' code w is sigmoid(a) / sum(sigmoid(a)), and a begins between -1 and 1
(`decision.weights=ratio`): so with three models a weight begins between .16 and .58.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedda.algorithms import shot
from fedda.config.sections import Scalar
from fedda.maths.ensemble import Weights
from fedda.methods import Hop, Method
from fedda.wire import Number, Rule


class Config(shot.Config):
    """SHOT's settings, and how the weights are formed."""

    weights: Weights = "softmax"
    """of the models: softmax of parameters that begin equal, or as in the authors' code a ratio of
    sigmoids of parameters that begin between -1 and 1"""


def nearest_together(v: Tensor, mu: Tensor, w: Tensor) -> Tensor:
    """The class c with the smallest |sum_k w_k v_k - sum_k w_k mu_kc| -> label (N,).

    A class that no model gave to any image has centroids of zeros only, and is nobody's label; in
    the authors' code zero can be the nearest centroid.

    Args:
        v: (K, N, d).
        mu: (K, C, d).
        w: (K,).
    """
    distance = torch.cdist(torch.einsum("k,knd->nd", w, v), torch.einsum("k,kcd->cd", w, mu))
    empty = (mu == 0).all(dim=2).all(dim=0)  # (C,)
    return distance.masked_fill(empty, torch.inf).argmin(dim=1)


WEIGHT = Number("weight/*", 0.001)

ADAPT: Hop = {
    part: replace(contract, leaves=Rule(numbers=shot.TRAINED | {WEIGHT}))
    for part, contract in shot.ADAPT.items()
}

# The authors' code: 15 epochs at the target, batches of 32. It saves a source's last model, as is
# done here, since what it notes as the best of ten is no copy; its rate falls with every step.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": shot.PRESETS["paper"] | {"train.batch-size": 32},
    "official": shot.PRESETS["official"] | {"train.batch-size": 32, "weights": "ratio"},
}

METHOD = Method(
    "decision",
    "DECISION",
    Config,
    shot.phases(ADAPT),
    PRESETS,
    stays=lambda options: True,
    extend=shot.extend,
)
