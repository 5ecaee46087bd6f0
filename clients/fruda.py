"""FRUDA's clients: sources that pretrain, candidates and a target that measure, and DILS's pair.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, section 3.3 and appendix D.1.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedda import models, refining
from fedda.adversarial import critic_estimate
from fedda.adversarial.discriminators import HALVES, Loss, discriminator_loss, flat_gradient
from fedda.algorithms.fruda import ERROR, MOVED, soft_maximum
from fedda.data import Labelled
from fedda.errors import FewImagesError, RefineError, WireError
from fedda.exchange import Stream
from fedda.maths import ocs
from fedda.maths.validators import infomax
from fedda.models import evaluating
from fedda.train import seed_for
from fedda.wire import INFOMAX
from fedda.wire.packing import Packed

from . import dils, fedavg
from .shared.shared_discriminator import Copy
from .site.request import Numbers

SUMS = 5  # the last ones; further back the way to the end is longer than the rule is exact
logger = logging.getLogger("fedda.site")

BATCH = 256  # images per forward pass


class Overheard:
    """Hears what a critic's other side tells of its mean by the gradients that it adds to the sums.

    Args:
        copy: this site's copy of the critic, before its first sum.
    """

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._travelling: deque[Tensor] = deque()  # weights whose gradients have no sum yet
        self._heard: deque[tuple[Tensor, Tensor]] = deque(maxlen=SUMS)
        copy.sync.heard = self._hear

    def sends(self) -> None:
        """Note where the critic is, just before this site's gradient is sent."""
        self._travelling.append(self._weights())

    def mean(self, v: Tensor) -> tuple[float, float]:
        """The other side's mean and how far off it may be, when all sums have come.

        Args:
            v: (N,) the critic's values on this site's images.
        """
        w, g = zip(*self._heard, strict=True)
        *_, W, b = self._copy.DI.parameters()
        last = W.numel() + b.numel()
        path = torch.stack([*w, self._weights()])
        g_other = -torch.stack(g)  # a source's half is minus it
        return critic_estimate.told(path, g_other, last, v.cpu())

    def _hear(self, g: Tensor) -> None:
        self._heard.append((self._travelling.popleft(), g.double()))

    def _weights(self) -> Tensor:
        flat = [p.detach().reshape(-1) for p in self._copy.DI.parameters()]
        return torch.cat(flat).to("cpu", torch.float64, copy=True)


Source = fedavg.Source


class Measuring(dils.Pair):
    """What candidates and the target do: train a critic each, on features that do not change."""

    def measured(self, z: Mapping[str, Tensor]) -> tuple[dict[str, tuple[float, float]], Numbers]:
        """Train the critics of eqs. 17 and 18 -> by candidate, the means over two halves.

        The numbers beside them are the share of sums in which exchange.clip shortened a gradient.
        Both sides' gradients nearly cancel each other, so a distance may then come out too short.

        All critics move at the same time, so the number of candidates costs no further round trips.
        Each sum is fresh, over the images of one window.

        Args:
            z: this site's features (N, d) by each candidate's model.

        Raises:
            WireError: the invitation is for critics of other candidates.
        """
        options, half = self.options.measure, HALVES[self.loss, self.side]
        draws = {name: self.generator(f"penalty/{name}") for name in z}
        with self.stream() as stream:
            groups = {group.name for group in self.exchange.groups}
            if groups != {f"critic/{name}" for name in z}:
                raise WireError("The request has models of other candidates than its critics are.")
            copies = {name: self.critic(stream, name) for name in z}
            listening = self.listening(copies)
            for indices in self.whole_windows(options.steps):
                for name, copy in copies.items():
                    seen = z[name][indices]
                    L_DI = discriminator_loss(half, copy.DI, seen, options.penalty, draws[name])
                    if name in listening:
                        listening[name].sends()
                    copy.sync.put(flat_gradient(L_DI, copy.DI), seen)
                for copy in copies.values():
                    copy.move()
            for copy in copies.values():
                copy.sync.settle()
        numbers = self.clipped(copies.values())
        for name, other in listening.items():
            mean, slack = other.mean(self.values(copies[name], z[name]))
            numbers |= {f"mean/{name}": mean, f"mean-slack/{name}": slack}
        return {name: self.means(copy, z[name]) for name, copy in copies.items()}, numbers

    @property
    def loss(self) -> Loss:
        """The critics' loss: Wasserstein, or that of a discriminator to count the errors of."""
        pad = self.options.select == "pad" and self.request.hop == "select"
        return "adda" if pad else "wassda"

    def critic(self, stream: Stream, name: str) -> Copy:
        """Make this site's copy of a candidate's critic."""
        options, seed = self.options.measure, seed_for(self.task.seed, f"critic/{name}")
        sync = self.lazy(stream, f"critic/{name}", p=1)
        copy = Copy.make(self.model.head.in_features, options, seed, sync, self.device)
        copy.bounded = options.spectral and self.loss == "wassda"
        return copy

    def whole_windows(self, count: int) -> Iterator[Tensor]:
        """The images of so many windows, each of them as one batch."""
        p = self.exchange.lazy.p
        batches = self.windows(0, count * p)
        for _ in range(count):
            yield torch.cat([next(batches) for _ in range(p)])

    def listening(self, copies: Mapping[str, Copy]) -> dict[str, Overheard]:
        """What listens to each critic's other side: at a candidate nothing."""
        return {}

    def means(self, copy: Copy, z: Tensor) -> tuple[float, float]:
        """The means of a critic over two halves of this site's images -> two floats.

        Of a discriminator they are the shares of images that it takes for the other side's.
        """
        v = self.values(copy, z)
        if self.loss != "wassda":
            v = ((v > 0) != (self.side == "source")).float()
        return ocs.halves(v, self.generator("halves"))

    @torch.no_grad()
    def values(self, copy: Copy, z: Tensor) -> Tensor:
        """A critic's values on this site's images -> (N,)."""
        return copy.DI(z)

    @torch.no_grad()
    def all_features(self) -> Tensor:
        """The features of all images by the model that is loaded, in evaluation mode -> (N, d).

        Raises:
            WireError: a few images alone have most of the features' variance, or one has a feature
                that is no number.
        """
        with evaluating(self.model):
            every = torch.arange(len(self.data)).split(BATCH)
            x = (models.as_inputs(self.data.x[part], self.device) for part in every)
            z = self.spread(torch.cat([self.model.features(images) for images in x]))
        if not z.isfinite().all():
            raise WireError("A model gives features that are no numbers.")
        return z


class Collaborator(Measuring):
    """A candidate, and once it is chosen DILS's collaborator: a source or an adapted target."""

    def select(self) -> Numbers:
        """Train the critic with the target; with labels, tell the own model's error, too."""
        error: Numbers = {}
        if isinstance(self.data, Labelled):
            p = self.checked(models.predict(self.model, self.data.x))
            error = {"error": self.privatise(ERROR, ocs.l1_error(p, self.data.y), len(p))}
        return self.measure() | error

    def measure(self) -> Numbers:
        """Train the critic with the target -> its means over two halves of the own images."""
        means, numbers = self.measured({self.site.name: self.all_features()})
        first, second = means[self.site.name]
        return {"first": first, "second": second} | numbers

    def outgoing(self) -> dict[str, Packed]:
        """Return nothing: only gradients and numbers leave."""
        return {}


class Target(Measuring, dils.Target):
    """Measures every candidate by the candidate's own model, and adapts from the chosen one's."""

    def against(self, losses: Sequence[Tensor]) -> Tensor:
        """Make one loss of those against each candidate; of one candidate it is that one's."""
        if len(losses) == 1:
            return losses[0]
        return soft_maximum(torch.stack(list(losses)), self.options.gamma)

    def recall(self) -> None:
        """Load the model as in DILS; where candidates are measured, their models come instead."""
        if self.request.hop != "select":
            super().recall()

    def select(self) -> Numbers:
        """Train a critic with each candidate -> the means, and the constants of the classifiers."""
        z: dict[str, Tensor] = {}
        thetas: Numbers = {}
        refused: Numbers = {}
        for name, packed in self.request.arrays.items():
            candidate = name.removeprefix("model/")
            models.load_arrays(self.model, packed.unpack())
            try:
                z[candidate] = self.all_features()
                thetas[f"theta/{candidate}"] = self.theta()
            except WireError as error:
                logger.error("the model of %s is not used: %s", candidate, error)
                # The others' critics wait for this one's sums; they tell nothing of any image.
                z[candidate] = torch.zeros(len(self.data), self.model.head.in_features)
                refused[f"refused/{candidate}"] = 1
        if len(refused) == len(z):
            raise FewImagesError("None of the candidates' models can be used; see above.")
        return self.numbers({n: each.to(self.device) for n, each in z.items()}) | thetas | refused

    def measure(self) -> Numbers:
        """Decide which model to keep, and train the critic with the collaborator once more.

        The model that came is the collaborator's, from which this target has adapted.
        """
        (group,) = self.exchange.groups
        collaborator = group.name.removeprefix("critic/")
        came = {n: w.clone() for n, w in self.model.state_dict().items()}
        p = self.predictions()
        before = self.quality(p)
        self.load_adapted(self.request.round)
        after = self.quality(self.predictions())
        worse = self.options.keep == "better" and after < before
        if worse:
            self.model.load_state_dict(came)
        if worse | self.refined():
            self.save_adapted()
        numbers = self.numbers({collaborator: self.all_features()})
        numbers |= {"infomax-before": before, "infomax-after": after, "kept": int(worse)}
        moved = ocs.apart(self.predictions(), p)
        numbers |= {"moved": self.privatise(MOVED, moved, len(p))}
        return numbers | {f"theta/{collaborator}": self.theta()}

    def refined(self) -> bool:
        """Let the model's classifier learn what the last step makes of its answers -> whether."""
        task = self.task
        if not self.options.refine:
            return False
        strength = "careful" if task.refine == "none" else task.refine
        try:
            found = refining.refined_model(
                None, self.model, self.data.x, task.model, task.dims, strength, task.shares
            )
            head = refining.distilled(found, self.data.x).head
        except RefineError as error:
            logger.warning("no last step before others adapt from here: %s", error)
            return False
        self.model.head.load_state_dict(head.state_dict())
        return True

    def listening(self, copies: Mapping[str, Copy]) -> dict[str, Overheard]:
        """What listens to each candidate, as the server believes none whose gradients say else.

        A penalty adds to the gradients what nobody can take away again, and a discriminator's are
        not those of its shares.
        """
        measure = self.options.measure
        able = (
            self.loss == "wassda" and not measure.penalty and measure.steps >= critic_estimate.LEAST
        )
        return {name: Overheard(copy) for name, copy in copies.items()} if able else {}

    def numbers(self, z: Mapping[str, Tensor]) -> Numbers:
        """Train the critics -> their means, by candidate."""
        means, numbers = self.measured(z)
        numbers |= {f"first/{name}": first for name, (first, _) in means.items()}
        return numbers | {f"second/{name}": second for name, (_, second) in means.items()}

    def theta(self) -> float:
        """The Lipschitz constant of the loaded model's classifier."""
        return ocs.theta_of(self.model.head.weight.detach())

    def predictions(self) -> Tensor:
        """The loaded model's predictions for the training images -> (N, C)."""
        return self.checked(models.predict(self.model, self.data.x))

    def quality(self, p: Tensor) -> float:
        """Infomax of predictions (N, C), as it may leave."""
        return self.privatise(INFOMAX, infomax(p), len(p))

    def outgoing(self) -> dict[str, Packed]:
        """Return the model after the last round: later targets may adapt from it."""
        return {"model": self.packed_model()} if self.request.hop == "measure" else {}
