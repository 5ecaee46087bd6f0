"""f-DANN, f-WDGRL and f-DAN on one machine with all sites' data: no messages, no exchange."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor | None]
# From a discriminator, a site's samples and the site's name, the penalty.
Penalty = Callable[[nn.Module, Tensor, str], Tensor]


def half(loss: str, v: Tensor, source: bool) -> Tensor:
    """One side's part of the discriminator's loss."""
    if loss == "wassda":
        return -v.mean() if source else v.mean()
    p = torch.sigmoid(v)
    return -(p if source else 1 - p).log().mean()


def deceiving(loss: str, v: Tensor, source: bool) -> Tensor:
    """What one side's encoder minimises: its half on the other side's label, or minus its half."""
    return half("grl", v, not source) if loss == "inverted" else -half(loss, v, source)


def shorten(DI: nn.Module) -> None:
    """Divide each weight matrix by its largest singular value, if that is above 1."""
    for layer in DI.modules():
        if isinstance(layer, nn.Linear):
            longest = torch.linalg.svdvals(layer.weight.detach())[0]
            layer.weight.data /= max(1.0, float(longest))


def averaged(local: Mapping[str, nn.Module], counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Average encoders over all sites and heads over the sources, weighted by their examples."""
    mean: dict[str, Tensor] = {}
    for name, like in local["town"].state_dict().items():
        sites = [s for s in local if s != "town" or not name.startswith("head.")]
        total = sum(counts[s] for s in sites)
        parts = [local[s].state_dict()[name].double() * counts[s] / total for s in sites]
        mean[name] = torch.stack(parts).sum(dim=0).to(like.dtype)
    return mean


class Window:
    """Stores all gradients of a whole loss and looks up the latest full window: FRUDA, eq. 27."""

    def __init__(self, p: int) -> None:
        self.p, self.seen, self.before = p, [], None

    def add(self, g: Tensor) -> Tensor | None:
        """Add a step's gradient -> the mean of the latest full window."""
        self.seen.append(g)
        last = len(self.seen) // self.p * self.p
        if not last:
            return self.before
        return torch.stack(self.seen[last - self.p : last]).sum(dim=0) / self.p

    def new_round(self) -> None:
        """Begin a round with the last window of the round before."""
        assert len(self.seen) % self.p == 0
        if self.seen:
            self.before = torch.stack(self.seen[-self.p :]).sum(dim=0) / self.p
        self.seen = []


def adversarial(
    loss: str,
    model: Any,
    DIs: Mapping[str, nn.Module],
    members: Mapping[str, Sequence[str]],
    data: Mapping[str, Sequence[Sequence[Batch]]],
    extra: Mapping[str, Sequence[Sequence[Tensor]]],
    counts: Mapping[str, int],
    p: int,
    lr: float,
    make: Callable[[Any], optim.Optimizer],
    penalty: Penalty | None = None,
    spectral: bool = False,
) -> Any:
    """Do the whole training -> the last mean model.

    Args:
        loss: grl, inverted (whose discriminators learn as those of grl) or wassda.
        model: the model before the first round.
        DIs: discriminators by name.
        members: the sources of each discriminator.
        data: a batch per site, round and step; the target is called town and has no labels.
        extra: per site and round, the batches for the critic alone, in order.
        counts: examples by site.
        p: steps per window.
        lr: rate of the models' sgd, whose momentum is .9 and starts anew in every round.
        make: makes a discriminator's optimizer, which lasts for the whole training.
        penalty: a critic's penalty.
        spectral: whether no layer of a critic may have a singular value above 1 after a step.
    """
    sites = list(data)
    optimizers = {d: make(DI.parameters()) for d, DI in DIs.items()}
    windows = {d: Window(p) for d in DIs}
    rounds = len(data["town"])
    for t in range(rounds):
        local = {s: copy.deepcopy(model).train() for s in sites}
        steppers = {s: optim.SGD(m.parameters(), lr=lr, momentum=0.9) for s, m in local.items()}
        for window in windows.values():
            window.new_round()

        def train_DIs(z: Mapping[str, Tensor]) -> None:
            moves = {}
            for d, DI in DIs.items():
                whole = half(loss, DI(z["town"].detach()), False)
                for k in members[d]:
                    whole = whole + half(loss, DI(z[k].detach()), True) / len(members[d])
                if penalty is not None:
                    whole = whole + penalty(DI, z["town"], "town") / 2
                    for k in members[d]:
                        whole = whole + penalty(DI, z[k], k) / 2 / len(members[d])
                parts = torch.autograd.grad(whole, list(DI.parameters()))
                moves[d] = windows[d].add(torch.cat([g.flatten() for g in parts]))
            for d, g in moves.items():
                if g is None:
                    continue
                sizes = [w.numel() for w in DIs[d].parameters()]
                for w, part in zip(DIs[d].parameters(), (g / 2).split(sizes), strict=True):
                    w.grad = part.view_as(w).clone()
                optimizers[d].step()
                if spectral:
                    shorten(DIs[d])

        steps = len(data["town"][t])
        many = len(extra["town"][t]) // steps if extra else 0
        for n in range(steps):
            for i in range(n * many, n * many + many):
                with torch.no_grad():
                    more = {s: local[s].features(extra[s][t][i]) for s in sites}
                train_DIs(more)
            z = {s: local[s].features(data[s][t][n][0]) for s in sites}
            before = {d: copy.deepcopy(DI) for d, DI in DIs.items()}
            train_DIs(z)
            q = (t + n / steps) / rounds
            strength = 2 / (1 + math.exp(-10 * q)) - 1
            for s in sites:
                # the encoder follows the critic after its step, but a discriminator before its step
                against = DIs if loss == "wassda" else before
                mine = [d for d in DIs if s == "town" or s in members[d]]
                pulls = [deceiving(loss, against[d](z[s]), s != "town") for d in mine]
                objective: Any = strength * sum(pulls) / len(mine)
                y = data[s][t][n][1]
                if y is not None:
                    objective = objective + F.cross_entropy(local[s].head(z[s]), y)
                steppers[s].zero_grad()
                objective.backward()
                steppers[s].step()
        model = copy.deepcopy(model)
        model.load_state_dict(averaged(local, counts))
    return model


def matching(
    model: Any,
    W: Tensor,
    members: Mapping[str, Sequence[str]],
    data: Mapping[str, Sequence[Sequence[Batch]]],
    counts: Mapping[str, int],
    p: int,
    lr: float,
) -> Any:
    """Train f-DAN: as `adversarial`, with witnesses w = mean over sources of mu_S, minus mu_T."""
    sites = list(data)
    windows = {d: Window(p) for d in members}
    rounds = len(data["town"])

    def mu(z: Tensor) -> Tensor:
        angle = z @ W.T
        return torch.cat([angle.cos().mean(dim=0), angle.sin().mean(dim=0)]) / math.sqrt(len(W))

    for t in range(rounds):
        local = {s: copy.deepcopy(model).train() for s in sites}
        steppers = {s: optim.SGD(m.parameters(), lr=lr, momentum=0.9) for s, m in local.items()}
        for window in windows.values():
            window.new_round()
        steps = len(data["town"][t])
        for n in range(steps):
            z = {s: local[s].features(data[s][t][n][0]) for s in sites}
            w = {}
            for d, sources in members.items():
                apart = torch.stack([mu(z[k]) for k in sources]).mean(dim=0) - mu(z["town"])
                w[d] = windows[d].add(apart.detach())
            q = (t + n / steps) / rounds
            strength = 2 / (1 + math.exp(-10 * q)) - 1
            for s in sites:
                mine = [d for d in members if s == "town" or s in members[d]]
                objective = z[s].sum() * 0
                for d in mine:
                    if w[d] is not None:
                        sign = -1 if s == "town" else 1
                        objective = objective + strength * sign * 2 * w[d] @ mu(z[s]) / len(mine)
                y = data[s][t][n][1]
                if y is not None:
                    objective = objective + F.cross_entropy(local[s].head(z[s]), y)
                steppers[s].zero_grad()
                objective.backward()
                steppers[s].step()
        model = copy.deepcopy(model)
        model.load_state_dict(averaged(local, counts))
    return model
