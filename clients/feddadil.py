"""FedDaDiL's clients: sources train the encoder, then all sites learn atoms that explain them.

Fernandes Montesuma et al., https://arxiv.org/abs/2407.11647, algorithm 2.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import models
from fedda.algorithms import feddadil
from fedda.data import Unlabelled
from fedda.errors import ConfigError
from fedda.wire import packing
from fedda.wire.packing import Kind, Packed

from . import fedavg
from .base import Client
from .shared.dictionary import AtomHeads, Dictionary
from .site import state
from .site.request import Numbers, Request


class Learner(Client):
    """What both parts do with atoms."""

    def begin(self, request: Request) -> None:
        """Prepare for a request; with atoms, keep the encoder and the features made with it."""
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
        elif "dictionary" not in held:  # the process was restarted since the encoder came
            held["dictionary"] = self.new_dictionary()

    def recall(self) -> None:
        """Load the encoder that this site keeps, if atoms came without one."""
        if "atoms" not in self.request.arrays:
            super().recall()
        if "dictionary" in self.workspace.held:
            return
        if not state.load_once(self.site, self.task, "encoder", self.model):
            raise ConfigError(
                "Atoms came without the encoder, and this site has no copy of it; the server "
                "sends it with the next request. Give --state-dir to keep a copy."
            )

    def new_dictionary(self) -> Dictionary:
        """Make the site's part of the dictionary, with the current encoder."""
        return Dictionary(self.site, self.task, self.model, self.data)

    @property
    def dictionary(self) -> Dictionary:
        return self.workspace.held["dictionary"]

    def atoms(self) -> tuple[Tensor, Tensor]:
        """Return the received z (K, n, d), and y (K, n, C) scaled to sums of exactly 1.

        Raises:
            WireError: y does not hold probabilities.
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
        """Return the labels of the site's examples (N, C); None if it has no labels."""
        return None

    def outgoing(self) -> dict[str, Packed]:
        """Return the site's version of the atoms; its coordinates stay here."""
        if self.request.hop != "learn":
            return super().outgoing()
        return {"atoms": packing.pack(self.learnt, Kind.ATOMS, self.task.wire.dtype)}


class Source(Learner, fedavg.Source):
    """FedAvg's source in stage 1; in stage 2 it fits atoms to its features and labels."""

    def known_labels(self) -> Tensor:
        return F.one_hot(self.data.y, self.task.classes).float().to(self.device)


class Target(Learner):
    """Learns atoms from features alone, and fits heads on them."""

    data: Unlabelled
    heads: AtomHeads | None = None

    def predict(self, x: Tensor) -> Tensor:
        """Predict with the head that `feddadil.predict` names; without atoms, with FedAvg's."""
        if "atoms" not in self.request.arrays:
            return super().predict(x)
        return self.others(x)[self.options.predict]

    def adapted(self) -> models.Model:
        """The encoder with the head that `feddadil.predict` names."""
        if "atoms" not in self.request.arrays or self.options.predict == "encoder":
            return self.model
        return self.dictionary.with_heads(self.fitted(), self.options.predict)

    def others(self, x: Tensor) -> dict[str, Tensor]:
        """Predict with both fitted heads, and with FedAvg's."""
        if "atoms" not in self.request.arrays:
            return {}
        features, heads = self.dictionary.encoded(x), self.fitted()
        predictors = {
            "reconstruction": heads.reconstruction(features),
            "ensemble": heads.ensemble(features),
            "encoder": self.model.head(features).softmax(dim=1),
        }
        return {name: p.cpu() for name, p in predictors.items()}

    def fitted(self) -> AtomHeads:
        """Return the heads, which are fitted once per request."""
        if self.heads is None:
            self.heads = self.dictionary.fit(*self.atoms(), self.request.round)
            if self.request.is_last:
                self.dictionary.save(self.heads)
        return self.heads

    def keepsakes(self) -> dict[str, np.ndarray]:
        """Return the target's points, the barycenter fitted to them, and the distilled set."""
        if "atoms" not in self.request.arrays:
            return {}
        return self.dictionary.keepsakes(self.fitted())
