"""KD3A: models of decentralised sources teach the target, by votes on its own images.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757; "official" is the authors' own code.

    N, K, C     sizes      target images, sources (each a teacher), classes
    p           (N, K, C)  probabilities that the teachers give the images; p_i their consensus
    gate        float      a teacher votes if its top probability, the confidence, is above it
    n           (N,)       weight of an image in the loss: how many sure teachers support its p_i
    q           (N, C)     probabilities by the target's model
    Q           float      quality of a team's consensus, a sum over images (eq. 7)
    CF, focus   (K,)       what each source adds to Q; also a sum over images, so chunks add up
    alpha       (K + 1,)   averaging weights, target first, summing to 1
    mu, second  (d,)       a BatchNorm layer's mean and second moment of its input
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from fedda.algorithms import fedavg
from fedda.config.sections import Scalar, Section
from fedda.maths.average import statistics_of
from fedda.maths.focus import NOBODY, Form, Value, team_quality, teams_and_shares
from fedda.maths.moments import mix_moments
from fedda.maths.schedule import gate as gate
from fedda.methods import Hop, Method, Phase
from fedda.wire import MODEL, REFUSED, Number, Part, Rule
from fedda.wire.packing import Arrays, Kind, pieces


class ConfidenceGate(Section):
    """The confidence gate, from the first round to the last."""

    low: float = Field(default=0.9, ge=0, lt=1)
    """top probability needed in the first round"""
    high: float = Field(default=0.95, ge=0, lt=1)
    """top probability needed in the last round"""
    reach: bool = True
    """reach gate.high in the last round; false (official): one round later"""


class Config(Section):
    """KD3A's settings; the defaults are the choices that gain most (`docs/methods/notes/kd3a.md`).

    They are those of the official code, but for the soft vote, `heads=average`, with which models
    can be sealed, the gate's reach and `focus_from`.
    """

    gate: ConfidenceGate = ConfidenceGate()
    vote: Form = "soft"
    """consensus: soft (paper), hard (official), mean (no vote)"""
    weighting: Literal["focus", "examples", "h-divergence"] = "focus"
    """weights of sources: by focus, examples or eq. 6"""
    focus: Value = "shapley"
    """how the focus values a source: marginal (eq. 8) or shapley (of more than 16 an estimate)"""
    focus_by_examples: bool = False
    """multiply the focus by N_k, as in eq. 9"""
    focus_from: float = Field(default=0.01, ge=0, le=1)
    """least share of the target's images with a sure teacher for the focus to weigh sources; below
    it, where it is noise, examples do; 0: always the focus (paper)"""
    target_weight: Literal["examples", "kept"] = "kept"
    """target's weight: by examples, or its share of kept images / (K + 1)"""
    smoothing: float = Field(default=0.9, ge=0, lt=1)
    """share of last round's weights in the new ones"""
    batchnorm: Literal["moments", "loss", "linear"] = "linear"
    """moments: eq. 18; loss: trained by eq. 12; linear: variances averaged"""
    teacher_batchnorm: Literal["running", "batch", "updated"] = "updated"
    """statistics with which teachers vote; updated (official): the batch's, which also update the
    running ones, and the updated ones are averaged"""
    heads: Literal["average", "local"] = "average"
    """average the classifier heads, or keep each one at its site"""
    relay: Literal["auto", "open", "sealed"] = "auto"
    """sealed: sources encrypt their models to the target, which averages them; the server relays
    them and sees only the mean (sites need --peers); auto: sealed where all sites have these, else
    open"""
    mixup: float = Field(default=2.0, ge=0, le=100)
    """both parameters of the Beta distribution; 0 turns mixup off"""
    mixup_weights: bool = False
    """also mix the images' weights n; false (official): each keeps its n"""

    @property
    def can_seal(self) -> bool:
        """Whether the sources' models can be sealed with these settings."""
        return self.heads == "average"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.relay == "sealed" and self.heads == "local":
            raise ValueError(
                "relay is sealed, but heads is local, for which the server keeps each source's "
                "head; set one of them to its default (open, average)"
            )
        return self


# The bounds of the gate depend on the data set, so the benchmarks' presets have them.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {
        "gate.reach": True,
        "vote": "soft",
        "weighting": "focus",
        "focus": "marginal",
        "focus-by-examples": True,
        "focus-from": 0.0,
        "target-weight": "examples",
        "smoothing": 0.0,
        "batchnorm": "moments",
        "teacher-batchnorm": "running",
        "heads": "average",
        "mixup": 0.2,
        "mixup-weights": True,
    },
    # The authors' code also rounds weights to four digits, so they do not sum to 1; this is not
    # offered. It keeps momentum over rounds and decays weights by 5e-4, as runs do by default.
    "official": {
        "gate.reach": False,
        "vote": "hard",
        "weighting": "focus",
        "focus": "shapley",
        "focus-by-examples": False,
        "focus-from": 0.0,
        "target-weight": "kept",
        "smoothing": 0.9,
        "batchnorm": "linear",
        "teacher-batchnorm": "updated",
        "heads": "local",
        "mixup": 2.0,
        "mixup-weights": False,
    },
}


class Consensus(NamedTuple):
    """What the teachers agree on, image by image."""

    p: Tensor  # (N, C), rows sum to 1
    n: Tensor  # (N,), weight in the loss
    support: Tensor  # (N,), what the image adds to Q
    kept: Tensor  # (N,) bool, whether a sure teacher supports p


def knowledge_vote(p: Tensor, gate: float, form: Form = "soft") -> Consensus:
    """Section 3.2: gate, vote, then agree on one p_i per image -> Consensus over (N, C)."""
    return VOTES[form](p, gate)


def _soft_vote(p: Tensor, gate: float) -> Consensus:
    confidence, label = p.max(dim=2)  # (N, K)
    sure = confidence > gate
    winner = torch.einsum("nk,nkc->nc", sure.to(p.dtype), p).argmax(dim=1)
    supports = sure & (label == winner[:, None])
    # False if no teacher was sure, or if, at a low gate, the winner is no teacher's top class.
    kept = supports.any(dim=1)
    votes = (supports | ~kept[:, None]).to(p.dtype)
    count = votes.sum(dim=1)
    consensus = torch.einsum("nk,nkc->nc", votes / count[:, None], p)
    n = torch.where(kept, count, NOBODY)
    return Consensus(consensus, n, n * consensus.amax(dim=1), kept)


def _hard_vote(p: Tensor, gate: float) -> Consensus:
    """The official vote: p_i is one-hot and n a mask, so Q counts summed confidences instead."""
    confidence, label = p.max(dim=2)  # (N, K)
    sure = confidence > gate
    kept = sure.any(dim=1)
    # If no teacher is sure, all of them vote: there is a label, but n gives it no weight.
    weight = torch.where(kept[:, None], confidence * sure, confidence)
    votes = p.new_zeros(p.shape[0], p.shape[2]).scatter_add_(1, label, weight)  # (N, C)
    most, winner = votes.max(dim=1)
    n = kept.to(p.dtype)
    return Consensus(F.one_hot(winner, p.shape[2]).to(p.dtype), n, n * most, kept)


def mean_ensemble(p: Tensor) -> Consensus:
    """Section 3.1, ablation of the vote: p_i = mean over teachers, n = 1 -> Consensus."""
    consensus = p.mean(dim=1)
    n = p.new_ones(p.shape[0])
    return Consensus(consensus, n, consensus.amax(dim=1), torch.ones_like(n, dtype=torch.bool))


VOTES: dict[Form, Callable[[Tensor, float], Consensus]] = {
    "soft": _soft_vote,
    "hard": _hard_vote,
    "mean": lambda p, gate: mean_ensemble(p),
}


def distillation_loss(logits: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """Eqs. 3 and 5: mean over images of n_i KL(p_i || softmax(logits_i)) -> scalar."""
    divergence = F.kl_div(logits.log_softmax(dim=1), p, reduction="none").sum(dim=1)
    return (n * divergence).mean()


def quality(consensus: Consensus) -> Tensor:
    """Eq. 7: Q = sum_i n_i max p_i -> float64 scalar."""
    return consensus.support.sum(dtype=torch.float64)


def consensus_focus(
    p: Tensor, gate: float, form: Form = "soft", value: Value = "marginal"
) -> Tensor:
    """Eq. 8: Q(S) - Q(S without k), or the Shapley value of k in the game Q -> (K,) float64.

    Of more than 16 sources Shapley values are estimates (`focus.sampled_orders`).
    The focus over all images is the sum of its values for chunks of images.
    """
    teams, share = teams_and_shares(p.shape[1], value)
    teams, share = teams.to(p.device, p.dtype), share.to(p.device)
    return team_quality(p, gate, teams, form) @ share


def numbers_of_vote(options: Config, p: Tensor) -> Tensor:
    """What a target tells in the last round -> (K + 1,): focus per image, share of kept ones."""
    gate = options.gate.high
    focus = consensus_focus(p, gate, options.vote, options.focus) / len(p)
    kept = knowledge_vote(p, gate, options.vote).kept.double().mean()
    return torch.cat([focus, kept[None]])


def with_target(weights: Tensor, share: float) -> Tensor:
    """Put the target's weight before those of the sources -> (K + 1,) float64, sums to 1."""
    weights = weights.double()
    alpha = torch.cat([weights.new_tensor([share]), (1 - share) * weights / weights.sum()])
    return alpha / alpha.sum()


def domain_weights(
    focus: Tensor,
    examples: Tensor,
    target_examples: int,
    by_examples: bool = True,
    kept: float | None = None,
) -> Tensor:
    """Eq. 9: N_T / (sum N_k + N_T) for the target, the rest by N_k CF_k -> (K + 1,) float64.

    Args:
        focus: (K,), negative values count as 0; if none is positive, the focus is not used.
        examples: (K,), the N_k.
        target_examples: N_T.
        by_examples: False leaves out N_k, as the official code does.
        kept: share of the target's images that have a sure teacher. If given, the target's weight
            is kept / (K + 1), as in the official code.
    """
    examples = examples.double().to(focus.device)
    base = examples if by_examples else torch.ones_like(examples)
    good = focus.double().clamp(min=0)
    weights = base * (good / good.max().clamp(min=torch.finfo(torch.float64).tiny))
    if not weights.sum() > 0:
        weights = base
    if kept is None:
        return with_target(weights, target_examples / (float(examples.sum()) + target_examples))
    return with_target(weights, kept / (len(examples) + 1))


def smooth(old: Mapping[str, float], new: dict[str, float], momentum: float) -> dict[str, float]:
    """Moving average of alpha by site; a new site starts with its new weight -> sums to 1."""
    mixed = {k: momentum * old.get(k, w) + (1 - momentum) * w for k, w in new.items()}
    total = math.fsum(mixed.values())
    return {k: w / total for k, w in mixed.items()} if total > 0 else dict(new)


def site_weights(
    options: Config,
    examples: Mapping[str, int],
    target: str,
    numbers: Mapping[str, Any],
    past: Mapping[str, float],
) -> dict[str, float]:
    """Alg. 1, lines 10 to 12: alpha by site, from the numbers that the target sent -> sums to 1.

    Args:
        options: the settings, which say how sources are weighed.
        examples: N_k of the sites in this round, and N_T of the target.
        target: the target's name.
        numbers: the target's numbers: `kept`, and per source `focus/*` or `distance/*`.
        past: alpha of the last round, for the moving average.
    """
    names = sorted(n for n in examples if n != target)
    N, N_T = torch.tensor([examples[n] for n in names]), examples[target]
    part = min(max(float(numbers["kept"]), 0.0), 1.0)  # the target may send any number
    kept = part if options.target_weight == "kept" else None

    def each(what: str) -> Tensor:
        return torch.tensor([float(numbers[f"{what}/{n}"]) for n in names], dtype=torch.float64)

    if options.weighting == "focus":
        # With few kept images the focus is a difference of terms that weigh NOBODY each. From a
        # share of 10 NOBODY on, the kept images outweigh all others tenfold.
        focus = each("focus") * is_focused(options, part)
        alpha = domain_weights(focus, N, N_T, options.focus_by_examples, kept)
    else:
        share = N_T / (int(N.sum()) + N_T) if kept is None else kept / (len(names) + 1)
        among = {
            "examples": lambda: N.double(),
            "h-divergence": lambda: divergence_weights(each("distance"), N),
        }[options.weighting]()
        alpha = with_target(among, share)
    return smooth(past, dict(zip([target, *names], alpha.tolist(), strict=True)), options.smoothing)


def is_focused(options: Config, kept: float) -> bool:
    """Whether the focus weighs the sources in a round with this share of kept images."""
    return options.weighting == "focus" and kept >= options.focus_from


def divergence_weights(distance: Tensor, examples: Tensor) -> Tensor:
    """Eq. 6: N_k exp(-d_k) / sum_k N_k exp(-d_k) -> (K,) float64."""
    return (examples.double().log() - distance.double()).softmax(dim=0)


def mix(models: Sequence[Arrays], alpha: Sequence[float], options: Config) -> Arrays:
    """Line 13, theta = sum_k alpha_k theta_k, and eq. 18 for BatchNorm's running statistics.

    Integer buffers cannot be averaged; they are copied from the first model, the target's. With
    `teacher-batchnorm=updated` so are the statistics: only the target has those of the teachers, so
    it has mixed them.
    """
    form: Literal["moments", "linear"] = "linear" if options.batchnorm == "linear" else "moments"
    mixed: Arrays = {}
    for name, first in models[0].items():
        if first.dtype.kind != "f":
            mixed[name] = first.copy()  # a view would keep the whole received model in memory
        elif name.endswith("running_var"):
            mean = name.replace("running_var", "running_mean")
            means, variances = (np.stack([m[n] for m in models]) for n in (mean, name))
            moments = torch.tensor(means), torch.tensor(variances)
            weights = torch.tensor(alpha, dtype=torch.float64)
            mu, var = mix_moments(*moments, weights, form)
            mixed[mean], mixed[name] = mu.numpy(), var.numpy()
        elif not name.endswith("running_mean"):
            mixed[name] = np.empty_like(first)
            for mean, *parts in pieces(mixed[name], *(m[name] for m in models)):
                terms = (a * part.astype(np.float64) for a, part in zip(alpha, parts, strict=True))
                mean[...] = sum(terms, np.zeros(mean.shape))
    updated = options.teacher_batchnorm == "updated"
    return {n: mixed[n] for n in models[0]} | (statistics_of(models[0]) if updated else {})


KEPT = Number("kept", 0.01, is_share=True)
# A share of a vote is at most its number of teachers.
FOCUS = Number("focus/*", 0.001, low=lambda C, K: -K, high=lambda C, K: K)
DISTANCE = Number("distance/*", 0.01, high=100.0)  # of which exp(-d) is nothing
TOLD = fedavg.TRAINED.numbers | {KEPT, FOCUS, DISTANCE, REFUSED}

# The target needs each model; the server may hand them on unread.
TRAIN: Hop = {"source": replace(fedavg.AVERAGED["source"], needed="relay")}

# With `batchnorm=loss`: the target trains the mean model by eq. 12.
MATCH: Hop = {"target": Part(Rule(MODEL), fedavg.TRAINED)}

METHOD = Method(
    "kd3a",
    "KD3A",
    Config,
    (
        Phase(
            "train",
            {
                "train": TRAIN,
                "distil": {
                    # With `teacher-batchnorm=updated` the target computes alpha as well, so it
                    # needs N_k and the last round's alpha.
                    "target": Part(
                        Rule(
                            MODEL | {"teacher/*": Kind.MODEL}, frozenset({"examples/*", "past/*"})
                        ),
                        Rule(MODEL, TOLD),
                        judges=True,
                    )
                },
                "match_moments": MATCH,
            },
        ),
    ),
    PRESETS,
    vote=numbers_of_vote,
)
