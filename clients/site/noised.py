"""DP-SGD at a source: what it sends hides whether any single example was there.

Abadi et al., CCS 2016, https://arxiv.org/abs/1607.00133, algorithm 1, by Opacus.

    N      int      examples of the site; which is no secret
    q      float    chance of each example to be in a step's batch: batch-size / N
    g_i    (P,)     gradient of example i's loss, scaled down to a norm of at most `privacy.clip`
    step            (sum_i g_i + noise clip z) / (q N), z standard normal

A round takes as many steps as without noise, on batches of all examples and not of whole blocks.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.models import Model
from fedda.secure.accountant import Steps, epsilon, missing

from .request import Numbers

MEMORY = 2**26  # values that the gradients of single examples take at a time


class PrivateLearner(Protocol):
    """A source's client, as far as it matters here."""

    @property
    def task(self) -> Any: ...
    @property
    def site(self) -> Any: ...
    @property
    def request(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def model(self) -> Model: ...
    @property
    def device(self) -> torch.device: ...
    def optimizer(self) -> Any: ...
    def generator(self, purpose: str) -> torch.Generator: ...
    def inputs(self, indices: Tensor) -> Tensor: ...
    def labels(self, indices: Tensor) -> Tensor: ...
    def penalty(self) -> Tensor | float: ...


def train(client: PrivateLearner) -> Numbers:
    """Train for a round.

    Raises:
        BudgetError: it would spend more than the site's policy allows.
        ConfigError: Opacus is not installed.
    """
    settings, train, N = client.task.privacy, client.task.train, len(client.data)
    q = min(1.0, train.batch_size / N)
    n = max(1, round(N / train.batch_size / train.rounds_per_epoch_of(N)))
    spent = _spend(client, (settings.noise, q, n))  # before anything is computed
    draws, noise = _generators(client)
    try:
        from opacus.optimizers import DPOptimizer  # imports for seconds
    except ImportError as error:
        raise missing(error) from None
    inner = client.optimizer()
    with per_example(client.model):
        optimizer = DPOptimizer(
            inner,
            noise_multiplier=0.0,  # torch would draw it
            max_grad_norm=settings.clip,
            expected_batch_size=max(1, round(q * N)),
            loss_reduction="mean",
        )
        size = sum(p.numel() for p in optimizer.params)
        for _ in range(n):
            optimizer.zero_grad()
            batch = torch.from_numpy((draws.random(N) < q).nonzero()[0])
            _clipped_gradient(client, optimizer, batch, max(1, MEMORY // size))
            _add_noise(optimizer, settings.noise * settings.clip, noise)
            _penalty_gradient(client)
            inner.step()
    return {"steps": n, "epsilon": spent}


def _clipped_gradient(client: PrivateLearner, optimizer: Any, batch: Tensor, most: int) -> None:
    """Set each parameter's gradient to that of a step, in parts of so many examples."""
    parts = batch.split(most) if len(batch) else (batch,)
    for last, part in enumerate(parts, 1 - len(parts)):
        optimizer.signal_skip_step(do_skip=bool(last))
        if len(part):
            logits = client.model(client.inputs(part))
            F.cross_entropy(logits, client.labels(part)).backward()
        else:  # nobody was drawn: only noise
            for p in optimizer.params:
                p.grad_sample = p.new_zeros(0, *p.shape)
        if not optimizer.pre_step():
            optimizer.zero_grad()


def _add_noise(optimizer: Any, sigma: float, draws: np.random.Generator) -> None:
    """Add noise of this standard deviation to a step's sum of gradients, of which p.grad is a mean.

    It is added in double precision and then rounded: so the low bits of what leaves say nothing.
    """
    for p in optimizer.params:
        z = torch.from_numpy(draws.standard_normal(tuple(p.shape))) * sigma
        noisy = p.grad.double().cpu() + z / optimizer.expected_batch_size
        p.grad.copy_(noisy)


def _penalty_gradient(client: PrivateLearner) -> None:
    """Add the gradient of what a method adds to the loss; it depends on no example."""
    penalty = client.penalty()
    if isinstance(penalty, Tensor):
        own = [p for p in client.model.parameters() if p.requires_grad]
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


def _spend(client: PrivateLearner, steps: Steps) -> float:
    """Book a round's steps -> epsilon of all steps with them."""
    gate = client.site.gate
    if gate.books:
        return gate.spend(steps)
    sigma, q, n = steps  # of this training alone, as if the site had taken part in every round
    return epsilon([(sigma, q, n * client.request.round)], gate.policy.privacy.delta)


def _generators(client: PrivateLearner) -> tuple[np.random.Generator, np.random.Generator]:
    """What draws the batches, and the noise; who knew the seed could take the noise away.

    numpy's have 128 bits of the system's chance. Of torch's on the CPU, a seed has only 32.
    """
    if client.site.reproducible:
        seeds = (client.generator(p).initial_seed() for p in ("examples", "noise"))
        draws, noise = (np.random.default_rng(seed) for seed in seeds)
        return draws, noise
    return np.random.default_rng(), np.random.default_rng()
