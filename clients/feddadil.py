"""FedDaDiL's clients: sources train the encoder, then all sites learn atoms that explain them.

Fernandes Montesuma et al., https://arxiv.org/abs/2309.07670, algorithm 2.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import wire
from fedda.algorithms import feddadil
from fedda.data import Unlabelled
from fedda.errors import ConfigError
from fedda.wire import Kind, Packed

from . import fedavg
from .base import Client
from .site import state
from .site.dictionary import Dictionary, Heads
from .site.request import Numbers, Request


class Learner(Client):
    """What both parts do with atoms."""

    def begin(self, request: Request) -> None:
        """With atoms the encoder comes once; it is kept, and what was extracted by it."""
        super().begin(request)
        if "atoms" not in request.arrays:
            return
        held = self.workspace.held
        if "model" in request.arrays:
            state.save_once(self.site, self.task, "encoder", self.model)
            before = held.get("dictionary")
            held["dictionary"] = self.new_dictionary()
            if before is not None:
                self.dictionary.inherit(before)
        elif "dictionary" not in held:  # this process was started since
            held["dictionary"] = self.new_dictionary()

    def recall(self) -> None:
        """With atoms alone the encoder that is here."""
        if "atoms" not in self.request.arrays:
            super().recall()
        if "dictionary" in self.workspace.held:
            return
        if not state.load_once(self.site, self.task, "encoder", self.model):
            raise ConfigError(
                "Atoms came without the encoder, which this site did not keep; the server "
                "sends it with the next request. With --state-dir it is kept."
            )

    def new_dictionary(self) -> Dictionary:
        """The site's part of the dictionary, under the encoder as it is now."""
        self.check_enough("atoms may leave it only after steps on")
        return Dictionary(self.site, self.task, self.model, self.data)

    @property
    def dictionary(self) -> Dictionary:
        return self.workspace.held["dictionary"]

    def atoms(self) -> tuple[Tensor, Tensor]:
        """Z (K, n, d) and y (K, n, C), as they came.

        Raises:
            WireError: they are no points with probabilities.
        """
        self.request.arrays["atoms"].check_finite("the server")
        came = self.request.arrays["atoms"].unpack()
        feddadil.check_labels(came["y"], "the server")
        z, y = (torch.from_numpy(came[k].copy()).to(self.device) for k in "zy")
        return z, y / y.sum(dim=2, keepdim=True)

    def learn(self) -> Numbers:
        """Algorithm 2."""
        *learnt, numbers = self.dictionary.learn(
            *self.atoms(), self.known_labels(), self.request.round
        )
        self.learnt = dict(zip("zy", (a.cpu().numpy() for a in learnt), strict=True))
        return numbers

    def known_labels(self) -> Tensor | None:
        """(N, C) of the site's examples; None where there are none."""
        return None

    def outgoing(self) -> dict[str, Packed]:
        """The site's version of the atoms; its coordinates are in none of it."""
        if self.request.hop != "learn":
            return super().outgoing()
        return {"atoms": wire.pack(self.learnt, Kind.ATOMS, self.task.wire.dtype)}


class Source(Learner, fedavg.Source):
    """FedAvg's source in stage 1; in stage 2 atoms are to explain its features and labels."""

    def known_labels(self) -> Tensor:
        return F.one_hot(self.data.y, self.task.classes).float().to(self.device)


class Target(Learner):
    """Learns atoms from features alone, and fits heads on them."""

    data: Unlabelled
    heads: Heads | None = None

    def predict(self, x: Tensor) -> Tensor:
        """The head that counts; FedAvg's while there are no atoms."""
        if "atoms" not in self.request.arrays:
            return super().predict(x)
        return self.others(x)[self.options.predict]

    def others(self, x: Tensor) -> dict[str, Tensor]:
        """Both heads, and FedAvg's beside them."""
        if "atoms" not in self.request.arrays:
            return {}
        features, heads = self.dictionary.encoded(x), self.fitted()
        predictors = {
            "reconstruction": heads.reconstruction(features),
            "ensemble": heads.ensemble(features),
            "encoder": self.model.head(features).softmax(dim=1),
        }
        return {name: p.cpu() for name, p in predictors.items()}

    def fitted(self) -> Heads:
        """The heads; fitted once per request."""
        if self.heads is None:
            self.heads = self.dictionary.fit(*self.atoms(), self.request.round)
            if self.request.round == self.task.rounds:
                self.dictionary.save(self.heads)
        return self.heads

    def keepsakes(self) -> dict[str, np.ndarray]:
        """The target's points, the barycenter that is to explain them, and the distilled set."""
        if "atoms" not in self.request.arrays:
            return {}
        return self.dictionary.keepsakes(self.fitted())
