"""KD3A: knowledge distillation from decentralised sources, as pure functions of tensors.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757; "official" is the authors' own code.

    N, K, C     sizes     target images, sources (each a teacher), classes
    p           (N, K, C) probabilities that the teachers give the images; p_i their consensus
    gate        float     a teacher whose top probability is not above it is not heard
    n           (N,)      weight of an image in the loss: how many teachers stand behind its p_i
    Q           float     quality of a team's consensus, a sum over images (eq. 7)
    CF, focus   (K,)      what each source adds to Q; a sum over images too, so chunks add up
    teams       (M, K)    1 where a source belongs to a team
    alpha       (K + 1,)  averaging weights, target first, summing to 1
    mu, second  (d,)      a BatchNorm layer's mean and second moment of its input
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from sklearn.cluster import KMeans
from torch import Tensor

from fedda.config import Section
from fedda.errors import ConfigError
from fedda.wire import MODEL, Contract, Kind, Rule

Form = Literal["soft", "hard", "mean"]
Value = Literal["marginal", "shapley"]

NOBODY = 0.001  # n of an image that no sure teacher stands behind (section 3.2)
MOST_TEAMS = 1 << 16  # exact Shapley values vote once per team: 16 sources at most
BLOCK = 1 << 18  # numbers per working array: small enough to stay in a processor's cache


class Gate(Section):
    """The confidence gate over the run."""

    low: float = Field(
        default=0.9, ge=0, lt=1, description="top probability needed in the first round"
    )
    high: float = Field(
        default=0.95, ge=0, lt=1, description="top probability needed in the last round"
    )


class Config(Section):
    """KD3A's choices; the defaults are the paper's."""

    gate: Gate = Gate()
    vote: Form = Field(
        default="soft", description="consensus: soft (paper), hard (official), mean (no vote)"
    )
    weighting: Literal["focus", "examples", "h-divergence", "gap"] = Field(
        default="focus",
        description="sources count by consensus focus, examples, eq. 6 or FADA's gap gain",
    )
    focus: Value = Field(
        default="marginal", description="of the focus: marginal (eq. 8) or shapley"
    )
    focus_by_examples: bool = Field(
        default=True, description="multiply the focus by N_k, as in eq. 9"
    )
    target_weight: Literal["examples", "kept"] = Field(
        default="examples", description="target's share: by examples, or kept images / (K + 1)"
    )
    smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="part of last round's weights kept"
    )
    batchnorm: Literal["moments", "loss", "linear"] = Field(
        default="moments", description="eq. 18, trained by eq. 12, or variances averaged linearly"
    )
    teacher_batchnorm: Literal["running", "batch"] = Field(
        default="running", description="statistics with which teachers vote"
    )
    heads: Literal["average", "local"] = Field(
        default="average", description="average the classifier heads, or keep each at its site"
    )
    mixup: float = Field(
        default=0.2, ge=0, le=100, description="both parameters of Beta; 0 turns it off"
    )


PRESETS = {
    "paper": {
        "gate.low": 0.9,
        "gate.high": 0.95,
        "vote": "soft",
        "weighting": "focus",
        "focus": "marginal",
        "focus-by-examples": True,
        "target-weight": "examples",
        "smoothing": 0.0,
        "batchnorm": "moments",
        "teacher-batchnorm": "running",
        "heads": "average",
        "mixup": 0.2,
    },
    "official": {
        "gate.low": 0.9,
        "gate.high": 0.95,
        "vote": "hard",
        "weighting": "focus",
        "focus": "shapley",
        "focus-by-examples": False,
        "target-weight": "kept",
        "smoothing": 0.9,
        "batchnorm": "linear",
        "teacher-batchnorm": "batch",
        "heads": "local",
        "mixup": 2.0,
    },
}


class Consensus(NamedTuple):
    """What the teachers agree on, image by image."""

    p: Tensor  # (N, C), rows sum to 1
    n: Tensor  # (N,), weight in the loss
    support: Tensor  # (N,), what the image adds to Q
    kept: Tensor  # (N,) bool, a sure teacher stands behind p


def gate(t: int, rounds: int, low: float, high: float) -> float:
    """g(t) of Alg. 1, linear: `low` in round 1, `high` in round `rounds` -> float."""
    return low + (high - low) * (t - 1) / max(rounds - 1, 1)


def knowledge_vote(p: Tensor, gate: float, form: Form = "soft") -> Consensus:
    """Section 3.2: gate, vote, then agree on one p_i per image -> Consensus over (N, C)."""
    return VOTES[form](p, gate)


def _soft_vote(p: Tensor, gate: float) -> Consensus:
    confidence, label = p.max(dim=2)  # (N, K)
    sure = confidence > gate
    winner = torch.einsum("nk,nkc->nc", sure.to(p.dtype), p).argmax(dim=1)
    supports = sure & (label == winner[:, None])
    # Nobody may be left: none was sure, or at a low gate a class that is nobody's first won.
    kept = supports.any(dim=1)
    heard = (supports | ~kept[:, None]).to(p.dtype)
    count = heard.sum(dim=1)
    consensus = torch.einsum("nk,nkc->nc", heard / count[:, None], p)
    n = torch.where(kept, count, NOBODY)
    return Consensus(consensus, n, n * consensus.amax(dim=1), kept)


def _hard_vote(p: Tensor, gate: float) -> Consensus:
    """The official vote: p_i is one-hot and n a mask, so Q counts summed confidences instead."""
    confidence, label = p.max(dim=2)  # (N, K)
    sure = confidence > gate
    kept = sure.any(dim=1)
    # Where nobody is sure everyone is heard: the label exists, but n gives it no weight.
    heard = torch.where(kept[:, None], confidence * sure, confidence)
    votes = p.new_zeros(p.shape[0], p.shape[2]).scatter_add_(1, label, heard)  # (N, C)
    most, winner = votes.max(dim=1)
    n = kept.to(p.dtype)
    return Consensus(F.one_hot(winner, p.shape[2]).to(p.dtype), n, n * most, kept)


def mean_ensemble(p: Tensor) -> Consensus:
    """Section 3.1, the vote's ablation: p_i = mean over teachers, n = 1 -> Consensus."""
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


def mixup(
    x: Tensor, p: Tensor, n: Tensor, lam: float, perm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Appendix F: lam of each image, consensus and weight, the rest of its partner's -> x, p, n."""
    x, p, n = (lam * a + (1 - lam) * a[perm] for a in (x, p, n))
    return x, p, n


def quality(consensus: Consensus) -> Tensor:
    """Eq. 7: Q = sum_i n_i max p_i -> float64 scalar."""
    return consensus.support.sum(dtype=torch.float64)


def consensus_focus(
    p: Tensor, gate: float, form: Form = "soft", value: Value = "marginal"
) -> Tensor:
    """Eq. 8: Q(S) - Q(S without k), or the exact Shapley value of k in the game Q -> (K,) float64.

    Add up what it gives for chunks of images to get the focus over all of them.
    """
    teams, share = _teams(p.shape[1], value)
    teams, share = teams.to(p.device, p.dtype), share.to(p.device)
    return team_quality(p, gate, teams, form) @ share


def _teams(K: int, value: Value) -> tuple[Tensor, Tensor]:
    """Which teams vote, and each one's part in each source's focus -> (M, K), (M, K) float64."""
    if value == "marginal":
        alone = torch.eye(K, dtype=torch.float64)
        everyone = torch.ones(1, K, dtype=torch.float64)
        return torch.cat([everyone, 1 - alone]), torch.cat([everyone, -alone])
    if 1 << K > MOST_TEAMS:
        raise ConfigError(
            f"Shapley values of {K} sources need 2^{K} votes per image, and 2^16 is the most; "
            "set focus to marginal."
        )
    member = (torch.arange(1 << K)[:, None] >> torch.arange(K)) & 1
    others = member.sum(dim=1, keepdim=True) - member  # (M, K), team size without k
    # A team of s others is met by s! (K - 1 - s)! of the K! orders in which sources may join.
    weight = torch.tensor([1 / (K * math.comb(K - 1, s)) for s in range(K)], dtype=torch.float64)
    share = weight[others] * (2 * member - 1)
    return member.double(), share


def team_quality(p: Tensor, gate: float, teams: Tensor, form: Form = "soft") -> Tensor:
    """Eq. 7 for many teams at once: Q(S') of each -> (M,) float64.

    What a vote costs depends on the image. Where the sure teachers agree, as they mostly do, a
    team with any of them has Q_i = the sum of their confidences, which is linear in the team; only
    teams with none of them are left to compute. Where they disagree every team is voted on.
    """
    confidence, label = p.max(dim=2)  # (N, K)
    sure = confidence > gate if form != "mean" else torch.zeros_like(label, dtype=torch.bool)
    first = torch.where(sure, label, p.shape[2]).amin(dim=1)
    agree = torch.where(sure, label, -1).amax(dim=1) <= first
    Q = teams.double() @ (confidence * (sure & agree[:, None])).sum(dim=0, dtype=torch.float64)

    if form != "hard":
        n, size = (1.0 if form == "mean" else NOBODY), teams.sum(dim=1)
        least = int(size[size > 0].amin())  # fewer unsure teachers than this make no team
        rows = (agree & ((~sure).sum(dim=1) >= least)).nonzero()[:, 0]
        for silent, group in _alike(~sure[rows]):
            alone = ((teams @ (~silent).to(teams.dtype) == 0) & (size > 0)).nonzero()[:, 0]
            part = teams[alone][:, silent]
            blocks = _blocks(p, rows[group], silent, len(part))
            Q[alone] += n * sum((_mean_quality(x, part) for x in blocks), Q.new_zeros(len(part)))

    everyone = sure.new_ones(p.shape[1])
    for x in _blocks(p, (~agree).nonzero()[:, 0], everyone, len(teams)):
        Q += _vote_quality(x, gate, teams, form)
    return Q


def _alike(members: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Group equal rows -> each distinct row (K,) with the indices where it stands."""
    distinct, which, count = members.unique(dim=0, return_inverse=True, return_counts=True)
    yield from zip(distinct, which.argsort().split(count.tolist()), strict=True)


def _blocks(p: Tensor, rows: Tensor, members: Tensor, M: int) -> Iterator[Tensor]:
    """Some images and teachers of p, for M teams: in pieces of bounded size -> (n, k, L)."""
    if not len(rows) or not M:
        return
    k = members.nonzero()[:, 0]
    for part in rows.split(max(1, 4 * BLOCK // (len(k) * p.shape[2]))):
        x = p[part] if len(k) == p.shape[1] else p[part[:, None], k]
        if 4 * len(k) > M:  # too few teams to make up for looking at every class first
            yield from x.split(max(1, BLOCK // (M * x.shape[2])))
            continue
        # Images of a piece share L, so those with few leading classes go together.
        order = may_lead(x).sum(dim=1).argsort()
        for piece in order.split(max(16, BLOCK // (16 * M))):
            y = leading_classes(x[piece])
            yield from y.split(max(1, BLOCK // (M * y.shape[2])))


def may_lead(p: Tensor) -> Tensor:
    """Which classes may lead in some team's sum of p, whichever the team -> (N, C) bool.

    With m_k the top probability of k, a class with p_k < m_k / K for all k has in a team T the sum
    sum_T p_k < sum_T m_k / K <= max_T m_k, and that maximum is at most the sum of its own class.
    So neither argmax nor maximum of any team's sum or mean changes without that class.
    """
    return (p * p.shape[1] >= p.amax(dim=2, keepdim=True)).any(dim=1)


def leading_classes(p: Tensor) -> Tensor:
    """Per image the classes that `may_lead`, in their order, and others up to L -> (N, K, L)."""
    leads = may_lead(p)
    L = int(leads.sum(dim=1).amax())
    keep = leads.to(torch.uint8).topk(L, dim=1).indices.sort(dim=1).values
    return p.gather(2, keep[:, None, :].expand(-1, p.shape[1], -1))


def _sums(x: Tensor, teams: Tensor) -> Tensor:
    """Add up the teachers of each team -> (n, L, M), the longer of L and M along memory."""
    if len(teams) < x.shape[2]:
        return (teams @ x).transpose(1, 2)
    return x.transpose(1, 2).contiguous() @ teams.T


def _mean_quality(x: Tensor, teams: Tensor) -> Tensor:
    """Sum over images of max p_i, with p_i the mean over each team -> (M,) float64."""
    most = _sums(x, teams).amax(dim=1).sum(dim=0, dtype=torch.float64)
    return most / teams.sum(dim=1).clamp(min=1)


def _vote_quality(x: Tensor, gate: float, teams: Tensor, form: Form) -> Tensor:
    """`quality` of `knowledge_vote` for each team, all teams in one go -> (M,) float64."""
    confidence, label = x.max(dim=2, keepdim=True)  # (n, K, 1)
    sure = (confidence > gate).to(x.dtype)
    support = _sums(torch.zeros_like(x).scatter_(2, label, confidence * sure), teams)  # (n, L, M)
    if form == "hard":
        return support.amax(dim=1).sum(dim=0, dtype=torch.float64)
    votes = _sums(x * sure, teams)
    wins = votes == votes.amax(dim=1, keepdim=True)
    support = torch.where(wins, support, 0).amax(dim=1)  # (n, M)
    nobody = NOBODY * _sums(x, teams).amax(dim=1) / teams.sum(dim=1).clamp(min=1)
    return torch.where(support > 0, support, nobody).sum(dim=0, dtype=torch.float64)


def with_target(weights: Tensor, share: float) -> Tensor:
    """Put the target, with its share, before the sources -> (K + 1,) float64, sums to 1."""
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
    """Eq. 9: alpha_k ~ N_k CF_k beside the target's N_T / (sum N_k + N_T) -> (K + 1,) float64.

    Args:
        focus: (K,), negative values count as 0; if none is positive they are not used at all.
        examples: (K,), the N_k.
        target_examples: N_T.
        by_examples: False leaves out N_k, as the official code does.
        kept: part of the target's images with a sure teacher; the target then weighs
            kept / (K + 1), as in the official code.
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


def smooth(old: dict[str, float], new: dict[str, float], momentum: float) -> dict[str, float]:
    """Moving average of alpha by site; who joined has no past, who left no weight -> sums to 1."""
    mixed = {k: momentum * old.get(k, w) + (1 - momentum) * w for k, w in new.items()}
    total = math.fsum(mixed.values())
    return {k: w / total for k, w in mixed.items()} if total > 0 else dict(new)


def divergence_weights(distance: Tensor, examples: Tensor) -> Tensor:
    """Eq. 6: N_k exp(-d_k) / sum_k N_k exp(-d_k) -> (K,) float64."""
    return (examples.double().log() - distance.double()).softmax(dim=0)


def batchnorm_distance(
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    target_means: Sequence[Tensor],
    target_variances: Sequence[Tensor],
) -> Tensor:
    """Eq. 11 over all layers: |mu - mu_T|^2 + |second - second_T|^2 -> float64 scalar."""
    total = torch.zeros((), dtype=torch.float64)
    layers = zip(means, variances, target_means, target_variances, strict=True)
    for layer in layers:
        m, v, m_T, v_T = (a.double() for a in layer)
        second, second_T = v + m**2, v_T + m_T**2
        total = total.to(m.device) + ((m - m_T) ** 2).sum() + ((second - second_T) ** 2).sum()
    return total


def batchnorm_mmd_loss(
    mu_T: Sequence[Tensor],
    second_T: Sequence[Tensor],
    mu: Sequence[Tensor],
    second: Sequence[Tensor],
    alpha: Tensor,
) -> Tensor:
    """Eq. 12: sum_l sum_k alpha_k (|mu_T - mu_k|^2 + |second_T - second_k|^2) -> scalar.

    Args:
        mu_T: per layer (d_l,), mean over the batch of what enters the layer; with gradient.
        second_T: per layer (d_l,), mean over the batch of its square; with gradient.
        mu: per layer (K + 1, d_l), the models' means.
        second: per layer (K + 1, d_l), the models' Var + mean^2.
        alpha: (K + 1,).
    """
    loss = mu_T[0].new_zeros(())
    for m_T, s_T, m, s in zip(mu_T, second_T, mu, second, strict=True):
        apart = ((m_T - m) ** 2).sum(dim=1) + ((s_T - s) ** 2).sum(dim=1)  # (K + 1,)
        loss = loss + alpha.to(apart) @ apart
    return loss


def mix_moments(
    means: Tensor, variances: Tensor, alpha: Tensor, form: Literal["moments", "linear"] = "moments"
) -> tuple[Tensor, Tensor]:
    """Eq. 18 for one layer: moments (K + 1, d) of the models, averaged -> mu (d,), var (d,).

    "linear" averages the variances themselves, as the official code does.
    """
    a, m, v = alpha.double().to(means.device), means.double(), variances.double()
    mu = a @ m
    var = a @ v
    if form == "moments":
        # sum alpha (Var + mu_k^2) - mu^2, written so that nothing cancels: it is never negative.
        var = var + a @ (m - mu) ** 2
    return mu.to(means.dtype), var.to(variances.dtype)


def clusters(z: Tensor, C: int, seed: int) -> Tensor:
    """k-means of features z (N, d) into C clusters -> assignment (N,)."""
    found = KMeans(min(C, len(z)), random_state=seed).fit_predict(z.cpu().numpy())
    return torch.from_numpy(found).long().to(z.device)


def gap_statistic(z: Tensor, assignment: Tensor) -> Tensor:
    """FADA eq. 3: I = sum_r 1/(2 n_r) sum_{i,j in r} |f_i - f_j|^2 -> float64 scalar.

    The pairs of a cluster sum to 2 n_r times the squared distances to its centre: O(N d), no pairs.
    """
    z = z.double()
    count = assignment.bincount().clamp(min=1)
    centre = z.new_zeros(len(count), z.shape[1]).index_add_(0, assignment, z) / count[:, None]
    return ((z - centre[assignment]) ** 2).sum()


def gap_gain(before: Tensor, after: Tensor) -> Tensor:
    """FADA: how much tighter the target's clusters became with each source's update -> (K,)."""
    return before - after


def gap_weights(gain: Tensor) -> Tensor:
    """FADA's dynamic attention: softmax of the gains -> (K,) float64."""
    return gain.double().softmax(dim=0)


CONTRACT = Contract(
    enters={"source": Rule(MODEL), "target": Rule(MODEL | {"teacher/*": Kind.MODEL})},
    leaves={
        "source": Rule(MODEL, frozenset({"loss", "steps", "seconds"})),
        "target": Rule(
            MODEL,
            frozenset({"loss", "steps", "seconds", "kept", "focus/*", "distance/*", "gain/*"}),
        ),
    },
)
