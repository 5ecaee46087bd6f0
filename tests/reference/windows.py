"""Which images a site reads in each step of a discriminator, window by window."""

import torch

from fedda.train import generator


def batches(n: int, size: int, p: int, seed: int, count: int) -> list[list[int]]:
    """Whole windows of p batches from each order of n images; of more orders if one is short."""
    found: list[list[int]] = []
    orders = 0
    while len(found) < count:
        order: list[int] = []
        while len(order) < p * size:
            order += torch.randperm(n, generator=generator(seed, "epoch", orders)).tolist()
            orders += 1
        whole = max(n // (p * size), 1) * p
        found += [order[b * size : (b + 1) * size] for b in range(whole)]
    return found[:count]
