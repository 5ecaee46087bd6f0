"""SHOT: each source trains a model and may leave; the target adapts all of them by itself.

Liang et al., ICML 2020, https://arxiv.org/abs/2002.08546, sections 3.1 to 3.3, and the authors'
code, https://github.com/tim-learn/SHOT. With several sources each model adapts by itself, and the
target predicts with the mean of their probabilities, as in the paper.

    N, C, d     sizes    images of the target, classes, features
    logits      (N, C)   of a model whose head is frozen; p = softmax(logits)
    z           (N, d)   its features; v, the points that are compared, see `points`
    mu          (C, d)   a centroid per class
    label       (N,)     pseudo-labels
    q           (C,)     shares of the classes at the target; even in the paper
    beta        float    weight of the cross entropy on pseudo-labels

The first round is the only one in which sources take part: each trains for `epochs` epochs.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedda.algorithms import fedavg
from fedda.config import Shares
from fedda.config.sections import Scalar, Section
from fedda.maths import class_shares
from fedda.maths.ensemble import Heads, SideBySide
from fedda.methods import Hop, Method, Phase
from fedda.wire import LOSS_MOST, MODEL, REFUSED, SECONDS, STEPS, TEST, Number, Part, Rule
from fedda.wire.packing import Kind

Centroids = Literal["official", "paper"]
DOUBT = 0.1  # of a teacher that a target brings


class SourcesOnce(Section):
    """Settings of sources that train once; the target has the run's rounds but the first."""

    epochs: int = Field(default=20, ge=0, le=10_000)
    """epochs of the sources, all in the first round; 0: none, the run's first model adapts, as with
    run.start-from"""
    smoothing: float = Field(default=0.1, ge=0, lt=1)
    """label smoothing of the sources' training"""
    head: Literal["weight-norm", "linear"] = "weight-norm"
    """how sources train the head: with its rows' lengths and directions as separate parameters, or
    as it is; what is sent is a linear head"""
    target_pace: float = Field(default=1.0, gt=0, le=10)
    """the target's learning rate, in units of train.lr"""

    def estimates(self, alike: float | None) -> bool:
        """Whether the target's shares of the classes are estimated, by how alike models are."""
        return False


class Config(SourcesOnce):
    """SHOT's settings: those of its sources, and what the target's objective is."""

    beta: float = Field(default=0.3, ge=0, le=100)
    """weight of the cross entropy on pseudo-labels; 0: none"""
    relabel: int = Field(default=0, ge=0, le=1_000_000)
    """steps after which the target makes pseudo-labels anew; 0: once per epoch"""
    centroids: Centroids = "official"
    """of features with a 1 appended and then length 1, as in the authors' code, or of the features
    themselves"""
    shares: Shares = "auto"
    """how frequent the target's classes are to be in the end: even (paper); estimated: as by the
    mean prediction of the models as they came; auto: estimated where models agree"""

    def estimates(self, alike: float | None) -> bool:
        """Whether shares are estimated where models are so much alike; None: there is one model."""
        return class_shares.counts(self.shares, alike)


def with_prior(p: Tensor, prior: Tensor) -> Tensor:
    """p_c ((1 - DOUBT) prior_c + DOUBT / C), normalised: one that says nothing changes nothing.

    Args:
        p: (..., N, C) a model's predictions.
        prior: (N, C) what a teacher says; it may be wrong, and rules no class out.
    """
    weighted = p * ((1 - DOUBT) * prior + DOUBT / p.shape[-1])
    return weighted / weighted.sum(dim=-1, keepdim=True)


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum_c p_c log p_c, with 0 log 0 = 0 and finite gradients -> (...)."""
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(dim=-1)


def information_loss(logits: Tensor, q: Tensor | None = None) -> Tensor:
    """L_ent + L_div: the mean entropy, plus KL(mean || q) - ln C -> scalar.

    It is low if the model is sure of each image, and calls as many of them each class as q says.
    Without q the shares are even, and L_div is minus the entropy of the mean.
    """
    log_p = logits.log_softmax(dim=1)
    p = log_p.exp()
    mean = p.mean(dim=0)
    loss = -(p * log_p).sum(dim=1).mean() - entropy(mean)
    return loss if q is None else loss - mean @ (len(q) * q).log().to(mean)


def points(z: Tensor, form: Centroids) -> Tensor:
    """What centroids are made of -> (N, d + 1) of length 1 each; with `paper` z itself."""
    if form == "paper":
        return z
    return F.normalize(torch.cat([z, z.new_ones(len(z), 1)], dim=1), dim=1)


def centroids(v: Tensor, weight: Tensor) -> Tensor:
    """Weighted means of the points, mu_c = sum_i weight_ic v_i / sum_i weight_ic -> (C, d).

    A class without weight has a centroid of zeros.
    """
    return weight.T @ v / (weight.sum(dim=0)[:, None] + 1e-8)


def nearest(v: Tensor, mu: Tensor, among: Tensor) -> Tensor:
    """The class whose centroid has the smallest cosine distance, of those `among` (C,) -> (N,)."""
    similarity = F.normalize(v, dim=1) @ F.normalize(mu, dim=1).T
    return similarity.masked_fill(~among, -torch.inf).argmax(dim=1)


def pseudo_labels(v: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Section 3.3: nearest soft centroid, then once more with centroids of these labels.

    Classes that no image was given are left out of the second pass. The code for objects leaves
    those that no prediction names out of the first one, too, the code for digits out of neither:
    there such a class has a distance that is no number, which counts as the smallest of all.

    Args:
        v: (N, d) points.
        p: (N, C) the model's predictions, the weights of the first centroids.

    Returns:
        label: (N,).
        mu: (C, d) the last centroids; zeros for a class that no image belonged to.
    """
    classes = torch.arange(p.shape[1], device=p.device)
    label = nearest(v, centroids(v, p), classes >= 0)
    first = (label[:, None] == classes).to(v)  # (N, C)
    mu = centroids(v, first)
    return nearest(v, mu, first.sum(dim=0) > 0), mu


def target_loss(
    logits: Tensor, label: Tensor | None, beta: float, q: Tensor | None = None
) -> Tensor:
    """The objective of one model: L_ent + L_div + beta CE(logits, label) -> scalar."""
    loss = information_loss(logits, q)
    return loss if label is None else loss + beta * F.cross_entropy(logits, label)


def extend(model: Any, settings: Mapping[str, Any]) -> None:
    """Turn a model into `models` models side by side, with `mean` and `weights` of `Heads`."""
    models, d, C = settings["models"], model.width, model.head.out_features
    copies = [copy.deepcopy(model.encoder) for _ in range(models - 1)]
    model.encoder = SideBySide([model.encoder, *copies])
    model.head = Heads(models, d, C, settings["mean"], settings["weights"])


# The model of each source, by its name; the run's first model if no source has trained one.
MODELS: dict[str, Kind] = {"model/*": Kind.MODEL}
# Its loss has terms of both signs.
LOSS = Number("loss", 0.01, low=-LOSS_MOST, high=LOSS_MOST)
TRAINED = frozenset({LOSS, STEPS, SECONDS, REFUSED})
ADAPT: Hop = {"target": Part(Rule(optional=MODEL | MODELS), Rule(numbers=TRAINED), judges=True)}

TRAINING: dict[str, Scalar] = {
    "train.optimizer": "sgd",
    "train.lr": 0.01,
    "train.momentum": 0.9,
    "train.weight-decay": 0.001,
    "train.schedule": "ganin",
    "train.batch-size": 64,
    "model.hidden": "",
    "model.bottleneck": 256,
}
PAPER: dict[str, Scalar] = {"smoothing": 0.1, "head": "weight-norm", "relabel": 0}
PAPER |= {"centroids": "paper", "shares": "even"}
# Section 4.2 and the authors' code: for digits 30 epochs and a dropout of .5, for Office 100 epochs
# of the sources. The target has 30 epochs for digits and 15 else: the run's rounds but the first.
# The code's momentum is Nesterov's, of which the paper says nothing; its rate falls with every
# step and here with every round, and it keeps a source's best of ten models on a tenth held out.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": TRAINING | PAPER | {"beta": 0.3, "epochs": 100, "model.dropout": 0.0},
    "paper-digits": TRAINING | PAPER | {"beta": 0.1, "epochs": 30, "model.dropout": 0.5},
}
PRESETS["official"] = PRESETS["paper"] | {"centroids": "official", "train.nesterov": True}


def phases(adapt: Hop) -> tuple[Phase, ...]:
    """The phases of a method whose sources leave after the first, given what the target does."""
    return (
        Phase(
            "pretrain",
            {"train": fedavg.TRAIN},
            rounds=lambda options, rounds: min(1, options.epochs),
            # The target tests the sources' models together, as they came.
            test=Part(Rule(MODELS), TEST.leaves),
            prepares=True,
        ),
        Phase("adapt", {"adapt": adapt}, test=Part(Rule(), TEST.leaves)),
    )


METHOD = Method(
    "shot",
    "SHOT",
    Config,
    phases(ADAPT),
    PRESETS,
    stays=lambda options: True,
    extend=extend,
)
