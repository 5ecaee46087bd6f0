"""FADA, number by number, and its training on one machine that has all sites' data."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sklearn.cluster import KMeans
from torch import Tensor, nn, optim
from torch.nn import functional as F

from tests.reference.kd3a import gap_statistic

Batch = tuple[Tensor, Tensor | None]
Rows = Sequence[Sequence[float]]
TARGET = "town"


# ---- the losses --------------------------------------------------------------------------------


def softmax(logits: Sequence[float]) -> list[float]:
    e = [math.exp(v) for v in logits]
    return [value / sum(e) for value in e]


def minus_entropy(logits: Rows) -> float:
    """Eq. 7, to be minimised: -(1/N) sum_i H(CI(f_ds))."""
    H = [-sum(p * math.log(p) for p in softmax(row)) for row in logits]
    return -sum(H) / len(H)


def information(
    M: Callable[[Sequence[float], Sequence[float]], float], p: Rows, q: Rows, shuffle: Sequence[int]
) -> float:
    """Eq. 8: (1/n) sum M(p, q) - log((1/n) sum exp M(p, q'))."""
    n = len(p)
    joint = sum(M(p[i], q[i]) for i in range(n)) / n
    marginal = sum(math.exp(M(p[i], q[shuffle[i]])) for i in range(n)) / n
    return joint - math.log(marginal)


def eq_4(DI: nn.Module, z_S: Tensor, z_T: Tensor) -> Tensor:
    """Domain identifier: -E log DI(z_S) - E log(1 - DI(z_T))."""
    return -torch.sigmoid(DI(z_S)).log().mean() - (1 - torch.sigmoid(DI(z_T))).log().mean()


def eq_5(DI: nn.Module, z_S: Tensor, z_T: Tensor) -> Tensor:
    """Feature extractors: -E log DI(z_S) - E log DI(z_T)."""
    return -torch.sigmoid(DI(z_S)).log().mean() - torch.sigmoid(DI(z_T)).log().mean()


def updated(
    theta_0: Mapping[str, Tensor],
    own: Mapping[str, Tensor] | None,
    sources: Mapping[str, Mapping[str, Tensor]],
    w: Mapping[str, float],
    statistics: str = "target",
) -> dict[str, Tensor]:
    """theta_T + sum_i w_i (theta_i - theta_0); only the target's encoder has moved."""
    new = {}
    for name, before in theta_0.items():
        if not before.is_floating_point():
            every = [s[name] for s in sources.values()] + ([own[name]] if own else [before])
            new[name] = torch.stack(every).amax(dim=0)
            continue
        mine = own[name] if own is not None and not name.startswith("head.") else before
        if "running_" in name:
            mean = sum((w[s] * sources[s][name].double() for s in w), torch.zeros(()))
            new[name] = (mine if own is not None and statistics == "target" else mean).float()
            continue
        total = mine.double()
        for s in w:
            total = total + w[s] * (sources[s][name].double() - before.double())
        new[name] = total.float()
    return new


def attention(gains: Mapping[str, float]) -> dict[str, float]:
    """Softmax of the gains."""
    e = {s: math.exp(g) for s, g in gains.items()}
    return {s: value / sum(e.values()) for s, value in e.items()}


Gap = tuple[float, float]  # eq. 3 with C clusters, and with one for all


def coarse(before: Gap, after: Gap, gain: str) -> float:
    """A gain in thousandths: of the scatter, or of the statistic before; told to three digits."""
    if gain == "share":
        value = round((before[0] / before[1] - after[0] / after[1]) * 1000) / 1000
    else:
        value = _coarse(before[0], after[0])
    return float(f"{value:.3g}")


def _coarse(before: float, after: float) -> float:
    whole = float(f"{before:.2e}")
    return round((before - after) / before * 1000) / 1000 * whole


@torch.no_grad()
def gap(model: Any, state: Mapping[str, Tensor], x: Tensor, C: int, seed: int) -> Gap:
    """Eq. 3 under a model, and the scatter."""
    other = copy.deepcopy(model)
    other.load_state_dict(dict(state))
    z = other.eval().features(x)
    assignment = KMeans(C, random_state=seed).fit_predict(z.numpy())
    rows = z.double().tolist()
    return gap_statistic(rows, assignment.tolist()), gap_statistic(rows, [0] * len(rows))


# ---- the whole training ------------------------------------------------------------------------


def training(
    model: Any,
    DIs: Mapping[str, nn.Module],
    data: Mapping[str, Sequence[Sequence[Batch]]],
    options: Any,
    *,
    lr: float,
    images: Tensor,
    cluster_seeds: Sequence[int],
    nets: Mapping[str, Mapping[str, nn.Module]] | None = None,
    shuffles: Mapping[str, Sequence[torch.Generator]] | None = None,
) -> tuple[Any, list[dict[str, float]]]:
    """Train with gradients summed in every step -> the last model, each round's weights.

    Args:
        model: the model before the first round.
        DIs: domain identifiers by source, with sgd.
        data: a batch per site, round and step.
        options: FADA's settings; everything else learns by sgd with momentum .9.
        lr: of the models, which start afresh every round, and of the networks that stay.
        images: the target's images, for the attention.
        cluster_seeds: of k-means, by round.
        nets: of model III by site and name: invariant, specific, M, R and, with labels, CI.
        shuffles: by site and round, what draws the marginal pairs.
    """
    C = model.head.out_features
    stay = {
        s: {n: optim.SGD(net.parameters(), lr=lr, momentum=0.9) for n, net in of.items()}
        for s, of in (nets or {}).items()
    }
    rate = options.discriminator.lr
    moves = {s: optim.SGD(DI.parameters(), lr=rate, momentum=0.9) for s, DI in DIs.items()}
    past, rounds = [], len(data[TARGET])
    for t in range(rounds):
        theta_0 = {n: v.clone() for n, v in model.state_dict().items()}
        local = {s: copy.deepcopy(model).train() for s in data}
        steps = {s: optim.SGD(m.parameters(), lr=lr, momentum=0.9) for s, m in local.items()}
        count = len(data[TARGET][t])
        for n in range(count):
            q = (t + n / count) / rounds
            weight = options.weights.alignment * (2 / (1 + math.exp(-10 * q)) - 1)
            z = {s: local[s].features(data[s][t][n][0]) for s in data}
            di, ds = dict(z), dict(z)
            if nets is not None:
                di = {s: nets[s]["invariant"](z[s]) for s in data}
                ds = {s: nets[s]["specific"](z[s]) for s in data}
            loss = {s: torch.zeros(()) for s in data}
            for s, DI in DIs.items():
                y, head = data[s][t][n][1], local[s].head
                assert y is not None
                loss[s] = F.cross_entropy(di[s] @ head.weight.T + head.bias, y)
                if nets is not None:
                    loss[s] = loss[s] + F.cross_entropy(nets[s]["CI"](ds[s]), y)
                # Eq. 5; each site moves by the term of its own features.
                aligned = weight * eq_5(DI, di[s], di[TARGET].detach())
                loss[s] = loss[s] + aligned
                theirs = weight * eq_5(DI, di[s].detach(), di[TARGET])
                loss[TARGET] = loss[TARGET] + theirs / len(DIs)
            found = {}
            for s, DI in DIs.items():
                whole = eq_4(DI, di[s].detach(), di[TARGET].detach()) / 2
                found[s] = torch.autograd.grad(whole, list(DI.parameters()))
            for s in data:
                for each in (steps[s], *stay.get(s, {}).values()):
                    each.zero_grad()
                loss[s].backward()
                steps[s].step()
                for name in {"invariant", "specific", "CI"} & set(stay.get(s, {})):
                    stay[s][name].step()
            for s, DI in DIs.items():
                for parameter, g in zip(DI.parameters(), found[s], strict=True):
                    parameter.grad = g
                moves[s].step()
            if nets is not None and shuffles is not None:
                for s in data:
                    _apart(nets[s], stay[s], z[s].detach(), shuffles[s][t], options.weights)
        own = local[TARGET].state_dict()
        sources = {s: local[s].state_dict() for s in sorted(DIs)}
        nobody = dict.fromkeys(sources, 0.0)
        before = gap(model, updated(theta_0, own, sources, nobody), images, C, cluster_seeds[t])
        gains = {}
        for s in sources:
            alone = updated(theta_0, own, {s: sources[s]}, {s: 1.0})
            after = gap(model, alone, images, C, cluster_seeds[t])
            gains[s] = coarse(before, after, options.gain)
        w = attention(gains)
        past.append(w)
        model = copy.deepcopy(model)
        model.load_state_dict(updated(theta_0, own, sources, w))
    return model, past


def _apart(
    nets: Mapping[str, nn.Module],
    moves: Mapping[str, optim.Optimizer],
    z: Tensor,
    draws: torch.Generator,
    weights: Any,
) -> None:
    """M ascends; then D and R descend, with CI and M frozen."""
    shuffle = torch.randperm(len(z), generator=draws)
    di, ds = nets["invariant"](z), nets["specific"](z)

    def bound(p: Tensor, q: Tensor) -> Tensor:
        return nets["M"](p, q).mean() - nets["M"](p, q[shuffle]).exp().mean().log()

    def forget() -> None:
        for each in moves.values():
            each.zero_grad()

    forget()
    (-bound(di.detach(), ds.detach())).backward()
    moves["M"].step()
    forget()
    rebuilt = nets["R"](torch.cat([di, ds], dim=1))
    loss = weights.information * bound(di, ds)
    loss = loss + weights.reconstruction * ((rebuilt - z) ** 2).mean()
    if "CI" in nets:
        p = nets["CI"](ds).softmax(dim=1)
        loss = loss + weights.confusion * (p * p.log()).sum(dim=1).mean()
    loss.backward()
    for name in ("invariant", "specific", "R"):
        moves[name].step()
