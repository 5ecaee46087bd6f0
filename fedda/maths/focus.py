"""The quality of every team's consensus at once, for KD3A's consensus focus.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757, section 3.3. The result for each team is
`quality` of its `knowledge_vote` (fedda/algorithms/kd3a.py), computed in a faster way.

    N, K, C     sizes     images, teachers, classes
    p           (N, K, C) probabilities that the teachers give the images
    gate        float     a teacher votes only if its top probability, the confidence, is above it
    M, teams    (M, K)    1 where a teacher belongs to a team
    Q           (M,)      quality of each team's consensus, a sum over images (eq. 7)
    L           size      classes that may lead in some image of a block, L <= C
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Form = Literal["soft", "hard", "mean"]
Value = Literal["marginal", "shapley"]

NOBODY = 0.001  # n of an image whose label no sure teacher supports (section 3.2)
MOST_TEAMS = 1 << 16  # exact Shapley values vote once per team: of 16 sources at most
ORDERS = 128  # drawn to estimate the values of more sources; fewer where they would exceed ROOM
ROOM = 1 << 24  # numbers that say who is in which team of all orders
BLOCK = 1 << 18  # numbers per working array: small enough to stay in a processor's cache


def teams_and_shares(K: int, value: Value) -> tuple[Tensor, Tensor]:
    """The teams that vote, and their weights in each source's focus -> (M, K), (M, K) float64.

    Shapley values of more than 16 sources are estimates (`sampled_orders`).
    """
    if value == "marginal":
        alone = torch.eye(K, dtype=torch.float64)
        everyone = torch.ones(1, K, dtype=torch.float64)
        return torch.cat([everyone, 1 - alone]), torch.cat([everyone, -alone])
    if 1 << K > MOST_TEAMS:
        return sampled_orders(K, max(2, min(ORDERS, ROOM // K**2 // 2 * 2)))
    member = (torch.arange(1 << K)[:, None] >> torch.arange(K)) & 1
    others = member.sum(dim=1, keepdim=True) - member  # (M, K), team size without k
    # In s! (K - 1 - s)! of the K! orders of sources, k comes right after this team of s others.
    weight = torch.tensor([1 / (K * math.comb(K - 1, s)) for s in range(K)], dtype=torch.float64)
    share = weight[others] * (2 * member - 1)
    return member.double(), share


def sampled_orders(K: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same for the mean gain of each source over orders in which all join, drawn by chance.

    Castro, Gomez and Tejada, Computers and Operations Research 2009; every second order is the
    reverse of the one before, which leaves less to chance. The estimates sum up to Q of everyone,
    as the values do. One seed always draws the same orders, as a focus is a sum over chunks.

    Args:
        K: sources.
        count: an even number of orders; there are K teams in each.
        seed: of the draw.
    """
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(K, generator=draw) for _ in range(count // 2)])
    orders = torch.stack([drawn, drawn.flip(1)], dim=1).flatten(0, 1)  # (count, K)
    joins = F.one_hot(orders, K).double()  # (count, K, K): who is the j-th to join
    share = joins.clone()
    share[:, :-1] -= joins[:, 1:]
    return joins.cumsum(dim=1).flatten(0, 1), share.flatten(0, 1) / count


def team_quality(p: Tensor, gate: float, teams: Tensor, form: Form = "soft") -> Tensor:
    """Eq. 7 for many teams at once: Q(S') of each -> (M,) float64.

    The cost of a vote depends on the image. On most images the sure teachers agree. Then a team
    with any of them has Q_i = the sum of their confidences, which is linear in the team, and only
    teams with none of them are computed one by one. On the other images every team votes.
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
    """Some images and teachers of p in pieces of bounded size, for M teams -> (n, k, L)."""
    if not len(rows) or not M:
        return
    k = members.nonzero()[:, 0]
    for part in rows.split(max(1, 4 * BLOCK // (len(k) * p.shape[2]))):
        x = p[part] if len(k) == p.shape[1] else p[part[:, None], k]
        if 4 * len(k) > M:  # with few teams, finding the leading classes costs more than it saves
            yield from x.split(max(1, BLOCK // (M * x.shape[2])))
            continue
        # All images of a piece have the same L, so images with few leading classes go together.
        order = may_lead(x).sum(dim=1).argsort()
        for piece in order.split(max(16, BLOCK // (16 * M))):
            y = leading_classes(x[piece])
            yield from y.split(max(1, BLOCK // (M * y.shape[2])))


def may_lead(p: Tensor) -> Tensor:
    """The classes that may have the largest sum of p in some team -> (N, C) bool.

    Let m_k be the top probability of teacher k. A class with p_k < m_k / K for all k has in a team
    T the sum sum_T p_k < sum_T m_k / K <= max_T m_k, which is at most the sum of the class that has
    this maximum. So no team's argmax or maximum, of sum or mean, changes without that class.
    """
    return (p * p.shape[1] >= p.amax(dim=2, keepdim=True)).any(dim=1)


def leading_classes(p: Tensor) -> Tensor:
    """Each image's classes that `may_lead`, in order, with others up to L -> their p (N, K, L)."""
    leads = may_lead(p)
    L = int(leads.sum(dim=1).amax())
    keep = leads.to(torch.uint8).topk(L, dim=1).indices.sort(dim=1).values
    return p.gather(2, keep[:, None, :].expand(-1, p.shape[1], -1))


def _sums(x: Tensor, teams: Tensor) -> Tensor:
    """The sum of each team's teachers -> (n, L, M), with the longer of L and M contiguous."""
    if len(teams) < x.shape[2]:
        return (teams @ x).transpose(1, 2)
    return x.transpose(1, 2).contiguous() @ teams.T


def _mean_quality(x: Tensor, teams: Tensor) -> Tensor:
    """The sum over images of max p_i, where p_i is the mean of each team -> (M,) float64."""
    most = _sums(x, teams).amax(dim=1).sum(dim=0, dtype=torch.float64)
    return most / teams.sum(dim=1).clamp(min=1)


def _vote_quality(x: Tensor, gate: float, teams: Tensor, form: Form) -> Tensor:
    """The sum over images of n_i max p_i after each team's vote -> (M,) float64."""
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
