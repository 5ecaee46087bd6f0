"""The base of training in one plain loop that has all sites' data.

A loop has the federation's network, first weights, rounds, steps and batches of the same images.
Nothing is sent or averaged, and each discriminator moves by the gradient of the step itself. Run
the benchmarks, not this module.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedda import models
from fedda.config.inputs import Inputs
from fedda.halves import load
from fedda.settings import RunConfig
from fedda.train import joined, learning_rate, make_optimizer, seed_for, windows

CPU = torch.device("cpu")


class Loop(ABC):
    """One training with all sites' data.

    Args:
        config: the run; its method is trained.
        nodes: the sites, as `fedda run --simulate` describes them.
        seed: seed of every draw.
        aligned: False: without the adversarial loss, which leaves the sources' training.
    """

    def __init__(
        self, config: RunConfig, nodes: Sequence[dict[str, Any]], seed: int, aligned: bool = True
    ) -> None:
        self.config, self.seed, self.aligned = config, seed, aligned
        self.method, self.options = config.method, config.options[config.method]
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
        self.data = {name: site.training(Inputs(shape)) for name, site in self.sites.items()}
        self.tests = self.sites[self.target].evaluation(Inputs(shape), classes)
        self.model = models.build(config.model, shape, len(classes), seed)
        layout = models.layout_of(config.model, config.train.layout)
        self.model.compute(models.Arithmetic(layout=layout))
        most = max(offer["examples"] for offer in offers.values())
        self.steps = config.train.steps_of(most)

    @abstractmethod
    def rounds(self) -> Iterator[int]:
        """Train, and yield the number of each round at its end."""

    def run(self) -> float:
        """Train all rounds -> accuracy on the target's labelled tests, in %."""
        for _ in self.rounds():
            pass
        assert self.tests is not None
        right = models.predict(self.model, self.tests.x).argmax(dim=1) == self.tests.y
        return 100 * float(right.float().mean())

    def paced(self, t: int) -> torch.optim.Optimizer:
        """The model's optimizer at the rate of round t; a new one, unless it is carried."""
        train = self.config.train
        rate = learning_rate(train, t, self.config.rounds)
        if t == 1 or not train.carry_momentum:
            self.optimizer = make_optimizer(self.model.groups(rate), train, rate)
        for group, like in zip(self.optimizer.param_groups, self.model.groups(rate), strict=True):
            group["lr"] = like["lr"]
        return self.optimizer

    def feed(self, name: str, first: int, count: int) -> Iterator[Tensor]:
        """The batches that a site would read in steps first + 1 to first + count."""
        site, least = self.sites[name], self.config.exchange.min_examples
        groups = joined(site.blocks.groups or site.blocks.blocks, least)
        p, seed = self.config.summing.p, seed_for(self.seed, name)
        return windows(groups, self.config.train.batch_size, p, seed, first, count)

    def x(self, name: str, indices: Tensor) -> Tensor:
        return models.as_inputs(self.data[name].x[indices], CPU)

    def y(self, name: str, indices: Tensor) -> Tensor:
        return self.data[name].y[indices]
