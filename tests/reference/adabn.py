"""AdaBN's statistics, value by value and layer by layer, without merging batches."""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased variance of one channel's values."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def statistics(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Measure each BatchNorm layer's inputs, with each batch normalised by itself -> by entry name.

    All inputs of a layer are stored and then measured once, in float64.
    """
    model = copy.deepcopy(model).eval()
    layers = {n: m for n, m in model.named_modules() if "BatchNorm" in type(m).__name__}
    saw: dict[str, list[Tensor]] = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.train()
        layer.register_forward_hook(lambda m, x, y, name=name: saw[name].append(x[0].double()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    found = {}
    for name in layers:
        x = torch.cat(saw[name]).transpose(0, 1).flatten(1)  # (d, values)
        pairs = [moments(row.tolist()) for row in x]
        found[f"{name}.running_mean"] = torch.tensor([mean for mean, _ in pairs])
        found[f"{name}.running_var"] = torch.tensor([variance for _, variance in pairs])
    return found
