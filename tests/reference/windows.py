"""The images that a site reads in each step of a discriminator, window by window."""

import torch

from fedda.train import generator


def shuffled(items: list[int], *name: object) -> list[int]:
    draw = torch.randperm(len(items), generator=generator(*name))
    return [items[i] for i in draw.tolist()]


def parts(items: list[int], count: int) -> list[list[int]]:
    """Split into nearly equal parts, the longer ones first."""
    length, longer = divmod(len(items), count)
    found = []
    for k in range(count):
        found.append(items[: length + (k < longer)])
        items = items[len(found[-1]) :]
    return found


def blocks(n: int, name: str, size: int) -> list[list[int]]:
    """The blocks of a site whose images are divided by its name."""
    return [sorted(part) for part in parts(shuffled([*range(n)], "blocks", name), n // size)]


def sets(blocks: list[list[int]], least: int) -> list[list[int]]:
    """Join neighbouring blocks into the most sets that hold `least` images or more each."""
    best = [[i for block in blocks for i in block]]
    for many in range(2, len(blocks) + 1):
        found = [
            [i for b in some for i in blocks[b]] for some in parts([*range(len(blocks))], many)
        ]
        if min(len(one) for one in found) >= least:
            best = found
    return best


def batches(blocks: list[list[int]], size: int, p: int, seed: int, count: int) -> list[list[int]]:
    """Return batches: p per window, the same windows in every epoch."""
    windows = sets(blocks, p * size)
    found: list[list[int]] = []
    epoch = 0
    while len(found) < count:
        for k in shuffled([*range(len(windows))], seed, "epoch", epoch):
            found += parts(shuffled(windows[k], seed, "window", len(found) // p), p)
        epoch += 1
    return found[:count]
