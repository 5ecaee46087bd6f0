"""The images that a site reads in each step of a discriminator, window by window."""

import torch

from fedda.train import generator


def shuffled(items: list[int], seed: int, *name: object) -> list[int]:
    draw = torch.randperm(len(items), generator=generator(seed, *name))
    return [items[i] for i in draw.tolist()]


def parts(items: list[int], count: int) -> list[list[int]]:
    """Split into nearly equal parts, the longer ones first."""
    length, longer = divmod(len(items), count)
    found = []
    for k in range(count):
        found.append(items[: length + (k < longer)])
        items = items[len(found[-1]) :]
    return found


def batches(n: int, size: int, p: int, seed: int, count: int) -> list[list[int]]:
    """Return batches: p per window, the same windows in every epoch; images repeat if too few."""
    many = max(n // (p * size), 1)
    images = shuffled(list(range(n)), seed, "windows", many)
    while len(images) < p * size:
        images = images + images
    if n < p * size:
        images = images[: p * size]
    windows = parts(images, many)
    found: list[list[int]] = []
    epoch = 0
    while len(found) < count:
        for k in shuffled(list(range(many)), seed, "epoch", epoch):
            found += parts(shuffled(windows[k], seed, "window", len(found) // p), p)
        epoch += 1
    return found[:count]
