"""Co-MDA's clients: SHOT's sources, and a target that only asks their models, and trains its own.

Liu et al., IEEE TCSVT 2023, https://doi.org/10.1109/TCSVT.2023.3277135.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedda import models
from fedda.clients import shot as clients
from fedda.clients.shared.side_by_side import NAMES, fill, parts_of
from fedda.clients.site.request import Numbers, Request
from fedda.clients.site.state import SiteState
from fedda.contrib.methods.decision.algorithm import WEIGHT
from fedda.maths import mixup
from fedda.models import Model
from fedda.wire.packing import Arrays, Kind, Packed, pack

from . import algorithm as comda

ASKED = "asked"  # key under which a state has how often the oracles were asked
NETWORKS = ["first", "second"]

Source = clients.Source


class Oracles:
    """The sources' models side by side, which are asked, and the running sum of their answers.

    Args:
        make: makes so many models side by side; their weights are loaded later.
    """

    model: Model

    def __init__(self, make: Callable[[int], Model]) -> None:
        self._make = make
        self.names: list[str] = []
        self.asked = 0
        self.Z: Tensor | None = None

    def load(self, names: list[str], state: dict[str, Tensor]) -> None:
        """Take over the models of these sources."""
        self.names, self.model = list(names), self._make(len(names))
        self.model.load_state_dict(state)

    def state_dict(self) -> SiteState:
        """Return the models, the sum and how often they were asked."""
        kept = SiteState(about={NAMES: self.names, ASKED: self.asked})
        kept.put("module", self.model.state_dict())
        kept.put("sum", {} if self.Z is None else {"Z": self.Z})
        return kept

    def load_state_dict(self, kept: SiteState, device: torch.device) -> None:
        """Continue from a state that `state_dict` returned."""
        self.load(kept.about[NAMES], kept.get("module"))
        self.asked, self.Z = kept.about[ASKED], kept.get("sum").get("Z")

    def agree(self, p: Tensor, carried: comda.Carried) -> Tensor:
        """Add what they say, and the consensus that follows -> (N, C)."""
        self.asked += 1
        before = torch.zeros_like(p) if self.Z is None else self.Z
        self.Z, consensus = comda.agreed(before, p, self.asked, carried)
        return consensus


class Target(clients.Target):
    """Two networks that learn the consensus from the images that the other finds easy."""

    def begin(self, request: Request) -> None:
        """Prepare for a request; models that came to be asked make place for the two networks."""
        super().begin(request)
        if request.is_test:
            return
        self.oracles = Oracles(lambda count: self.side_by_side(count, "oracles"))
        if request.arrays:
            self.oracles.load(self.names, self.model.state_dict())
            self.model, self.names = self.side_by_side(len(NETWORKS)), NETWORKS
            fill(self.model, self.workspace.model, [self.first(), self.second()])
            self.initialise()
        self.register_state("oracles", self.oracles, strict=True)

    def usable(self, arrays: dict[str, Packed]) -> dict[str, Packed]:
        """Leave out the model from which networks begin, and what SHOT leaves out."""
        asked = {name: packed for name, packed in arrays.items() if name != "model"}
        return super().usable(asked or arrays)

    def first(self) -> Packed:
        """The model from which the first network begins: the run's first."""
        return self.request.arrays["model"]

    def second(self) -> Packed:
        """The same for the second, with other draws in all that is not pretrained."""
        about, seed = self.task, self.generator("second").initial_seed()
        made = models.blank(about.model, about.dims, about.classes, seed=seed)
        return pack(redrawn(self.first().unpack(), made), Kind.MODEL)

    def beside(self, rate: float) -> list[dict[str, Any]]:
        """The heads' parameters, at the rate of new layers; none if they stay as drawn."""
        _, heads = parts_of(self.model)
        if self.options.heads == "drawn":
            return []
        learnt = [heads.weight.requires_grad_(), heads.bias.requires_grad_()]
        return [{"params": learnt, "lr": rate}]

    def adapt(self) -> Numbers:
        """Train both networks, and tell the weights of the sources' models."""
        stage, self.draws = self.request.stage, self.generator("mixup")
        self.beta = np.random.default_rng(self.draws.initial_seed())
        done = stage.rounds_before(self.request.round) / max(stage.last - stage.first, 1)
        self.share = comda.kept_share(done, self.options.forget)
        numbers = super().adapt()
        w = self.w[: len(self.oracles.names)]  # a teacher of the site's own comes after them
        told = zip(self.oracles.names, (w / w.sum()).tolist(), strict=True)
        N = len(self.data)
        return numbers | {f"weight/{n}": self.privatise(WEIGHT, v, N) for n, v in told if n}

    def is_due(self, step: int) -> bool:
        """The sources' models are asked once per epoch."""
        return step == 0

    def relabel(self) -> None:
        """Ask the sources' models, weigh their answers, and bring the consensus up to date."""
        p = self.ask()
        if (taught := self.site.taught(self.task)) is not None:
            p = torch.cat([p, taught.to(p)[None]])
        self.w = comda.source_weights(p)
        mean = torch.einsum("k,knc->nc", self.w.to(p), p)
        self.consensus = self.oracles.agree(mean, self.options.carried)

    def ask(self) -> Tensor:
        """What each source's model says of all images, augmented as in training -> (K, N, C)."""
        model = self.oracles.model.train(self.options.answers == "training")
        # In random order, as a mini-batch of one class would have odd statistics.
        order = torch.randperm(len(self.data), generator=self.generator("ask"))
        p = []
        for indices in self.split([order]):
            x = self.inputs(indices)
            with torch.no_grad():
                z = model.features(x).float()
                p.append(parts_of(model)[1].each(z).softmax(dim=2).cpu())
        return torch.cat(p, dim=1)[:, order.argsort()]

    def losses(self, indices: Tensor) -> Tensor:
        """Mix the images and their labels, and let each network choose for the other -> (2,)."""
        x, p = self.inputs(indices), self.consensus[indices].to(self.device)
        if alpha := self.options.mixup:
            lam = float(self.beta.beta(alpha, alpha))
            perm = torch.randperm(len(x), generator=self.draws).to(self.device)
            x, p, _ = mixup.mixup(x, p, torch.ones(len(x)).to(x), max(lam, 1 - lam), perm)
        logits = parts_of(self.model)[1].each(self.model.features(x))
        count = comda.kept(len(x), self.share, self.site.least_batch)
        return comda.co_teaching_loss(logits, p, count)


def redrawn(begun: Arrays, drawn: Model) -> Arrays:
    """A model's arrays, with those of `drawn` in all layers that are not pretrained."""
    own = models.to_arrays(drawn)
    kept = {name for name in begun if drawn.pretrained and name not in drawn.fresh}
    return {name: begun[name] if name in kept else own[name] for name in begun}
