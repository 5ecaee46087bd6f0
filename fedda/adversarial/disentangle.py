"""Disentangling features: the networks that never leave their site, and their losses.

Peng et al., FADA, ICLR 2020, https://arxiv.org/abs/1911.02054, eqs. 6 to 8 and tables 6 to 8;
Belghazi et al., MINE, ICML 2018, https://arxiv.org/abs/1801.04062, for the mutual information.
"The parent code" is that of Peng et al., DAL, ICML 2019, which FADA follows in eqs. 7 and 8:
https://github.com/VisionLearningGroup/DAL, for digits.

    z            (N, d)  features of a batch, z = G(x)
    f_di         (N, m)  domain-invariant part, from one of D's two branches of z
    f_ds         (N, s)  domain-specific part, from the other; s = m unless settings say otherwise
    CI                   class identifier: logits (N, C) of f_ds
    M                    estimator: M(f_di, f_ds) -> (N,), for joint and for shuffled pairs
    R                    reconstructor: R([f_di, f_ds]) -> (N, d)
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedda.config.sections import Section, validate
from fedda.errors import ModelError

SIZES = r"^[1-9]\d{0,4}(,[1-9]\d{0,4})*$"


class Layers(Section):
    """The layers of the networks that never leave their site."""

    disentangler: str = Field(default="256,256", pattern=SIZES)
    """layers of both branches of D, each with BatchNorm and ReLU; tables 6 to 8: 3072,2048
    (digits), 64,32 (Amazon Review), 2048,2048 (photographs)"""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """share of values left out in D while training"""
    dropout_first: bool = False
    """also before D's first layer: table 8; false: tables 6 and 7"""
    class_norm: bool = True
    """BatchNorm in the class identifier: tables 6 to 8; false: the parent code"""
    estimator: int = Field(default=512, ge=1, le=10_000)
    """hidden units of the estimator M"""

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.disentangler.split(","))


# ---- the networks ------------------------------------------------------------------------------


def branch(d: int, widths: Sequence[int], dropout: float, dropout_first: bool) -> nn.Sequential:
    """One branch of D: linear, BatchNorm, ReLU per width, with dropout between them."""
    layers: list[nn.Module] = []
    for i, (before, width) in enumerate(pairwise((d, *widths))):
        if dropout and (i > 0 or dropout_first):
            layers.append(nn.Dropout(dropout))
        layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers)


def class_identifier(s: int, classes: int, norm: bool) -> nn.Sequential:
    """CI: logits of f_ds -> (N, C); the softmax is part of its losses."""
    return nn.Sequential(nn.Linear(s, classes), *([nn.BatchNorm1d(classes)] if norm else []))


class Estimator(nn.Module):
    """M: a value per pair of rows, high where the pair looks like one of the joint -> (N,)."""

    def __init__(self, m: int, s: int, units: int) -> None:
        super().__init__()
        self.first = nn.Linear(m, units)
        self.second = nn.Linear(s, units)
        self.value = nn.Linear(units, 1)

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        return self.value(F.leaky_relu(self.first(p) + self.second(q))).squeeze(1)


class Remote(nn.Linear):
    """The classifier of f_di in a model whose disentangler is at another place."""

    def forward(self, input: Tensor) -> Tensor:
        """Refuse features that are not disentangled.

        Raises:
            ModelError: always; `classified` is what a site uses.
        """
        raise ModelError(
            "This model of FADA has no disentangler, which never leaves its site; use the model "
            "file that the target keeps in its --state-dir."
        )

    def classified(self, f_di: Tensor) -> Tensor:
        """Logits of the domain-invariant part (N, m) -> (N, C)."""
        return F.linear(f_di, self.weight, self.bias)


def extend(model: Any, settings: Mapping[str, Any]) -> None:
    """Replace a model's head by one for f_di; if `whole`, put D's invariant branch before it.

    Only the file that the target keeps is whole.
    """
    whole = settings["whole"]
    layers = validate(Layers, {k: v for k, v in settings.items() if k != "whole"}, "fada.layers")
    m, classes = layers.widths[-1], model.head.out_features
    if whole:
        D = branch(model.width, layers.widths, layers.dropout, layers.dropout_first)
        model.encoder = nn.Sequential(OrderedDict(features=model.encoder, disentangler=D))
    model.head = (nn.Linear if whole else Remote)(m, classes)


# ---- the losses --------------------------------------------------------------------------------


def negative_entropy(logits: Tensor) -> Tensor:
    """Eq. 7: mean over images of sum_c p_c log p_c, from -log C to 0 -> scalar."""
    log_p = logits.log_softmax(dim=1)
    return (log_p.exp() * log_p).sum(dim=1).mean()


def information(M: nn.Module, p: Tensor, q: Tensor, shuffle: Tensor) -> Tensor:
    """Eq. 8: mean M(p, q) - log mean exp M(p, q'), a lower bound of I(p; q) in nats -> scalar.

    Args:
        M: the estimator.
        p: (N, m).
        q: (N, s), the other part of the same images.
        shuffle: (N,) an order of the images; q' = q[shuffle] comes from the marginal distribution.
    """
    return M(p, q).mean() - (M(p, q[shuffle]).logsumexp(dim=0) - math.log(len(q)))


def reconstruction(R: nn.Module, f_di: Tensor, f_ds: Tensor, z: Tensor) -> Tensor:
    """The L2 loss of section 4, per value as in the parent code: mean (R - z)^2 -> scalar.

    No gradient reaches z: the features are what is reconstructed, and must not shrink for it.
    """
    return F.mse_loss(R(torch.cat([f_di, f_ds], dim=1)), z.detach())
