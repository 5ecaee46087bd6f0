"""FADA's clients: f-DANN's with pairs, a target that weighs sources, networks that stay.

Peng et al., ICLR 2020, https://arxiv.org/abs/1911.02054, algorithm 1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedda import models
from fedda.adversarial.discriminators import mapping_loss
from fedda.algorithms import fada
from fedda.data import Labelled, Unlabelled
from fedda.exchange import Stream
from fedda.maths import gap
from fedda.models import Extension, Model, evaluating
from fedda.train import seed_for
from fedda.wire import Number
from fedda.wire.packing import Packed

from . import fdann
from .base import Client
from .fdann import StepNumbers
from .shared.disentangling import INVARIANT, Disentangling, features_width, make_branch, predicted
from .site.request import Numbers, Request

GAIN = Number("gain", 0.001, low=-10.0)  # relative to the gap statistic before


class Gains:
    """How much tighter a target's features cluster under other models than under one, eq. 3.

    Call both functions under `torch.no_grad`. A server may choose the models, so a gain leaves in
    steps of a thousandth.

    Args:
        client: the target's client; its model is the one that others are compared with.
        images: indices of the images that are compared.
        unit: what a gain is measured in, see `gap.Unit`.
    """

    def __init__(self, client: Client, images: Tensor, unit: gap.Unit) -> None:
        self.client, self.images, self.unit = client, images, unit
        self.before, self.scatter = gap_of(client, client.model, images)

    def of(self, model: Model) -> float:
        """The gain of a model, as it leaves this site.

        Raises:
            WireError: a few images alone have most of the features' variance.
        """
        after, around = gap_of(self.client, model, self.images)
        if self.unit == "share":
            gain = gap.share(self.before, self.scatter) - gap.share(after, around)
        else:
            gain = (self.before - after) / (self.before or 1.0)
        told = self.client.privatise(GAIN, gain, len(self.images))
        whole = float(f"{self.before:.2e}")  # what exact gains are multiples of, as it may leave
        return told * whole if self.unit == "sum" else told


def gap_of(client: Client, model: Model, images: Tensor) -> tuple[float, float]:
    """Gap statistic and scatter of images' features under a model -> I, T; the seed is fixed.

    Call it under `torch.no_grad`: the images are not augmented then.

    Raises:
        WireError: a few images alone have most of the features' variance.
    """
    task = client.task
    with evaluating(model):
        z = torch.cat([model.features(client.inputs(part)) for part in images.split(256)])
    z = client.spread(z)
    seed = seed_for(*client.site.chance(task), client.request.round, "clusters") % 2**32
    statistic = gap.gap_statistic(z, gap.clusters(z, task.classes, seed))
    return float(statistic), float(gap.scatter(z))


class Member(fdann.Member):
    """What both parts do in models II and III."""

    def prepare(self) -> None:
        """Load the networks of model III."""
        self.apart = Disentangling(self) if self.options.disentangles else None

    def train_step(
        self, indices: Tensor, optimizer: torch.optim.Optimizer, q: float
    ) -> StepNumbers:
        """Lines 3 to 13: one step of all networks; DI moves by the sum of both sides' gradients.

        A site that the server does not invite to sum gradients leaves out line 6.
        """
        apart = self.apart
        if apart is None:
            z = f_di = f_ds = self.features(indices)
        else:
            z, f_di, f_ds = apart.split(lambda: self.features(indices))
        loss, numbers = z.new_zeros(()), {}
        if self.copies:
            pull, numbers = self.step(f_di)  # eqs. 4 and 5
            loss = self.options.weights.alignment_at(q) * pull
        if (labelled := self.classified(f_di, f_ds, indices)) is not None:  # line 4 and eq. 6
            numbers["loss"] = labelled[0].detach()
            loss = loss + sum(labelled)
        optimizer.zero_grad()
        if apart is not None:
            apart.zero_grad()
        loss.backward()
        optimizer.step()
        if apart is not None:
            apart.follow()
            numbers |= apart.step(z)  # eqs. 7 and 8
        return numbers

    def classified(self, f_di: Tensor, f_ds: Tensor, indices: Tensor) -> list[Tensor] | None:
        """Cross entropies of C and CI on the site's labels; None if it has no labels."""
        return None

    def join(self, stream: Stream) -> None:
        """Take eqs. 4 and 5 for the halves of the losses, and load the domain identifiers."""
        super().join(stream)
        self.half = fada.HALVES[self.side]

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities; in model III with the disentangler that this site keeps."""
        return (
            predicted(self.model, self.kept_branch, x) if self.options.keeps else super().predict(x)
        )

    @property
    def kept_branch(self) -> nn.Module:
        """The branch of f_di as this site last trained it; the target trains in every round.

        Raises:
            LostError: its state is missing.
        """
        last = self.request.round
        first = last if self.request.part == "target" else self.request.stage.first
        D = make_branch(features_width(self), self.options.layers).to(self.device)
        D.load_state_dict(self.kept(INVARIANT, first, last).get("module"))
        return D

    def against(self, z: Tensor) -> Tensor:
        """Eq. 5: this side's half against every DI_i, averaged -> scalar."""
        fixed = z.detach().requires_grad_()  # each DI moves before the features' step is taken
        losses = {n: mapping_loss(self.half, c.DI, fixed) for n, c in self.copies.items()}
        (g,) = torch.autograd.grad(self.combined(losses), fixed)
        return (z * g).sum()


class Source(Member, fdann.Source):
    """Has labels; in model I it trains on them alone."""

    data: Labelled

    def classified(self, f_di: Tensor, f_ds: Tensor, indices: Tensor) -> list[Tensor]:
        """Line 4 or eq. 6: C on f_di, and in model III CI on f_ds."""
        y, head = self.labels(indices), self.model.head
        logits = head.classified(f_di) if self.options.keeps else head(f_di)  # type: ignore[operator]
        losses = [F.cross_entropy(logits, y)]
        return losses if self.apart is None else [*losses, self.apart.classify(f_ds, y)]


class Target(Member, fdann.Target):
    """Learns without labels, weighs the sources, and keeps the whole model in model III."""

    data: Unlabelled

    @torch.no_grad()
    def attend(self) -> Numbers:
        """Line 15, eq. 3: how much tighter its clusters are with each source's update.

        The server chooses the candidates, so a gain leaves as coarse as the numbers of a test.
        """
        gains = Gains(self, self.compared(), self.options.gain)
        other = self.workspace.hold("candidate", self.workspace.blank)
        numbers: Numbers = {"steps": 0}
        for name, packed in self.request.arrays.items():
            if name.startswith("candidate/"):
                models.load_arrays(other, packed.unpack())
                numbers[name.replace("candidate", "gain", 1)] = gains.of(other)
        return numbers

    def compared(self) -> Tensor:
        """The images on which models are compared: the round's, or fixed blocks if those are many.

        A pass over all images for each source, at one site alone, would be half of a round.
        """
        every, most = torch.cat(self.shares()).unique(), self.options.gain_images
        if not 0 < most < len(every):
            return every
        blocks, counted = self.site.blocks.blocks, 0
        for count, block in enumerate(blocks, start=1):
            counted += len(block)
            if counted >= most:
                return torch.cat(blocks[:count])
        return every

    def outgoing(self) -> dict[str, Packed]:
        """Return model and domain identifiers; nothing if only the gains were asked for."""
        return super().outgoing() if self.request.hop == "align" else {}

    def test(self, request: Request) -> Numbers:
        """Test, and in model III write the whole model to this site's own disk."""
        numbers = super().test(request)
        if self.options.keeps:
            self.save_adapted()
        return numbers

    def adapted(self) -> models.Model:
        """The model, in model III with the disentangler that this site keeps."""
        if not self.options.keeps:
            return self.model
        task, settings = self.task, self.options.layers.model_dump()
        whole = models.blank(
            task.model, task.dims, task.classes, Extension("fada", settings | {"whole": True})
        )
        whole.load_state_dict(dict(self._whole_state()))
        return whole.attach(self.model.backbone).eval()

    def _whole_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict().items():
            before, _, rest = name.partition(".")
            yield (f"encoder.features.{rest}" if before == "encoder" else name), tensor
        for name, tensor in self.kept_branch.state_dict().items():
            yield f"encoder.disentangler.{name}", tensor
