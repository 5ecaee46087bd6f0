"""One loop for f-DANN, f-WDGRL, f-DAN, MDAN, and FADA without its model III (see `loop`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from loop import Loop
from torch import Tensor, nn
from torch.nn import functional as F

from fedda.adversarial import discriminators as D
from fedda.algorithms import fada, mdan
from fedda.algorithms.fedavg import weights
from fedda.errors import ConfigError
from fedda.maths import fourier
from fedda.settings import RunConfig
from fedda.train import generator, seed_for


class Joint(Loop):
    """All sites share one model, which moves in every step.

    It minimises sum_i a_i (CE_i + weight * pull_i), with a_i the weight that site i's model has in
    the federation's average. The classifier's gradient is divided by the sources' share, as
    classifiers are averaged over the sources alone.
    """

    def __init__(
        self, config: RunConfig, nodes: Sequence[dict[str, Any]], seed: int, aligned: bool = True
    ) -> None:
        super().__init__(config, nodes, seed, aligned)
        o, target = self.options, self.target
        if self.method == "fdan" and o.pairs:
            raise ConfigError("The loop of f-DAN has one witness; leave fdan.pairs at false.")
        p, self.share = config.summing.p, self.shares()
        self.steps = -(-self.steps // p) * p
        self.critic = self.method == "fwdgrl"
        self.per_step = max(1, o.critic_steps * p) if self.critic else 1
        if self.method == "fada":
            self.halves = fada.HALVES
        else:
            kind = "wassda" if self.critic else "grl"
            self.halves = {side: D.HALVES[kind, side] for side in ("source", "target")}
        self.pairs = {s: [s, target] for s in self.sources} if o.pairs else {"": list(self.sites)}
        self.DI: dict[str, D.Discriminator] = {}
        if self.method != "fdan":
            d, sizes = self.model.head.in_features, o.discriminator.hidden
            names = {pair: f"gradient/{pair}" if pair else "gradient" for pair in self.pairs}
            self.DI = {k: D.Discriminator(d, sizes, seed_for(seed, n)) for k, n in names.items()}
        self.moves = {k: D.make_optimizer(DI, o.discriminator) for k, DI in self.DI.items()}
        self.part = dict(self.share)
        if self.method == "fada":
            self.part = dict.fromkeys(self.share, 0.0) | {target: 1.0}
        names = list(self.sites)
        self.later = {n: sum(self.part[m] for m in names[i + 1 :]) for i, n in enumerate(names)}
        torch.manual_seed(seed_for(seed, "loop"))

    def shares(self) -> dict[str, float]:
        """a_i by site, as the server weighs the models that it receives."""
        own = {self.target: 1.0} if self.method == "fada" else {}
        names = [name for name in self.sites if name not in own]
        counts = torch.tensor([len(self.data[name]) for name in names])
        each = weights(counts, self.options.weighting).tolist()
        return own | dict(zip(names, each, strict=True))

    def rounds(self) -> Iterator[int]:
        for t in range(1, self.config.rounds + 1):
            optimizer, count = self.paced(t), self.steps * self.per_step
            self.W = self.frequencies() if self.method == "fdan" else None
            feeds = {name: self.feed(name, (t - 1) * count, count) for name in self.sites}
            self.model.train()
            for i in range(self.steps):
                self.step(feeds, optimizer, (t - 1 + i / self.steps) / self.config.rounds)
            yield t

    def step(
        self, feeds: Mapping[str, Iterator[Tensor]], optimizer: torch.optim.Optimizer, q: float
    ) -> None:
        """One step of the model when a share q of the training is over, and those of its critic."""
        batch, z = {}, {}
        for k in range(self.per_step):
            batch = {name: next(feed) for name, feed in feeds.items()}
            with torch.set_grad_enabled(k == self.per_step - 1):
                z = {name: self.features(name, indices) for name, indices in batch.items()}
            if self.critic:
                self.move(z)
        losses = {
            n: F.cross_entropy(self.model.head(z[n]), self.y(n, batch[n])) for n in self.sources
        }
        a, w = dict(self.share), dict.fromkeys(self.pairs, 1 / len(self.pairs))
        of_sources = sum(a[n] for n in self.sources)
        if self.method == "mdan" and self.aligned:
            w = self.worst(losses, z)
            a |= {n: w[n] * of_sources for n in self.sources}
        if self.W is not None:
            pull = self.matching(z, self.W)
        else:
            pull = torch.stack([a[name] * self.deceiving(name, z[name], w) for name in z]).sum()
        if self.method == "fada":
            weight = self.options.weights.alignment_at(q)
        else:
            weight = self.options.reversal.at(q)
        loss = self.aligned * weight * pull + sum(a[n] * losses[n] for n in self.sources)
        optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.head.parameters():
            assert parameter.grad is not None
            parameter.grad /= of_sources
        optimizer.step()
        if not self.critic:
            self.move(z)  # at the features and by the weights from before the model's step

    def features(self, name: str, indices: Tensor) -> Tensor:
        """A batch's features; BatchNorm's running statistics move as the sites' mean does."""
        with slowed(self.model, self.part[name], self.later[name]):
            return self.model.features(self.x(name, indices))

    def side(self, name: str) -> Any:
        return "target" if name == self.target else "source"

    def move(self, z: Mapping[str, Tensor]) -> None:
        """A step of each discriminator on both halves of its loss, divided by 2 as g_sync is."""
        gamma = getattr(self.options, "penalty", 0.0)
        for pair, DI in self.DI.items() if self.aligned else ():
            members = self.pairs[pair]
            part = {n: 1.0 if n == self.target else 1 / (len(members) - 1) for n in members}
            halves = {n: self.halves[self.side(n)] for n in members}
            each = [part[n] * D.discriminator_loss(halves[n], DI, z[n], gamma) for n in members]
            self.moves[pair].zero_grad()
            (torch.stack(each).sum() / 2).backward()
            self.moves[pair].step()
            if getattr(self.options, "spectral", False):
                D.bound(DI)

    def deceiving(self, name: str, z: Tensor, w: Mapping[str, float]) -> Tensor:
        """A site's loss against its discriminators; the target's are weighted by w."""
        pulls = []
        for pair, DI in self.DI.items():
            if name in self.pairs[pair]:
                weight = w[pair] if name == self.target else 1.0
                pulls.append(weight * self.deceive(DI, self.side(name), z))
        return torch.stack(pulls).sum()

    def deceive(self, DI: nn.Module, side: Any, z: Tensor) -> Tensor:
        """What an encoder minimises against one discriminator."""
        if self.method == "fada":
            return D.mapping_loss(self.halves[side], DI, z)
        if not self.critic and self.options.reversal.loss == "inverted":
            return D.inverted_loss(side, DI, z)
        return D.reversed_loss(self.halves[side], DI, z)

    @torch.no_grad()
    def worst(self, losses: Mapping[str, Tensor], z: Mapping[str, Tensor]) -> dict[str, float]:
        """MDAN's weights of the sources, from this step's own losses."""
        o, d = self.options, []
        for pair, DI in self.DI.items():
            each = [
                D.discriminator_loss(self.halves[self.side(n)], DI, z[n]) for n in self.pairs[pair]
            ]
            d.append(torch.stack(each).sum())
        CE = torch.stack([losses[pair] for pair in self.pairs])
        f = mdan.domain_losses(CE.double(), torch.stack(d).double(), o.mu, o.sign)
        return dict(zip(self.pairs, mdan.weights(f, o.gamma, o.max).tolist(), strict=True))

    def matching(self, z: Mapping[str, Tensor], W: Tensor) -> Tensor:
        """F-DAN: the pull of the witness of this step's own mean embeddings."""
        mu = {name: fourier.mean_embedding(features, W) for name, features in z.items()}
        sources = torch.stack([mu[name] for name in self.sources]).mean(dim=0)
        w = (sources - mu[self.target]).detach()
        sign = {name: -1 if name == self.target else 1 for name in self.sites}
        pulls = [2 * sign[name] * self.share[name] * (mu[name] @ w) for name in self.sites]
        return torch.stack(pulls).sum()

    @torch.no_grad()
    def frequencies(self) -> Tensor:
        """f-DAN's random frequencies at this round's scale."""
        o, scale = self.options, self.options.scale
        if not scale:
            self.model.eval()
            z = self.model.features(self.x(self.target, torch.arange(len(self.data[self.target]))))
            scale = fourier.median_distance(z) or 1.0
        draws = generator(self.seed, "frequencies")
        d = self.model.head.in_features
        return fourier.frequencies(d, o.frequencies, scale, o.bandwidths, draws)


@contextmanager
def slowed(model: nn.Module, part: float, later: float) -> Iterator[None]:
    """Move BatchNorm's running statistics by one site's part of a step.

    Sites update them one after the other, but together as a mean of the sites' statistics would
    move: by momentum times the weighted mean of their batches' statistics.

    Args:
        model: with the layers.
        part: this site's weight in that mean.
        later: the weights of the sites that follow in the same step.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum or 0.0 for norm in norms]
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum * part / (1 - momentum * later)
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
