"""The server's part of a KD3A round, from Algorithm 1: one number at a time, in plain lists.

models      one per site, the target first: name -> flat list of numbers
p           N images x K teachers x C classes
"""

from collections.abc import Sequence

from tests.reference import kd3a

Flat = dict[str, list[float]]


def alpha(p: list[kd3a.Image], gate: float, examples: list[int], target: int) -> list[float]:
    """Lines 6 to 12: the consensus focus of every source, and the weights that follow from it."""
    focus = kd3a.marginal(p, gate, "soft")
    told = [round(value / len(p), 3) for value in focus]  # per image, as the target tells it
    return kd3a.weights(told, examples, target)


def mean(models: Sequence[Flat], weights: list[float]) -> Flat:
    """Line 13 and eq. 18: the mean of every parameter; for BatchNorm, the mean of the moments."""
    mixed: Flat = {}
    for name in models[0]:
        mixed[name] = []
        for i in range(len(models[0][name])):
            total = 0.0
            for model, weight in zip(models, weights, strict=True):
                total += weight * model[name][i]
            mixed[name].append(total)
    for name in models[0]:
        if name.endswith("running_mean"):
            other = name.replace("running_mean", "running_var")
            moments = [m[name] for m in models], [m[other] for m in models]
            mixed[name], mixed[other] = kd3a.mixed_moments(*moments, weights)
    return mixed
