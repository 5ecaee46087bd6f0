"""Local training: which images a round uses, at what learning rate, from which seed.

Everything is a function of (seed, site, round), so a site that restarts, or another engine, goes
on exactly where the last one stood.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, optim

from fedda.config import TrainConfig

if TYPE_CHECKING:
    from fedda.models import Model


def seed_for(*parts: object) -> int:
    """A 63-bit seed from names and numbers, the same on every machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(*parts))


def round_images(n: int, server_round: int, rounds_per_epoch: float, seed: int) -> list[Tensor]:
    """Indices of the images one round uses -> one tensor per epoch it touches.

    All rounds together read the images epoch by epoch, each epoch in a fresh order; round t gets
    the share from (t-1)/r to t/r epochs, so r = 0.2 is five epochs and r = 100 a hundredth of one.
    """
    start = math.floor((server_round - 1) * n / rounds_per_epoch + 1e-9)
    stop = math.floor(server_round * n / rounds_per_epoch + 1e-9)
    shares = []
    for epoch in range(start // n, math.ceil(stop / n)):
        order = torch.randperm(n, generator=generator(seed, "epoch", epoch))
        shares.append(order[max(start - epoch * n, 0) : min(stop - epoch * n, n)])
    return shares


def batches(shares: list[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Mini-batches of indices; a single left-over image joins the batch before it.

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

    Every p steps are a window, over whose images a sum leaves the site. All n images are divided
    into as many windows as they fill, once for the training; an epoch takes the windows, and each
    window its images, in a fresh order. So no image is in a window twice, and two windows are over
    the same images or have none in common: the difference of two that shared all but a few would
    be a sum over these few. Only where a window takes more than all n do some come again.
    """
    size = p * batch_size
    groups = max(n // size, 1)
    order = torch.randperm(n, generator=generator(seed, "windows", groups))
    members = order.repeat(-(-size // n))[: max(n, size)].tensor_split(groups)
    stop = first + count
    for window in range(first // p, -(-stop // p)):
        epoch, turn = divmod(window, groups)
        turns = torch.randperm(groups, generator=generator(seed, "epoch", epoch))
        images = members[turns[turn]]
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


def make_optimizer(model: "Model", config: TrainConfig, rate: float) -> optim.Optimizer:
    """The configured optimizer; a pretrained model's new layers learn ten times as fast."""
    groups = model.groups(rate)
    if config.optimizer == "adam":
        return optim.Adam(groups, lr=rate, weight_decay=config.weight_decay)
    return optim.SGD(groups, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay)
