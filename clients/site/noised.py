"""DP-SGD at a source: what it sends hides whether any single example was there.

Abadi et al., CCS 2016, https://arxiv.org/abs/1607.00133, algorithm 1. Opacus gives
the gradients of single examples.

    N      int      examples of the site; which is no secret
    q      float    chance of each example to be in a step's batch: batch-size / N
    g_i    (P,)     gradient of example i's loss, scaled down to a norm of at most `privacy.clip`;
                    0 if it is not finite
    step            (sum_i g_i + noise clip z) / (q N), z standard normal

A round takes as many steps as without noise, on batches of all examples and not of whole blocks.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.config import PrivacyConfig
from fedda.models import Model
from fedda.secure.accountant import Steps, epsilon, missing

from .request import Numbers
from .trainer import Trainer

MEMORY = 2**26  # values that the gradients of single examples take at a time


def train(
    client: Trainer,
    labels: Callable[[Tensor], Tensor],
    penalty: Callable[[], Tensor | float],
) -> Numbers:
    """Train for a round.

    Args:
        client: a source's.
        labels: returns the labels of images.
        penalty: returns what a method adds to the loss; it depends on no example.

    Raises:
        BudgetError: it would spend more than the site's policy allows.
        ConfigError: Opacus is not installed.
    """
    settings, train, N = client.task.privacy, client.task.train, len(client.data)
    q = min(1.0, train.batch_size / N)
    n = max(1, round(N / train.batch_size / train.rounds_per_epoch_of(N)))
    spent = _spend(client, (settings.noise, q, n))  # before anything is computed
    draws, noise = _generators(client)
    optimizer = client.optimizer()

    def loss_of(part: Tensor) -> Tensor:
        return F.cross_entropy(client.model(client.inputs(part)), labels(part))

    with per_example(client.model):
        for _ in range(n):
            batch = torch.from_numpy((draws.random(N) < q).nonzero()[0])
            noisy_gradient(optimizer, loss_of, batch, settings, q * N, noise)
            _penalty_gradient(client.model, penalty())
            optimizer.step()
    return {"steps": n, "epsilon": spent}


def noisy_gradient(
    optimizer: Any,
    loss_of: Callable[[Tensor], Tensor],
    batch: Tensor,
    settings: PrivacyConfig,
    expected: float,
    draws: np.random.Generator,
    memory: int = MEMORY,
) -> None:
    """Set the gradient of each parameter of an optimizer to that of a step.

    All is added up in double precision, and rounded once, at the end: so noise is never rounded
    away, and the low bits of what leaves say nothing.

    Args:
        optimizer: of the parameters, whose model is within `per_example`.
        loss_of: the mean loss of the examples with these indices.
        batch: indices of the examples that were drawn; may be none.
        settings: noise and clip.
        expected: examples in a batch, on average.
        draws: the noise.
        memory: values that the gradients of single examples may take at a time.
    """
    own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in own]
    most = max(1, memory // sum(p.numel() for p in own))
    for part in batch.split(most) if len(batch) else ():
        loss_of(part).backward()
        for t, g in zip(total, clipped([p.grad_sample for p in own], settings.clip), strict=True):
            t += g
        for p in own:
            p.grad_sample = None
    for p, t in zip(own, total, strict=True):
        z = torch.from_numpy(draws.standard_normal(tuple(p.shape))).to(t.device)
        p.grad = ((t + settings.noise * settings.clip * z) / max(1, round(expected))).to(p.dtype)


def clipped(g: Sequence[Tensor], clip: float) -> list[Tensor]:
    """Sum over examples i of g_i min(1, clip / |g_i|), or of 0 where g_i is not finite.

    A single example of which the gradient is infinite would else decide over the whole sum.

    Args:
        g: (n, *) each: the gradients of n examples, by parameter.
        clip: the largest norm of an example's gradient, over all parameters.

    Returns:
        (*) float64 each, in which squares of any float32 are finite.
    """
    squares = [x.double().flatten(1).square().sum(dim=1) for x in g]
    norm = torch.stack(squares).sum(dim=0).sqrt()
    finite = norm.isfinite()
    factor = (clip / norm[finite]).clamp(max=1.0)  # 1 where the gradient is 0
    return [torch.einsum("n,n...->...", factor, x[finite].double()) for x in g]


def _penalty_gradient(model: Model, penalty: Tensor | float) -> None:
    """Add the gradient of what a method adds to the loss."""
    if isinstance(penalty, Tensor):
        own = [p for p in model.parameters() if p.requires_grad]
        for p, g in zip(own, torch.autograd.grad(penalty, own, allow_unused=True), strict=True):
            if g is not None and p.grad is not None:
                p.grad += g


@contextmanager
def per_example(model: Model) -> Iterator[None]:
    """Let `backward` of a batch's mean loss leave each example's gradient in `p.grad_sample`."""
    try:
        from opacus import GradSampleModule
    except ImportError as error:
        raise missing(error) from None
    hooked = GradSampleModule(model)
    try:
        with warnings.catch_warnings():  # images need no gradient, which torch points out
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield
    finally:
        hooked.to_standard_module()


def _spend(client: Trainer, steps: Steps) -> float:
    """Book a round's steps -> epsilon of all steps with them."""
    gate = client.site.gate
    if gate.books:
        return gate.spend(steps)
    sigma, q, n = steps  # of this training alone, as if the site had taken part in every round
    return epsilon([(sigma, q, n * client.request.round)], gate.policy.privacy.delta)


def _generators(client: Trainer) -> tuple[np.random.Generator, np.random.Generator]:
    """What draws the batches, and the noise; who knew the seed could take the noise away.

    numpy's have 128 bits of the system's chance. Of torch's on the CPU, a seed has only 32.
    """
    if client.site.reproducible:
        seeds = (client.generator(p).initial_seed() for p in ("examples", "noise"))
        draws, noise = (np.random.default_rng(seed) for seed in seeds)
        return draws, noise
    return np.random.default_rng(), np.random.default_rng()
