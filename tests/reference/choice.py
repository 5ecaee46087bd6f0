"""The comparison of models, case by case, in plain Python."""

from collections.abc import Sequence
from itertools import combinations
from statistics import mean, median

STEP = 0.01


def wins(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    if round(a - b, 6) > STEP:
        return 1
    return -1 if round(b - a, 6) > STEP else 0


def standing(models: Sequence[dict[str, float | None]]) -> list[float]:
    found = []
    for i, own in enumerate(models):
        duels = []
        for j, other in enumerate(models):
            if i == j:
                continue
            w = {k: wins(own.get(k), other.get(k)) for k in {*own, *other}}
            both = [x for k in ("infomax", "bnm") if (x := w.get(k)) is not None]
            votes = [mean(both)] if both else []
            single = ("estimate", "ami", "agreement")
            votes += [x for k in single if (x := w.get(k)) is not None]
            duels.append(mean(votes) if votes else 0)
        found.append((1 + mean(duels)) / 2 if duels else 0.5)
    return found


def agree(a: Sequence[int], b: Sequence[int]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def between(labels: Sequence[Sequence[int]], group: Sequence[str], g: str, h: str) -> float:
    ours = [label for label, name in zip(labels, group, strict=True) if name == g]
    theirs = [label for label, name in zip(labels, group, strict=True) if name == h]
    return mean(agree(a, b) for a in ours for b in theirs)


def support(labels: Sequence[Sequence[int]], group: Sequence[str]) -> list[float | None]:
    found: list[float | None] = []
    for label, own in zip(labels, group, strict=True):
        shares = []
        for g in sorted({*group} - {own}):
            theirs = [x for x, name in zip(labels, group, strict=True) if name == g]
            shares.append(mean(agree(label, x) for x in theirs))
        found.append(mean(shares) if shares else None)
    return found


def apart(labels: Sequence[Sequence[int]], group: Sequence[str]) -> list[bool]:
    found = []
    for own, value in zip(group, support(labels, group), strict=True):
        pairs = combinations(sorted({*group} - {own}), 2)
        shares = [between(labels, group, g, h) for g, h in pairs]
        found.append(bool(shares) and value is not None and value < median(shares) / 2)
    return found
