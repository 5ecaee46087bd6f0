"""Validators and estimates, number by number from the papers, in plain Python."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np

Rows = Sequence[Sequence[float]]


def entropy(row: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in row if p > 0)


def infomax(p: Rows) -> float:
    mean = [sum(column) / len(p) for column in zip(*p, strict=True)]
    return entropy(mean) - sum(map(entropy, p)) / len(p)


def bnm(p: Rows) -> float:
    """The sum of singular values: roots of the eigenvalues of A^T A."""
    A = np.asarray(p, dtype=np.float64)
    values = np.linalg.eigvalsh(A.T @ A)
    largest = math.sqrt(len(p) * min(A.shape))
    return sum(math.sqrt(max(v, 0.0)) for v in values) / largest


def snd(p: Rows, tau: float) -> float:
    """Saito et al., eqs. 1 to 3, divided by the entropy of a uniform distribution."""
    N, total = len(p), 0.0
    for i in range(N):
        similar = {}
        for j in range(N):
            if j != i:
                dot = sum(a * b for a, b in zip(p[i], p[j], strict=True))
                norms = math.hypot(*p[i]) * math.hypot(*p[j])
                similar[j] = math.exp(dot / norms / tau)
        whole = sum(similar.values())
        total += entropy([s / whole for s in similar.values()])
    return total / N / math.log(N - 1)


def ami(a: Sequence[int], b: Sequence[int]) -> float:
    """Vinh et al.: (MI - E[MI]) / (mean of the entropies - E[MI]), by the hypergeometric sum."""
    N, A, B = len(a), Counter(a), Counter(b)
    both = Counter(zip(a, b, strict=True))
    mi = sum(n / N * math.log(N * n / A[i] / B[j]) for (i, j), n in both.items())
    expected = 0.0
    for i, j in product(A, B):
        ai, bj = A[i], B[j]
        for n in range(max(1, ai + bj - N), min(ai, bj) + 1):
            chance = math.comb(bj, n) * math.comb(N - bj, ai - n) / math.comb(N, ai)
            expected += n / N * math.log(N * n / ai / bj) * chance
    mean = sum(entropy([n / N for n in counts.values()]) for counts in (A, B)) / 2
    return (mi - expected) / (mean - expected)


def atc(source: Rows, labels: Sequence[int], target: Rows, kind: str) -> float:
    """Garg et al., eqs. 1 and 2, on the plain scores: the share of the target above t."""

    def score(row: Sequence[float]) -> float:
        return max(row) if kind == "confidence" else -entropy(row)

    here = sorted(score(row) for row in source)
    pairs = zip(source, labels, strict=True)
    wrong = sum(max(range(len(r)), key=r.__getitem__) != y for r, y in pairs)
    if wrong == 0:
        t = -math.inf
    elif wrong == len(here):
        t = math.inf
    else:
        t = (here[wrong - 1] + here[wrong]) / 2
    return sum(score(row) >= t for row in target) / len(target)


def ece(p: Rows, y: Sequence[int], bins: int) -> float:
    """Guo et al., eq. 3."""
    total = 0.0
    for b in range(bins):
        here = [
            (max(row), row.index(max(row)) == label)
            for row, label in zip(map(list, p), y, strict=True)
            if min(int(max(row) * bins), bins - 1) == b
        ]
        if here:
            accuracy = sum(right for _, right in here) / len(here)
            confidence = sum(sure for sure, _ in here) / len(here)
            total += len(here) / len(p) * abs(accuracy - confidence)
    return total
