"""What a federation costs in accuracy: f-DANN, f-WDGRL and f-DAN beside one plain loop.

    python examples/benchmarks/central.py --data DATA --target webcam --preset vectors

DATA holds one `.npz` per domain. Each method trains twice with the same seeds: over sites, as
`fedda run --simulate` does, and in one loop that has all sites' data. The loop has the same
network, the same rounds and batches of the same images. But all sites share one model, which
moves in every step, not once per round, and the discriminator learns from each step's own
gradient, not from sums that are exchange.p steps old.

The loop minimises what the federation's average minimises: site i's losses, weighted by its share
a_i in the average. Its classifier's gradient is divided by the sources' share, as classifiers are
averaged over the sources alone.

The last line is one JSON object: method -> accuracies in % after the last round, one per seed:

    federated    over sites
    central      in one loop
    source_only  in one loop, without the adversarial loss
    difference   federated minus central, mean over the seeds
"""

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import accuracy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedda import models
from fedda.adversarial import discriminators as D
from fedda.algorithms.fedavg import weights
from fedda.config import Flat
from fedda.halves import load
from fedda.maths import fourier
from fedda.settings import RunConfig, overrides, presets
from fedda.train import generator, joined, learning_rate, make_optimizer, seed_for, windows

METHODS = ("fdann", "fwdgrl", "fdan")
CPU = torch.device("cpu")


class Loop:
    """One training of a joint method, or of the sources alone, with all sites' data.

    Args:
        config: the run; its method is trained.
        nodes: the sites, as `fedda run --simulate` describes them.
        seed: seed of every draw.
        aligned: False: the adversarial loss has no weight, which leaves the sources' training.
    """

    def __init__(
        self, config: RunConfig, nodes: Sequence[dict[str, Any]], seed: int, aligned: bool = True
    ) -> None:
        self.config, self.seed, self.aligned = config, seed, aligned
        self.options = config.options[config.method]
        sites = [load("clients", "site.memory").Site(node) for node in nodes]
        offers = {site.name: site.offer() for site in sites}
        shape = tuple(next(iter(offers.values()))["shape"])
        if len(shape) == 3:
            size = config.input.size or shape[1]
            shape = (config.input.channels or shape[0], size, size)
        classes = next(tuple(o["classes"]) for o in offers.values() if o["classes"])
        self.sites = {site.name: site for site in sites}
        self.target = next(site.name for site in sites if site.role == "target")
        self.sources = [site.name for site in sites if site.role == "source"]
        self.data = {name: site.training(shape) for name, site in self.sites.items()}
        self.tests = self.sites[self.target].evaluation(shape, classes)
        self.model = models.build(config.model, shape, len(classes), seed)
        counts = torch.tensor([len(self.data[name]) for name in self.sites])
        shares = weights(counts, self.options.weighting).tolist()
        self.share = dict(zip(self.sites, shares, strict=True))
        most = max(offer["examples"] for offer in offers.values())
        p = config.summing.p
        steps = -(-most / config.train.batch_size // config.train.rounds_per_epoch)
        self.steps = int(-(-max(1, steps) // p) * p)

    def run(self) -> float:
        """Train all rounds -> accuracy on the target's labelled tests, in %."""
        method, network = self.config.method, getattr(self.options, "discriminator", None)
        d = self.model.head.in_features
        DI = D.Discriminator(d, network.hidden if network else (), self.seed)
        moves = D.make_optimizer(DI, network) if network else None
        per_step = max(1, getattr(self.options, "critic_steps", 1))
        optimizer = make_optimizer(self.model.groups(1.0), self.config.train, 1.0)
        for t in range(1, self.config.rounds + 1):
            rate = learning_rate(self.config.train, t, self.config.rounds)
            if not self.config.train.carry_momentum:
                optimizer = make_optimizer(self.model.groups(rate), self.config.train, rate)
            for group, like in zip(optimizer.param_groups, self.model.groups(rate), strict=True):
                group["lr"] = like["lr"]
            W = self.frequencies(d) if method == "fdan" else None
            feeds = {name: self.feed(name, t, per_step) for name in self.sites}
            self.model.train()
            for i in range(self.steps):
                q = (t - 1 + i / self.steps) / self.config.rounds
                weight = self.options.reversal.at(q) * self.aligned
                batch, z, before = {}, {}, DI
                for k in range(per_step):
                    batch = {name: next(feed) for name, feed in feeds.items()}
                    last = k == per_step - 1
                    with torch.set_grad_enabled(last):
                        z = {n: self.model.features(self.x(n, some)) for n, some in batch.items()}
                    before = copy.deepcopy(DI) if method == "fdann" and last else DI
                    if moves is not None and self.aligned:
                        self.move(DI, moves, {n: f.detach() for n, f in z.items()})
                pull = self.matching(z, W) if W is not None else self.deceiving(before, z)
                loss = weight * pull + sum(
                    self.share[n] * F.cross_entropy(self.model.head(z[n]), self.y(n, batch[n]))
                    for n in self.sources
                )
                optimizer.zero_grad()
                loss.backward()
                for parameter in self.model.head.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= 1 - self.share[self.target]
                optimizer.step()
        assert self.tests is not None
        right = models.predict(self.model, self.tests.x).argmax(dim=1) == self.tests.y
        return 100 * float(right.float().mean())

    def feed(self, name: str, t: int, per_step: int) -> Iterator[Tensor]:
        """The batches that a site would read in round t."""
        site, train = self.sites[name], self.config.train
        groups = joined(site.blocks.groups or site.blocks.blocks, self.config.exchange.min_examples)
        count = self.steps * per_step
        seed = seed_for(self.seed, name)
        p = self.config.summing.p
        return windows(groups, train.batch_size, p, seed, (t - 1) * count, count)

    def x(self, name: str, indices: Tensor) -> Tensor:
        return models.as_inputs(self.data[name].x[indices], CPU)

    def y(self, name: str, indices: Tensor) -> Tensor:
        return self.data[name].y[indices]

    def move(self, DI: nn.Module, optimizer: torch.optim.Optimizer, z: dict[str, Tensor]) -> None:
        """One step of the discriminator on both halves of its loss, divided by 2 as g_sync is."""
        kind = "grl" if self.config.method == "fdann" else "wassda"
        halves = {n: D.HALVES[kind, "target" if n == self.target else "source"] for n in z}
        part = {n: 1.0 if n == self.target else 1 / len(self.sources) for n in z}
        gamma = getattr(self.options, "penalty", 0.0)
        each = [part[n] * D.discriminator_loss(halves[n], DI, z[n], gamma) for n in z]
        optimizer.zero_grad()
        (torch.stack(each).sum() / 2).backward()
        optimizer.step()
        if getattr(self.options, "spectral", False):
            D.bound(DI)

    def deceiving(self, DI: nn.Module, z: dict[str, Tensor]) -> Tensor:
        """What the encoders minimise against the discriminator, weighted as the models are."""
        pulls = []
        for name in z:
            side = "target" if name == self.target else "source"
            if self.config.method == "fwdgrl":
                pull = D.reversed_loss(D.HALVES["wassda", side], DI, z[name])
            elif self.options.reversal.loss == "inverted":
                pull = D.inverted_loss(side, DI, z[name])
            else:
                pull = D.reversed_loss(D.HALVES["grl", side], DI, z[name])
            pulls.append(self.share[name] * pull)
        return torch.stack(pulls).sum()

    def matching(self, z: dict[str, Tensor], W: Tensor) -> Tensor:
        """F-DAN: the same against the witness of this step's own mean embeddings."""
        mu = {name: fourier.mean_embedding(features, W) for name, features in z.items()}
        sources = torch.stack([mu[name] for name in self.sources]).mean(dim=0)
        w = (sources - mu[self.target]).detach()
        sign = {name: -1 if name == self.target else 1 for name in self.sites}
        pulls = [2 * sign[name] * self.share[name] * (mu[name] @ w) for name in self.sites]
        return torch.stack(pulls).sum()

    @torch.no_grad()
    def frequencies(self, d: int) -> Tensor:
        """f-DAN's random frequencies at this round's scale."""
        o = self.options
        scale = o.scale
        if not scale:
            self.model.eval()
            z = self.model.features(self.x(self.target, torch.arange(len(self.data[self.target]))))
            scale = fourier.median_distance(z) or 1.0
        draws = generator(self.seed, "frequencies")
        return fourier.frequencies(d, o.frequencies, scale, o.bandwidths, draws)


def federated(config: RunConfig, nodes: Sequence[dict[str, Any]], seed: int) -> float:
    """The same training over sites, in one process -> accuracy in the last round, in %."""
    journal = load("server", "journal").Journal(None)
    simulate = load("server", "simulation").simulate
    with tempfile.TemporaryDirectory() as folder:
        update = {"dir": folder, "seeds": str(seed)}
        config = config.model_copy(update={"run": config.run.model_copy(update=update)})
        results = simulate(config, [dict(node) for node in nodes], journal, "process")
    return 100 * results["trainings"][config.method][0]["rounds"][-1]["accuracy"]


def compare(method: str, nodes: Sequence[dict[str, Any]], flat: Flat, seeds: list[int]) -> Any:
    """Both trainings with each seed -> the figures of one method."""
    own = {k: v for k, v in flat.items() if k.split(".")[0] not in METHODS or k.startswith(method)}
    config = RunConfig.parse(own | {"method": method, "track.tensorboard": False})
    figures = {
        "federated": [federated(config, nodes, seed) for seed in seeds],
        "central": [Loop(config, nodes, seed).run() for seed in seeds],
        "source_only": [Loop(config, nodes, seed, aligned=False).run() for seed in seeds],
    }
    table = {name: [round(value, 1) for value in each] for name, each in figures.items()}
    pairs = zip(figures["federated"], figures["central"], strict=True)
    return table | {"difference": round(statistics.fmean(a - b for a, b in pairs), 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with one .npz per domain")
    parser.add_argument("--target", required=True, help="name of the domain without labels")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--preset", action="append", default=[], help="as of fedda run")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    nodes = [
        {
            "role": "target" if path.stem == args.target else "source",
            "name": path.stem,
            "data": str(path),
            "threads": 1,
        }
        for path in sorted(args.data.glob("*.npz"))
    ]
    if not any(node["role"] == "target" for node in nodes):
        parser.error(f"{args.data} has no {args.target}.npz")
    flat = presets.settings("fedavg", args.preset)
    answer = {}
    for method in args.method or METHODS:
        own = {k.replace("fedavg.", f"{method}."): v for k, v in flat.items()}
        answer[method] = compare(method, nodes, own | overrides(method, args.changes), args.seeds)
        print(f"{method}: {answer[method]}", flush=True)
    print(json.dumps(answer))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
