"""Centring's clients: a target that measures its classes, and sources that move theirs there."""

import torch
from torch import Tensor

from fedda.clients import fedavg
from fedda.clients.base import Client
from fedda.clients.site.request import Numbers, Request
from fedda.clients.site.state import SiteState
from fedda.data import Unlabelled
from fedda.errors import ConfigError
from fedda.wire import packing
from fedda.wire.packing import Kind, Packed

from . import algorithm as centring

MEANS, ONCE = "means", 0  # kind and round of the files that hold what a target has told


class Source(fedavg.Source):
    """FedAvg's source, on inputs of which each class has the target's mean."""

    _shift: Tensor | None = None  # (C, d)

    def begin(self, request: Request) -> None:
        """Prepare for a request; with means, find out how far each class is from the target's."""
        super().begin(request)
        if "means" not in request.arrays:
            return
        told = request.arrays["means"].unpack()
        mu, known = (torch.from_numpy(told[name].copy()).to(self.device) for name in told)
        every = torch.arange(len(self.data))
        with torch.no_grad():
            x = self.inputs(every).flatten(1)
        self._shift = centring.shift(x, self.labels(every), mu, known)

    def inputs(self, indices: Tensor) -> Tensor:
        """The site's inputs, each moved with its class."""
        x = super().inputs(indices)
        return x if self._shift is None else x + self._shift[self.labels(indices)].view_as(x)


class Target(Client):
    """Tells the mean of each class that it predicts, once in a training, and no more."""

    data: Unlabelled

    def measure(self) -> Numbers:
        """Find the means, or those that this training was told before, whatever model came now.

        Two answers about models that differ in one example would tell that example.

        Raises:
            ConfigError: no class has enough examples.
        """
        told = self.workspace.recall(self.task, ONCE, MEANS)
        if told is None:
            told = SiteState(self._means())
            self.workspace.remember(self.task, ONCE, MEANS, told)
        self.means = {name: told.tensors[name].numpy() for name in ("mu", "known")}
        return {}

    @torch.no_grad()
    def _means(self) -> dict[str, Tensor]:
        """mu_T of the classes that the model predicts, as far as they have enough examples."""
        p, share, least = self.predict(self.data.x), self.options.surest, self.site.least_batch
        noise = self.site.noise
        draws = self.site.draws_of_noise(self.generator("noise").initial_seed())
        p = self.checked(p, noise)
        kept = centring.surest(p, share, least).nonzero()[:, 0]
        x, y = self.inputs(kept).flatten(1).cpu(), p[kept].argmax(dim=1)
        mu, known = centring.class_means(x, y, self.task.classes, least)
        if noise:
            known = centring.noisily_known(y, self.task.classes, least, noise, draws)
        if not known.any():
            raise ConfigError(
                f"The model gives no class to {least} or more of this site's {len(p)} examples, so "
                "no class mean may leave; add examples, or lower --min-images."
            )
        if noise:
            mu = centring.noisy(mu, known, x, y, noise, draws)
        return {"mu": mu, "known": known}

    def outgoing(self) -> dict[str, Packed]:
        """Return the means."""
        return {"means": packing.pack(self.means, Kind.STATISTICS, self.task.wire.dtype)}
