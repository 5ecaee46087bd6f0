"""KD3A read straight from the paper: one image, one team, one order at a time, plain numbers."""

import itertools
import math
from collections.abc import Sequence

Image = list[list[float]]  # K teachers x C classes
Team = tuple[int, ...]


def argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def soft_vote(image: Image, gate: float) -> tuple[list[float], float]:
    """Section 3.2, steps 1 to 3 -> p_i, n_i."""
    confident = [q for q in image if max(q) > gate]
    if confident:
        added = [sum(column) for column in zip(*confident, strict=True)]
        supporters = [q for q in confident if argmax(q) == argmax(added)]
        if supporters:
            return mean(supporters), len(supporters)
    return mean(image), 0.001


def hard_vote(image: Image, gate: float) -> tuple[list[float], float, float]:
    """The vote of the official code -> one-hot p_i, mask, summed top-1 confidence of the winner."""
    tops = [max(q) for q in image]
    some = any(top > gate for top in tops)
    votes = [0.0] * len(image[0])
    for q, top in zip(image, tops, strict=True):
        if top > gate or not some:
            votes[argmax(q)] += top
    winner = argmax(votes)
    return [float(c == winner) for c in range(len(votes))], float(some), votes[winner]


def quality(images: list[Image], team: Team, gate: float, form: str) -> float:
    """Eq. 7 for one team."""
    total = 0.0
    for image in images:
        heard = [image[k] for k in team]
        if not heard:
            continue
        if form == "soft":
            p, n = soft_vote(heard, gate)
            total += n * max(p)
        elif form == "hard":
            _, n, confidence = hard_vote(heard, gate)
            total += n * confidence
        else:
            total += max(mean(heard))
    return total


def marginal(images: list[Image], gate: float, form: str) -> list[float]:
    """Eq. 8."""
    S = tuple(range(len(images[0])))
    whole = quality(images, S, gate, form)
    return [whole - quality(images, S[:k] + S[k + 1 :], gate, form) for k in S]


def shapley(images: list[Image], gate: float, form: str) -> list[float]:
    """Return what each source adds to those that joined before it, averaged over all K! orders."""
    K = len(images[0])
    focus = [0.0] * K
    for order in itertools.permutations(range(K)):
        for place, k in enumerate(order):
            before, after = order[:place], order[: place + 1]
            gain = quality(images, after, gate, form) - quality(images, before, gate, form)
            focus[k] += gain / math.factorial(K)
    return focus


def weights(focus: list[float], examples: list[int], target_examples: int) -> list[float]:
    """Eq. 9, target first; negative focus counts as 0; if all focus is 0, N_k alone decides."""
    target = target_examples / (sum(examples) + target_examples)
    parts = [N * max(cf, 0.0) for N, cf in zip(examples, focus, strict=True)]
    if sum(parts) == 0:
        parts = [float(N) for N in examples]
    return [target, *((1 - target) * part / sum(parts) for part in parts)]


def official_weights(focus: list[float], kept: float) -> list[float]:
    target = kept / (len(focus) + 1)
    parts = [max(cf, 0.0) for cf in focus]
    if sum(parts) == 0:
        parts = [1.0] * len(focus)
    return [target, *((1 - target) * part / sum(parts) for part in parts)]


def divergence_weights(distance: list[float], examples: list[int]) -> list[float]:
    """Eq. 6."""
    parts = [N * math.exp(-d) for N, d in zip(examples, distance, strict=True)]
    return [part / sum(parts) for part in parts]


def distillation_loss(logits: list[list[float]], p: list[list[float]], n: list[float]) -> float:
    """Eq. 5, averaged over images."""
    total = 0.0
    for row, p_i, n_i in zip(logits, p, n, strict=True):
        scale = sum(math.exp(value) for value in row)
        for value, target in zip(row, p_i, strict=True):
            if target > 0:
                total += n_i * target * math.log(target / (math.exp(value) / scale))
    return total / len(logits)


def mixed_moments(
    means: list[list[float]], variances: list[list[float]], alpha: list[float]
) -> tuple[list[float], list[float]]:
    """Eq. 18: average E and E[x^2] = Var + E^2, then Var = E[x^2] - E^2."""
    mu, var = [], []
    for d in range(len(means[0])):
        first = sum(a * m[d] for a, m in zip(alpha, means, strict=True))
        second = sum(
            a * (v[d] + m[d] ** 2) for a, m, v in zip(alpha, means, variances, strict=True)
        )
        mu.append(first)
        var.append(max(second - first**2, 0.0))
    return mu, var


def mmd_loss(
    mu_T: list[list[float]],
    second_T: list[list[float]],
    mu: list[list[list[float]]],
    second: list[list[list[float]]],
    alpha: list[float],
) -> float:
    """Eq. 12: layers, then models, then units."""
    total = 0.0
    for layer in range(len(mu_T)):
        for k, a in enumerate(alpha):
            for d in range(len(mu_T[layer])):
                total += a * (mu_T[layer][d] - mu[layer][k][d]) ** 2
                total += a * (second_T[layer][d] - second[layer][k][d]) ** 2
    return total


def gap_statistic(z: list[list[float]], assignment: list[int]) -> float:
    """FADA eq. 3, pair by pair."""
    total = 0.0
    for r in set(assignment):
        cluster = [f for f, a in zip(z, assignment, strict=True) if a == r]
        pairs = sum(math.dist(f, g) ** 2 for f in cluster for g in cluster)
        total += pairs / (2 * len(cluster))
    return total
