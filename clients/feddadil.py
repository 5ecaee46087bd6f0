"""FedDaDiL's clients: sources train the encoder, then all sites learn atoms that explain them.

Fernandes Montesuma et al., https://arxiv.org/abs/2309.07670, algorithm 2.
"""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import wire
from fedda.algorithms import feddadil
from fedda.data import Unlabelled
from fedda.errors import ConfigError
from fedda.train import seed_for
from fedda.wire import Kind, Packed, Role

from . import fedavg, state
from .base import Client, Numbers, Request
from .dictionary import Dictionary, Heads


class _Learner(Client):
    """What both roles do with atoms."""

    def _begin(self, request: Request) -> None:
        """The model where it came, as always; with atoms alone the encoder that is here."""
        if "atoms" not in request.arrays:
            super()._begin(request)
            return
        if "model" in request.arrays:
            super()._begin(request)
            state.save_encoder(self.site, request.task, self.model)
            before = self.workspace.dictionary
            self.workspace.dictionary = self._made(request)
            if before is not None:
                self.dictionary.inherit(before)
            return
        self.data = self.site.training(request.task.dims)
        self.workspace = self.site.workspace(request.task)
        self.model = self.workspace.model
        if self.workspace.dictionary is None:  # this process was started since
            if not state.load_encoder(self.site, request.task, self.model):
                raise ConfigError(
                    "Atoms came without the encoder, which this site did not keep; the server "
                    "sends it with the next request. With --state-dir it is kept."
                )
            self.workspace.dictionary = self._made(request)
        torch.manual_seed(seed_for(request.task.seed, self.site.name, request.round))

    def _made(self, request: Request) -> Dictionary:
        self.check_enough("atoms may leave it only after steps on")
        return Dictionary(self.site, request.task, self.model, self.data)

    @property
    def dictionary(self) -> Dictionary:
        return self.workspace.dictionary

    def atoms(self, request: Request) -> tuple[Tensor, Tensor]:
        """Z (K, n, d) and y (K, n, C), as they came.

        Raises:
            WireError: they are no points with probabilities.
        """
        request.arrays["atoms"].check_finite("the server")
        found = request.arrays["atoms"].unpack()
        feddadil.check_labels(found["y"], "the server")
        z, y = (torch.from_numpy(found[k].copy()).to(self.site.device) for k in "zy")
        return z, y / y.sum(dim=2, keepdim=True)

    def learn(self, request: Request, labels: Tensor | None) -> Numbers:
        """Algorithm 2."""
        *made, numbers = self.dictionary.learn(*self.atoms(request), labels, request)
        self.made = dict(zip("zy", (a.cpu().numpy() for a in made), strict=True))
        return numbers

    def outgoing(self, request: Request) -> dict[str, Packed]:
        """The site's version of the atoms; its coordinates are in none of it."""
        if "atoms" not in request.arrays:
            return super().outgoing(request)
        return {"atoms": wire.pack(self.made, Kind.ATOMS, request.task.wire.dtype)}


class Source(_Learner, fedavg.Source):
    """FedAvg's source in stage 1; in stage 2 atoms are to explain its features and labels."""

    def train(self, request: Request) -> Numbers:
        if "atoms" not in request.arrays:
            return super().train(request)
        labels = F.one_hot(self.data.y, request.task.classes).float()
        return self.learn(request, labels.to(self.site.device))


class Target(_Learner):
    """Learns atoms from features alone, and fits heads on them."""

    role: ClassVar[Role] = "target"
    data: Unlabelled
    heads: Heads | None = None

    def train(self, request: Request) -> Numbers:
        return self.learn(request, None)

    def _begin(self, request: Request) -> None:
        super()._begin(request)
        self.request = request

    def predict(self, x: Tensor) -> Tensor:
        """The head that counts; FedAvg's while there are no atoms."""
        if "atoms" not in self.request.arrays:
            return super().predict(x)
        return self.others(x)[self.request.task.options.predict]

    def others(self, x: Tensor) -> dict[str, Tensor]:
        """Both heads, and FedAvg's beside them."""
        if "atoms" not in self.request.arrays:
            return {}
        features = self.dictionary.encoded(x)
        heads = self._heads()
        found = {
            "reconstruction": heads.reconstruction(features),
            "ensemble": heads.ensemble(features),
            "encoder": self.model.head(features).softmax(dim=1),
        }
        return {name: p.cpu() for name, p in found.items()}

    def _heads(self) -> Heads:
        """Fitted once per request."""
        if self.heads is None:
            request = self.request
            self.heads = self.dictionary.fit(*self.atoms(request), request.round)
            if request.round == request.task.rounds:
                self.dictionary.save(self.heads)
        return self.heads

    def keepsakes(self) -> dict[str, np.ndarray]:
        """The target's points, the barycenter that is to explain them, and the distilled set."""
        if "atoms" not in self.request.arrays:
            return {}
        return self.dictionary.keepsakes(self._heads())
