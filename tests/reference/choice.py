"""The comparison of models, case by case, in plain Python."""

from collections.abc import Sequence
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


def ensemble(
    p: Sequence[Sequence[Sequence[float]]], group: Sequence[str], voting: Sequence[bool]
) -> list[list[float]]:
    """One image after the other, and in it one class after the other."""
    some = [i for i in range(len(p)) if voting[i]] or [*range(len(p))]
    found = []
    for n in range(len(p[0])):
        row = []
        for c in range(len(p[0][0])):
            each = []
            for g in sorted({group[i] for i in some}):
                each.append(mean(p[i][n][c] for i in some if group[i] == g))
            row.append(mean(each))
        found.append(row)
    return found


def largest(p: Sequence[Sequence[float]]) -> list[int]:
    return [max(range(len(row)), key=row.__getitem__) for row in p]


def apart(agreed: Sequence[float | None], group: Sequence[str]) -> list[bool]:
    found = []
    for own, value in zip(group, agreed, strict=True):
        others = []
        for g in sorted({*group} - {own}):
            known = [a for a, name in zip(agreed, group, strict=True) if name == g if a is not None]
            others += [mean(known)] if known else []
        found.append(value is not None and len(others) >= 2 and value < median(others) / 2)
    return found
