"""Local training: which images a round uses, at what learning rate, from which seed.

Everything is a function of (seed, site, round) and of the blocks into which the site has divided
its images for good. So a site that restarts, or runs in another engine, goes on exactly where it
stopped.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim

from fedda.config import TrainConfig


def seed_for(*parts: object) -> int:
    """A 63-bit seed from names and numbers, the same on every machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(*parts))


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators from which layers on a device draw, as `torch.manual_seed` does.

    Where CUDA was not used yet, that notes the stack of each call, a millisecond of a short round.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)


def repeatable() -> None:
    """Let cuDNN compute the same bits in every run of this process: no timing, no atomic sums.

    `torch.backends.cudnn.deterministic` is set to True and `torch.backends.cudnn.benchmark` to
    False. Operations outside of cuDNN that add up atomically may still differ in their last bits.
    """
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def joined(blocks: Sequence[Tensor], least: int) -> list[Tensor]:
    """Join neighbouring blocks of indices into as many sets of `least` or more as they fill.

    The sets hold nearly equal numbers of blocks. If all blocks together hold fewer, they are one
    set; without blocks there is none.
    """
    ends = [0, *accumulate(map(len, blocks))]
    for number in range(min(ends[-1] // least, len(blocks)), 1, -1):
        size, larger = divmod(len(blocks), number)  # of a set, and how many have one block more
        cuts = [*pairwise(k * size + min(k, larger) for k in range(number + 1))]
        if min(ends[b] - ends[a] for a, b in cuts) >= least:
            return [torch.cat([*blocks[a:b]]) for a, b in cuts]
    return [torch.cat([*blocks])] if blocks else []


def round_images(
    blocks: Sequence[Tensor], server_round: int, rounds_per_epoch: float, seed: int
) -> list[Tensor]:
    """Indices of the images that one round uses -> one tensor per epoch that the round touches.

    All rounds together read the blocks epoch by epoch, each epoch in a fresh order. With r rounds
    per epoch, round t gets the blocks from (t-1)/r to t/r epochs: five epochs for r = 0.2, and a
    third of one for r = 3. A round takes whole blocks, whatever its number, r and seed: two rounds
    that share all but a few images would reveal these few. Its images are shuffled.
    """
    n = len(blocks)
    start = math.floor((server_round - 1) * n / rounds_per_epoch + 1e-9)
    stop = math.floor(server_round * n / rounds_per_epoch + 1e-9)
    shares = []
    for epoch in range(start // n, math.ceil(stop / n)) if start < stop else ():
        order = torch.randperm(n, generator=generator(seed, "epoch", epoch))
        chosen = order[max(start - epoch * n, 0) : min(stop - epoch * n, n)]
        images = torch.cat([blocks[k] for k in chosen.tolist()])
        draw = torch.randperm(len(images), generator=generator(seed, "share", epoch, server_round))
        shares.append(images[draw])
    return shares


def balanced(share: Tensor, y: Tensor, draws: torch.Generator) -> Tensor:
    """Repeat images of rare classes until all classes of a share are equally frequent, shuffled.

    Every image stays in the share, and how often it comes depends on the images of the share
    alone, whatever the seed: two rounds over the same images differ in their order only.

    Args:
        share: (n,) indices of images.
        y: the label of every image of the site.
        draws: decides over the order.
    """
    share = share.sort().values
    label = y[share]
    count = torch.bincount(label)
    most = int(count.max())
    # Image j of the n_c of its class comes at j, j + n_c, j + 2 n_c, .. below `most`.
    order = label.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - (count.cumsum(0) - count)[label[order]]
    times = (most - 1 - place) // count[label] + 1
    repeated = share.repeat_interleave(times)
    return repeated[torch.randperm(len(repeated), generator=draws)]


def batches(shares: Iterable[Tensor], batch_size: int, least: int = 2) -> Iterator[Tensor]:
    """Mini-batches of indices, each over `least` different images or more.

    What a model learns in its last step can be most of what it shows. So a batch with fewer
    different images joins the one before it, or the first one the next. A share of one image gives
    no batch at all, as BatchNorm cannot learn from it.

    Args:
        shares: (n,) indices each; an image may come several times.
        batch_size: images per batch.
        least: of different images in a batch; a share with fewer is one batch.
    """
    for share in shares:
        parts: list[Tensor] = []
        for part in share.split(batch_size):
            if parts and min(_different(part), _different(parts[-1])) < least:
                parts[-1] = torch.cat([parts[-1], part])
            else:
                parts.append(part)
        yield from (part for part in parts if len(part) > 1)


def _different(images: Tensor) -> int:
    return len(images.unique())


def windows(
    blocks: Sequence[Tensor], batch_size: int, p: int, seed: int, first: int, count: int
) -> Iterator[Tensor]:
    """Mini-batches of indices for steps first + 1 to first + count.

    Every p steps are a window; a sum over its images leaves the site. The blocks are joined into as
    many sets of p * batch_size images or more as they fill. Each window uses one set; each epoch
    takes the sets, and each window its images, in a fresh order. So a window has each image once,
    and consists of whole blocks, whatever p, batch size and seed: if two windows shared all but a
    few images, their difference would reveal a sum over these few. Batches are smaller than
    batch_size only if all blocks together hold fewer images than a window needs.
    """
    sets = joined(blocks, p * batch_size)
    number, stop = len(sets), first + count
    for window in range(first // p, -(-stop // p)):
        epoch, place = divmod(window, number)
        places = torch.randperm(number, generator=generator(seed, "epoch", epoch))
        images = sets[places[place]]
        draw = torch.randperm(len(images), generator=generator(seed, "window", window))
        begin = window * p
        yield from images[draw].tensor_split(p)[max(first - begin, 0) : stop - begin]


def learning_rate(config: TrainConfig, server_round: int, rounds: int) -> float:
    """The rate of one round: lr in the first, lr-end in the last.

    `ganin` is the rate of Ganin et al., JMLR 2016, section 5.2.2, and of SHOT: lr (1 + 10 q)^-.75.
    """
    done = (server_round - 1) / max(rounds - 1, 1)
    if config.schedule == "ganin":
        return config.lr * (1 + 10 * done) ** -0.75
    share = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "constant": 1.0,
    }[config.schedule]
    return config.lr_end + (config.lr - config.lr_end) * share


class Paced(optim.Optimizer):
    """An optimizer that moves once per so many steps, and clips the gradient that it moves by.

    A step of training stays one batch, and counts as one wherever steps are counted. A round's last
    steps may be fewer; `settle` moves by them.

    Args:
        inner: the optimizer that moves the parameters and has all state.
        every: steps whose mean gradient it moves by.
        clip: the largest norm of that gradient, over all parameters; 0: any.
    """

    def __init__(self, inner: optim.Optimizer, every: int, clip: float) -> None:
        self.inner = inner
        self.every = every
        self.clip = clip
        self.param_groups, self.state = inner.param_groups, inner.state
        self._pending = 0

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of the optimizer inside."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, unless the next move needs them."""
        if not self._pending:
            self.inner.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Count a step's gradient, which `backward` has added; move if it was the last."""
        self._pending += 1
        if self._pending == self.every:
            self.settle()

    def settle(self) -> None:
        """Move by the steps that are left, if there are any."""
        if not self._pending:
            return
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in moved if self._pending > 1 else ():
            p.grad /= self._pending
        if self.clip:
            nn.utils.clip_grad_norm_(moved, self.clip)
        self.inner.step()
        self._pending = 0


def paced(optimizer: optim.Optimizer, config: TrainConfig) -> optim.Optimizer:
    """The optimizer with `train.accumulate` and `train.clip`; itself if these change nothing."""
    if config.accumulate == 1 and not config.clip:
        return optimizer
    return Paced(optimizer, config.accumulate, config.clip)


def make_optimizer(parameters: Iterable[Any], config: TrainConfig, rate: float) -> optim.Optimizer:
    """The configured optimizer.

    Args:
        parameters: to train, or groups of parameters with their own rates (`Model.groups`).
        config: which optimizer, and its settings.
        rate: learning rate.
    """
    if config.optimizer == "adam":
        return optim.Adam(parameters, lr=rate, weight_decay=config.weight_decay)
    if config.optimizer == "adadelta":
        return optim.Adadelta(parameters, lr=rate, weight_decay=config.weight_decay)
    return optim.SGD(
        parameters,
        lr=rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov and config.momentum > 0,
    )
