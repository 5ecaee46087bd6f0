"""SHOT's clients: sources that train once, and a target that adapts their models by itself.

Liang et al., ICML 2020, https://arxiv.org/abs/2002.08546.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import functional as F

from fedda import models
from fedda.algorithms import shot
from fedda.data import Unlabelled
from fedda.errors import FewImagesError, WireError
from fedda.maths import class_shares
from fedda.maths.ensemble import Mean, Weights
from fedda.models import Extension, Model, evaluating, weight_normed
from fedda.train import learning_rate, make_optimizer, round_images, seed_for
from fedda.wire.packing import Packed

from . import fedavg
from .base import Client
from .shared.side_by_side import NAMES, SHARES, Ensemble, fill, groups, parts_of
from .site.request import Numbers, Request

logger = logging.getLogger("fedda.site")

BATCH = 256  # images per forward pass


class Source(fedavg.Source):
    """Section 3.1: cross entropy with smooth labels, for all epochs in one round."""

    def train(self) -> Numbers:
        """Train as a run of so many rounds would, at the rates of its schedule."""
        # `train.lipschitz` bounds the layers of the model, and would not find a normed head's W.
        normed = self.options.head == "weight-norm" and not self.task.train.lipschitz
        with weight_normed(self.model) if normed else nullcontext():
            optimizer = self.optimizer(carried=False)
            numbers = self.minimise(self.loss_of, optimizer, self.epochs(optimizer))
            self.settle()  # before the head's two parameters become one again
        return numbers

    def loss_of(self, indices: Tensor) -> Tensor:
        """Cross entropy with smooth labels."""
        logits, y = self.model(self.inputs(indices)), self.labels(indices)
        return F.cross_entropy(logits, y, label_smoothing=self.options.smoothing)

    def epochs(self, optimizer: optim.Optimizer) -> Iterator[Tensor]:
        """The mini-batches of all epochs, each at its learning rate."""
        train = self.task.train
        passes = 1 / train.rounds_per_epoch_of(len(self.data))  # more where images are few
        count = round(self.options.epochs * max(passes, 1.0))
        begin = learning_rate(train, self.request.round, self.task.rounds)
        units = [group["lr"] / begin for group in optimizer.param_groups]
        for epoch in range(1, count + 1):
            rate = learning_rate(train, epoch, count)
            for group, unit in zip(optimizer.param_groups, units, strict=True):
                group["lr"] = unit * rate
            yield from self.split(self.sampled(self.epoch(epoch)))

    def epoch(self, number: int) -> list[Tensor]:
        """The indices of all images, in the order of that epoch."""
        return round_images(
            self.site.blocks.blocks, number, 1, seed_for(*self.site.chance(self.task))
        )


class Target(Client):
    """Sections 3.2 and 3.3: frozen heads, and encoders that learn from the target's images."""

    data: Unlabelled
    mean: Mean = "probabilities"

    @property
    def weighted(self) -> Weights:
        """How the models' weights follow from the parameters that they have."""
        return "softmax"

    def begin(self, request: Request) -> None:
        """Prepare for a request: put the models that came, or those kept here, side by side."""
        self.q: Tensor | None = None  # before what this site keeps is recalled
        super().begin(request)
        self.refused: list[str] = []
        self.alike: float | None = None
        arrays = self.usable(dict(sorted(request.arrays.items())))
        if arrays:
            self.names = [name.partition("/")[2] for name in arrays]
            plain, self.model = self.model, self.side_by_side(len(arrays))
            fill(self.model, plain, list(arrays.values()))
            self.initialise()
            if not request.is_test and self.options.estimates(self.alike):
                self.q = class_shares.estimated(models.predict(self.model, self.data.x))

    def usable(self, arrays: dict[str, Packed]) -> dict[str, Packed]:
        """Leave out models whose numbers would be about few images, or that give no numbers.

        How often two of the others give an image the same class is `alike`; None of one alone.

        Raises:
            WireError: none is left.
        """
        kept, labels, plain = {}, [], self.model
        for name, packed in arrays.items():
            models.load_arrays(plain, packed.unpack())
            try:
                p = self.checked(models.predict(plain, self.data.x))
                if not p.isfinite().all():
                    raise WireError("It gives answers that are no numbers.")
                kept[name] = packed
                labels.append(p.argmax(dim=1))
            except WireError as error:
                logger.error("the model %s is not used: %s", name, error)
                self.refused.append(name.partition("/")[2])
        if arrays and not kept:
            raise FewImagesError("None of the models that came can be used; see above.")
        if labels:
            self.alike = class_shares.alike(torch.stack(labels))
        return kept

    def recall(self) -> None:
        """Load what this site has adapted: in this round for a test, else before it.

        Raises:
            LostError: this site no longer has it.
        """
        if self.request.arrays:
            return
        last = self.request.round - (not self.request.is_test)
        saved = self.kept("models", last, last)
        self.names = saved.about[NAMES]
        shares = saved.about.get(SHARES)
        self.q = None if shares is None else torch.tensor(shares)
        self.model = self.side_by_side(len(self.names))
        self.model.load_state_dict(saved.get("module"))

    def side_by_side(self, count: int, name: str = "models") -> Model:
        """So many models side by side, which stay by that name; their weights are loaded later."""
        settings = {"models": count, "mean": self.mean, "weights": self.weighted}
        added = Extension(self.task.method, settings)
        return self.workspace.hold(f"{name}-{count}", lambda: self.workspace.blank(added))

    def initialise(self) -> None:
        """Set the weights of models that have just come: all the same."""
        _, heads = parts_of(self.model)
        heads.a.data.fill_(1.0)

    def adapt(self) -> Numbers:
        """Minimise the objective over the encoders' parameters, for the images of one round.

        It is a training of its own: the schedule of the rates begins with the target's first round.
        """
        train, stage = self.task.train, self.request.stage
        t, rounds = 1 + stage.rounds_before(self.request.round), stage.last - stage.first + 1
        rate = learning_rate(train, t, rounds) * self.options.target_pace
        trained = groups(self.model, self.workspace.model, rate)
        trained += self.beside(max(group["lr"] for group in trained))
        optimizer = self.paced(make_optimizer(trained, train, rate))
        self.register_state(
            "models", Ensemble(self.model, self.names, self.q, optimizer), strict=True
        )
        total, steps = 0.0, 0
        for share in self.shares():
            for i, indices in enumerate(self.split([share])):
                if self.is_due(i):
                    self.relabel()
                losses = self.losses(indices)
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
                total, steps = total + losses.detach().mean(), steps + 1
        self.settle()  # before the models are saved
        self.save_adapted()
        loss = float(total) / max(steps, 1)
        told: Numbers = {f"refused/{name}": 1 for name in self.refused}
        loss = self.privatise(shot.LOSS, loss, len(self.data))
        return {"loss": loss, "steps": steps} | told

    def beside(self, rate: float) -> list[dict[str, Any]]:
        """Parameter groups besides the encoders', at the rate of new layers: none."""
        return []

    def is_due(self, step: int) -> bool:
        """Whether pseudo-labels are made anew before this step of an epoch, counted from 0."""
        options = self.options
        return options.beta and (step == 0 or (options.relabel and step % options.relabel == 0))

    @torch.no_grad()
    def relabel(self) -> None:
        """Make pseudo-labels of all images with each model as it is now."""
        parts = [shot.pseudo_labels(v, p) for v, p in self.answers()]
        self.labels = torch.stack([label for label, _ in parts])  # (K, N)

    @torch.no_grad()
    def answers(self) -> list[tuple[Tensor, Tensor]]:
        """Each model's points and predictions of all images, in evaluation mode.

        What a teacher of the site's own says is a prior of the predictions.
        """
        _, heads = parts_of(self.model)
        every = torch.arange(len(self.data)).split(BATCH)
        with evaluating(self.model):
            z = torch.cat([self.features(indices).float() for indices in every])
        p = heads.each(z).softmax(dim=2)
        if (taught := self.site.taught(self.task)) is not None:
            p = shot.with_prior(p, taught.to(p))
        form = self.options.centroids
        return [(shot.points(z_k, form), p_k) for z_k, p_k in zip(heads.apart(z), p, strict=True)]

    def losses(self, indices: Tensor) -> Tensor:
        """The objectives of a mini-batch, one for each model or for all together -> (K,)."""
        return self.objectives(parts_of(self.model)[1].each(self.features(indices)), indices)

    def objectives(self, logits: Tensor, indices: Tensor) -> Tensor:
        """One objective per model; by their sum each adapts as if it were alone -> (K,)."""
        beta = self.options.beta
        none = [None] * len(logits)
        label = self.labels[:, indices.to(self.labels.device)] if beta else none
        parts = zip(logits, label, strict=True)
        return torch.stack([shot.target_loss(own, y, beta, self.q) for own, y in parts])

    def outgoing(self) -> dict[str, Packed]:
        """Return nothing: the adapted models stay here."""
        return {}
