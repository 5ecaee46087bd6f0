"""FACT's clients: sources that train and refit their heads, a target that moves the encoder.

Schrod et al., https://arxiv.org/abs/2306.00607.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedda import models
from fedda.clients import fedavg
from fedda.clients.base import Client
from fedda.clients.site import state
from fedda.clients.site.request import Numbers, Request
from fedda.clients.site.workspace import Network
from fedda.data import Unlabelled
from fedda.models import Extension, Model
from fedda.wire.packing import Packed

from . import algorithm as fact

ANSWER = "answer"  # name of the model with two heads that a target keeps


class Source(fedavg.Source):
    """Cross entropy on the site's own images: by the whole model, then by the head alone."""

    def train(self) -> Numbers:
        """Train the whole model."""
        return self.minimise(self.loss_of)

    def refit(self) -> Numbers:
        """Fit the head to the features that the two sources' mean encoder gives.

        With `train.carry-momentum` the head goes on with the momentum of its training.
        """
        return self.minimise(self.loss_of, self.optimizer(again=True))

    def loss_of(self, indices: Tensor) -> Tensor:
        """The cross entropy of a mini-batch's images; while the head is refitted, by it alone."""
        x = self.inputs(indices)
        with torch.no_grad() if self.request.hop == "refit" else nullcontext():
            z = self.model.features(x)
        logits = fact.answers(self.model.head(z), self.options.softmax)
        return F.cross_entropy(logits, self.labels(indices))

    def outgoing(self) -> dict[str, Packed]:
        """Return the model, or the head alone after it was refitted."""
        if self.request.hop != "refit":
            return super().outgoing()
        self.settle()
        head = {
            f"head.{n}": t.detach().cpu().numpy() for n, t in self.model.head.state_dict().items()
        }
        return {"head": self.packed(head)}


class Target(Client):
    """Changes the encoder until the two heads agree about its images."""

    data: Unlabelled

    def cross(self) -> Numbers:
        """Minimise the discrepancy by the encoder's parameters, for the images of one round."""
        kept = None if self.options.answer == "mean" else Answer(self.both())
        if kept is not None:
            self.register_state(ANSWER, kept)
        # The model's own head gets no gradient, so its optimizer moves the encoder alone.
        C1, C2 = (copy.deepcopy(self.model.head).requires_grad_(False) for _ in range(2))
        came = self.request.arrays["head"].unpack()
        C2.load_state_dict({n.removeprefix("head."): torch.tensor(a) for n, a in came.items()})

        def loss(indices: Tensor) -> Tensor:
            z = self.features(indices)
            return fact.discrepancy(C1(z), C2(z), self.options.softmax)

        numbers = self.minimise(loss)
        if kept is not None:
            self.settle()  # before the encoder is copied
            kept.consider(self.model.encoder, (C1, C2), numbers["loss"], self.options.answer)
        return numbers

    def both(self) -> Model:
        """A model with two heads, whose weights are loaded later."""
        added = Extension(self.task.method, {})
        return self.workspace.hold(ANSWER, lambda: self.workspace.blank(added))

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities by what `fact.answer` names -> (N, C), on the CPU."""
        return models.predict(self.adapted(), x)

    def adapted(self) -> Model:
        """The model that answers: the one that came, or the one with two heads that stays here.

        Raises:
            LostError: its state is missing.
        """
        if self.options.answer == "mean":
            return self.model
        kept = self.kept(ANSWER, self.request.stage.first, self.request.round)
        whole = self.both()
        whole.load_state_dict(kept.get("module"))
        return whole

    def test(self, request: Request) -> Numbers:
        """Test, and write a model with two heads to this site's own disk."""
        numbers = super().test(request)
        if self.options.answer != "mean":
            self.save_adapted()
        return numbers


class Answer(Network):
    """The model with two heads that a target keeps, and how far its heads differed."""

    discrepancy = math.inf

    def consider(
        self, encoder: nn.Module, heads: Sequence[nn.Module], discrepancy: float, answer: str
    ) -> None:
        """Take over an encoder and two heads; with `least` only if they differ no more."""
        if answer == "least" and discrepancy > self.discrepancy:
            return
        self.discrepancy = discrepancy
        state = {f"encoder.{n}": t for n, t in encoder.state_dict().items()}
        for part in ("weight", "bias"):
            state[f"head.{part}"] = torch.stack([head.get_parameter(part) for head in heads])
        state["head.alpha"] = self.module.get_buffer("head.alpha")
        self.module.load_state_dict(state)

    def state_dict(self) -> state.SiteState:
        """Return weights and the discrepancy."""
        kept = super().state_dict()
        kept.about["discrepancy"] = self.discrepancy
        return kept

    def load_state_dict(self, kept: state.SiteState, device: torch.device) -> None:
        """Continue from that state."""
        super().load_state_dict(kept, device)
        self.discrepancy = float(kept.about["discrepancy"])
