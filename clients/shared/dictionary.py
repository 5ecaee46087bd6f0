"""A site's part of a dictionary: its points, its coordinates, and what it makes of the atoms.

All data that must not leave the site are in here. Features are extracted only once, as the encoder
does not change.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from fedda import models
from fedda.algorithms import feddadil
from fedda.data import Examples
from fedda.errors import ConfigError
from fedda.files import keep_newest
from fedda.maths import atom_heads, optimal_transport
from fedda.models import Extension, Model, evaluating
from fedda.settings import Task
from fedda.train import generator

from ..site import state
from ..site.memory import Site

logger = logging.getLogger("fedda.site")

BATCH = 256  # inputs per forward pass
STEPS: dict[str, Any] = {"sgd": optim.SGD, "adam": optim.Adam}
COORDINATES = "coordinates"  # the kind of the file in which a site keeps its alpha
NOTED = 300  # points of each kind in a site's notes
KEPT = 16  # trainings whose heads stay on disk
HEADS = ("reconstruction", "ensemble")


@dataclass(frozen=True)
class AtomHeads:
    """The heads that the target fitted on atoms; they take features as the encoder gives them."""

    W: Tensor  # (1, C, d) of -R
    b: Tensor
    W_k: Tensor  # (K, C, d) of -E
    b_k: Tensor
    alpha: Tensor  # (K,)
    atoms: tuple[Tensor, Tensor]
    barycenter: optimal_transport.Barycenter

    def reconstruction(self, x: Tensor) -> Tensor:
        """-R's probabilities -> (N, C)."""
        return atom_heads.ensemble(x, self.W, self.b, self.alpha.new_ones(1))

    def ensemble(self, x: Tensor) -> Tensor:
        """-E's probabilities, eq. 15 -> (N, C)."""
        return atom_heads.ensemble(x, self.W_k, self.b_k, self.alpha)


class Dictionary:
    """Stage 2 at one site."""

    def __init__(self, site: Site, task: Task, model: Model, data: Examples) -> None:
        self.site = site
        self.task = task
        self.model = model
        self._coordinates: dict[int, Tensor] = {}
        self._known: list[tuple[Tensor, Tensor]] = []
        self.features = self.encoded(data.x)
        self.scaling = atom_heads.scaling(self.features, task.options.scaling)
        self.points = self.scaling(self.features)  # (N, d)
        self.spread = float(self.points.var(dim=0, correction=0).sum().clamp(min=1e-12))

    def inherit(self, other: "Dictionary") -> None:
        """Take over the coordinates of the dictionary from before the encoder came again."""
        self._coordinates = dict(other._coordinates)

    @torch.no_grad()
    def encoded(self, x: Tensor) -> Tensor:
        """Features of a set of inputs; they are extracted only once per set -> (N, d)."""
        for known, features in self._known:
            if known is x:
                return features
        parts = []
        with evaluating(self.model):
            for part in x.split(BATCH):
                inputs = models.as_inputs(part, self.site.device)
                parts.append(self.model.features(inputs).float())
        self._known = [*self._known[-1:], (x, torch.cat(parts))]  # of training and test images
        return self._known[-1][1]

    @torch.no_grad()
    def learn(
        self, z: Tensor, y: Tensor, labels: Tensor | None, server_round: int
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Algorithm 2, ClientUpdate -> the site's version of z and y, and its numbers.

        A step of SGD is a step of gradient flow along the transport. A point has the mass 1 / n_b
        and moves by its gradient divided by that mass, so the rate has no unit and does not depend
        on the batch size. Gradients of labels are divided by beta, those of coordinates by the
        spread of the site's points.

        Args:
            z: (K, n, d) the atoms' points.
            y: (K, n, C) their labels.
            labels: (N, C) of the site's examples; None at the target.
            server_round: counted from 1.

        Raises:
            ConfigError: fewer points move at a time than the site wants images in a round. Points
                that move by themselves would come to lie on single examples.
        """
        o = self.task.options
        draws = generator(*self.site.chance(self.task), server_round, "dictionary")
        blocks = torch.randperm(z.shape[1], generator=draws).split(o.step_size)
        if (fewest := min(map(len, blocks))) < self.site.min_images:
            raise ConfigError(
                f"{fewest} points of an atom would move at a time, but this site wants "
                f"{self.site.min_images} or more (--min-images); raise feddadil.samples, or choose "
                "a feddadil.batch-size that divides it."
            )
        alpha = self.coordinates(server_round - 1).clone()
        own = STEPS[o.optimizer]([alpha], lr=o.lr_coordinates)
        parts = [[z[:, i].clone(), feddadil.logits_of(y[:, i])] for i in blocks]
        rate = o.lr if labels is not None else o.lr * o.target_pace
        steps = [STEPS[o.optimizer](part, lr=rate) for part in parts]
        losses, features = [], []
        for _ in range(o.epochs):
            for (z_b, v_b), step in zip(parts, steps, strict=True):
                n_b, y_b = z_b.shape[1], v_b.softmax(dim=2)
                i = self.draw(n_b, labels if o.balanced else None, draws)
                gradients, _, beta = optimal_transport.reconstruction(
                    *(z_b, y_b, alpha, self.points[i], None if labels is None else labels[i]),
                    most=o.fixed_points,
                    entropy=o.entropy,
                )
                z_b.grad = n_b * gradients.z
                if beta:
                    v_b.grad = n_b / beta * feddadil.logit_gradient(y_b, gradients.y)
                alpha.grad = gradients.alpha / self.spread
                step.step()
                own.step()
                alpha.copy_(optimal_transport.project_simplex(alpha))
                losses.append(gradients.loss)
                features.append(gradients.features)
        z, y = torch.empty_like(z), torch.empty_like(y)
        for i, (z_b, v_b) in zip(blocks, parts, strict=True):
            z[:, i], y[:, i] = z_b, v_b.softmax(dim=2)
        self._keep(server_round, alpha)
        mean = {"loss": losses, "reconstruction": features}
        return z, y, {k: sum(v) / len(v) for k, v in mean.items()} | {"steps": len(losses)}

    def draw(self, n: int, labels: Tensor | None, draws: torch.Generator) -> Tensor:
        """Draw a mini-batch of examples, by index; with labels equally many per class -> (n,).

        If there are fewer than n examples, each comes once before any comes again.
        """
        if labels is None:
            return _in_turn(len(self.points), n, draws)
        classes = [c.nonzero()[:, 0] for c in labels.T.cpu() if c.any()]
        first = int(torch.randint(len(classes), (), generator=draws))  # gets one more, if uneven
        chosen = []
        for place, members in enumerate(classes):
            share = n // len(classes) + ((place - first) % len(classes) < n % len(classes))
            chosen.append(members[_in_turn(len(members), share, draws)])
        return torch.cat(chosen)

    def coordinates(self, server_round: int) -> Tensor:
        """Return alpha after this round, or after the last one before in which the site took part.

        It comes from memory, or from the site's disk. A site that has neither draws it anew, as all
        sites do in the first dictionary round.
        """
        first = next(s.first for s in self.task.stages if s.phase.name == "dictionary")
        known = [r for r in self._coordinates if first <= r <= server_round]
        alpha = self._coordinates[max(known)] if known else None
        if alpha is None:
            saved = state.load_last(self.site, self.task, first, server_round, COORDINATES)
            alpha = saved.tensors.get("alpha") if saved else None
        K = self.task.options.atoms
        if alpha is None or alpha.shape != (K,):
            if server_round >= first:
                logger.warning("no coordinates of round %d are left; drawn anew", server_round)
            draws = generator(*self.site.chance(self.task), "coordinates")
            alpha = feddadil.first_coordinates(K, draws)
        return alpha.to(self.points)

    def _keep(self, server_round: int, alpha: Tensor) -> None:
        """Keep alpha for the next round; the one before stays, as the server may repeat a round."""
        before = max((r for r in self._coordinates if r < server_round), default=server_round)
        self._coordinates = {r: a for r, a in self._coordinates.items() if r == before} | {
            server_round: alpha
        }
        saved = state.SiteState({"alpha": alpha.detach().cpu()})
        state.save(self.site, self.task, server_round, COORDINATES, saved)

    def fit(self, z: Tensor, y: Tensor, server_round: int) -> AtomHeads:
        """Section 3.4: fit a head on B(alpha; atoms), and one on each atom."""
        o, alpha = self.task.options, self.coordinates(server_round)
        b = optimal_transport.barycenter(z, y, alpha, most=o.fixed_points, entropy=o.entropy)
        anchor = self.anchor()
        fitted = (
            atom_heads.fit_heads(b.z[None], b.y[None], o.head_decay, anchor=anchor),
            atom_heads.fit_heads(z, y, o.head_decay, anchor=anchor),
        )
        (W, bias), (W_k, b_k) = (atom_heads.unscaled(*head, self.scaling) for head in fitted)
        return AtomHeads(W, bias, W_k, b_k, alpha, (z, y), b)

    def anchor(self) -> tuple[Tensor, Tensor] | None:
        """Where heads start and decay to, for points -> W (C, d), b (C,); None: at zero."""
        if self.task.options.head_anchor == "zero":
            return None
        head = self.model.head
        assert isinstance(head, nn.Linear)
        W, b = (a.detach().to(self.points) for a in (head.weight, head.bias))
        return atom_heads.scaled(W, b, self.scaling)

    def keepsakes(self, heads: AtomHeads) -> dict[str, np.ndarray]:
        """Return the site's points, the barycenter fitted to them, and the distilled set."""
        o, b = self.task.options, heads.barycenter
        z, y = feddadil.distilled(*heads.atoms, heads.alpha, o.distil, o.fixed_points, o.entropy)
        tensors = {
            "points": self.points[:NOTED],
            "barycenter": b.z[:NOTED],
            "barycenter_labels": b.y[:NOTED].argmax(dim=1),
            "distilled": z,
            "distilled_labels": y.argmax(dim=1),
            "coordinates": heads.alpha,
        }
        return {name: a.cpu().numpy() for name, a in tensors.items()}

    def save(self, heads: AtomHeads) -> None:
        """Save the encoder with each head, as models for `fedda predict`, on the site's disk."""
        if self.site.state_dir is None:
            return
        task = self.task
        folder = self.site.state_dir / self.site.name / "models" / task.training
        for kind in HEADS:
            path, made = folder / f"{kind}.safetensors", self.with_heads(heads, kind)
            models.save(path, made, config=task.model, inputs=task.inputs, classes=task.names)
        alike = folder.parent.glob(state.TRAINING)
        others = (f for f in alike if f.is_dir() and f != folder)
        keep_newest(others, KEPT - 1, parts=[f"{kind}.safetensors" for kind in HEADS])

    def with_heads(self, heads: AtomHeads, kind: str) -> models.Model:
        """The encoder with the one fitted head, or with the `ensemble`, as a model."""
        task, W, b, alpha = self.task, heads.W, heads.b, heads.alpha.new_ones(1)
        if kind == "ensemble":
            W, b, alpha = heads.W_k, heads.b_k, heads.alpha
        mixture = Extension(feddadil.METHOD.name, {"heads": len(W)})
        made = models.blank(task.model, task.dims, task.classes, mixture)
        made.encoder.load_state_dict(self.model.encoder.state_dict())
        made.head.load_state_dict({"weight": W, "bias": b, "alpha": alpha})
        return made.attach(self.site.frozen.part(task)).eval()  # a file stands alone


def _in_turn(N: int, n: int, draws: torch.Generator) -> Tensor:
    """Take n of N numbers in random orders, one order after the other -> (n,)."""
    orders = [torch.randperm(N, generator=draws) for _ in range(max(1, -(-n // N)))]
    return torch.cat(orders)[:n]
