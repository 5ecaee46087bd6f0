"""Local training: which images a round uses, at what learning rate, from which seed.

Everything is a function of (seed, site, round). So a site that restarts, or runs in another engine,
goes on exactly where it stopped.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, optim

from fedda.config import TrainConfig


def seed_for(*parts: object) -> int:
    """A 63-bit seed from names and numbers, the same on every machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(*parts))


def round_images(n: int, server_round: int, rounds_per_epoch: float, seed: int) -> list[Tensor]:
    """Indices of the images that one round uses -> one tensor per epoch that the round touches.

    All rounds together read the images epoch by epoch, each epoch in a fresh order. With r rounds
    per epoch, round t gets the images from (t-1)/r to t/r epochs: five epochs for r = 0.2, and a
    hundredth of one for r = 100.
    """
    start = math.floor((server_round - 1) * n / rounds_per_epoch + 1e-9)
    stop = math.floor(server_round * n / rounds_per_epoch + 1e-9)
    shares = []
    for epoch in range(start // n, math.ceil(stop / n)):
        order = torch.randperm(n, generator=generator(seed, "epoch", epoch))
        shares.append(order[max(start - epoch * n, 0) : min(stop - epoch * n, n)])
    return shares


def batches(shares: list[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Mini-batches of indices; a single image left over joins the batch before it.

    BatchNorm cannot learn from one image, so a share of one image or none gives no batch at all.
    """
    for share in shares:
        parts = list(share.split(batch_size))
        if len(parts[-1]) < 2:
            last = parts.pop()
            if parts:
                parts[-1] = torch.cat([parts[-1], last])
        yield from parts


def windows(n: int, batch_size: int, p: int, seed: int, first: int, count: int) -> Iterator[Tensor]:
    """Mini-batches of indices for steps first + 1 to first + count, each of batch_size or more.

    Every p steps are a window; a sum over its images leaves the site. The n images are divided into
    as many sets of p * batch_size or more as they fill, once for the whole training. Each window
    uses one set; each epoch takes the sets, and each window its images, in a fresh order. So no
    image is in a window twice, and two windows have all images in common or none: if two windows
    shared all but a few images, their difference would reveal a sum over these few. Images repeat
    within a window only if a window needs more than all n.
    """
    size = p * batch_size
    number = max(n // size, 1)
    order = torch.randperm(n, generator=generator(seed, "windows", number))
    sets = order.repeat(-(-size // n))[: max(n, size)].tensor_split(number)
    stop = first + count
    for window in range(first // p, -(-stop // p)):
        epoch, place = divmod(window, number)
        places = torch.randperm(number, generator=generator(seed, "epoch", epoch))
        images = sets[places[place]]
        draw = torch.randperm(len(images), generator=generator(seed, "window", window))
        begin = window * p
        yield from images[draw].tensor_split(p)[max(first - begin, 0) : stop - begin]


def learning_rate(config: TrainConfig, server_round: int, rounds: int) -> float:
    """The rate of one round: lr in the first, lr-end in the last."""
    done = (server_round - 1) / max(rounds - 1, 1)
    share = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "constant": 1.0,
    }[config.schedule]
    return config.lr_end + (config.lr - config.lr_end) * share


def make_optimizer(parameters: Iterable[Any], config: TrainConfig, rate: float) -> optim.Optimizer:
    """The configured optimizer.

    Args:
        parameters: to train, or groups of parameters with their own rates (`Model.groups`).
        config: which optimizer, and its settings.
        rate: learning rate.
    """
    if config.optimizer == "adam":
        return optim.Adam(parameters, lr=rate, weight_decay=config.weight_decay)
    return optim.SGD(
        parameters, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
