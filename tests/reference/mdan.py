"""MDAN, number by number, and its training on one machine that has all sites' data."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor | None]
Reported = Mapping[str, tuple[float, float]]  # CE_j and d_j by source


def domain_loss(CE: float, d: float, mu: float, sign: str) -> float:
    """Return a source's term: the paper's bound falls with d, the authors' loss rises with d."""
    return CE + {"paper": -1, "code": 1}[sign] * mu * d


def objective(f: Sequence[float], gamma: float) -> float:
    """Return the soft maximum of a few numbers of moderate size."""
    return math.log(sum(math.exp(gamma * term) for term in f)) / gamma


def weights(f: Sequence[float | None], gamma: float, maximum: str = "soft") -> list[float]:
    """1 / sum_k exp(gamma (f_k - f_j)); "hard": equal shares for the largest. None: not known."""
    known = [term for term in f if term is not None]
    mean = math.fsum(known) / len(known) if known else 0.0
    filled = [mean if term is None else term for term in f]
    if maximum == "hard":
        worst = [term == max(filled) for term in filled]
        return [at / sum(worst) for at in worst]
    return [1 / sum(_exp(gamma * (other - term)) for other in filled) for term in filled]


def source_weights(sources: Sequence[str], reported: Reported, o: Any) -> dict[str, float]:
    """Return weights by source from reported losses; an absent source has reported nothing."""
    f = [domain_loss(*reported[s], o.mu, o.sign) if s in reported else None for s in sources]
    return dict(zip(sources, weights(f, o.gamma, o.max), strict=True))


def averaged(
    local: Mapping[str, Mapping[str, Tensor]],
    counts: Mapping[str, int],
    w: Mapping[str, float],
    target: str = "town",
) -> dict[str, Tensor]:
    """Average: source j has w_j of the sources' part; heads are averaged over sources alone."""
    total = sum(counts[s] for s in [*w, target])
    part = {s: w[s] * sum(counts[k] for k in w) / total for s in w if s in local}
    mean = {}
    for name, like in local[target].items():
        if not like.is_floating_point():
            mean[name] = torch.stack([model[name] for model in local.values()]).amax(dim=0)
            continue
        shares = dict(part)
        if not name.startswith("head."):
            shares[target] = counts[target] / total
        terms = [local[s][name].double() * share for s, share in shares.items()]
        mean[name] = (sum(terms, torch.zeros(())) / sum(shares.values())).to(like.dtype)
    return mean


def half(DI: nn.Module, z: Tensor, source: bool) -> Tensor:
    """Return one side's part of d_j."""
    p = torch.sigmoid(DI(z))
    return -(p if source else 1 - p).log().mean()


def training(
    model: Any,
    DIs: Mapping[str, nn.Module],
    data: Mapping[str, Sequence[Sequence[Batch]]],
    counts: Mapping[str, int],
    options: Any,
    lr: float,
    momentum: float,
) -> tuple[Any, list[dict[str, float]]]:
    """Train with gradients summed in every step -> the last mean model, each round's weights.

    Args:
        model: the model before the first round.
        DIs: discriminators by source.
        data: a batch per site, round and step; the target is called town and has no labels.
        counts: examples by site.
        options: the method's settings; discriminators learn by sgd.
        lr: rate of the models' sgd, whose momentum starts anew in every round.
        momentum: momentum of the discriminators' and of the models' sgd.
    """
    reported: dict[str, tuple[float, float]] = {}
    past = []
    moves = {
        s: optim.SGD(DI.parameters(), lr=options.discriminator.lr, momentum=momentum)
        for s, DI in DIs.items()
    }
    for t in range(len(data["town"])):
        w = source_weights(list(DIs), reported, options)
        past.append(w)
        local = {s: copy.deepcopy(model).train() for s in data}
        steps = {s: optim.SGD(m.parameters(), lr=lr, momentum=momentum) for s, m in local.items()}
        CE: dict[str, list[float]] = {s: [] for s in DIs}
        d: dict[str, list[tuple[float, float]]] = {s: [] for s in DIs}
        for n in range(len(data["town"][t])):
            z = {s: local[s].features(data[s][t][n][0]) for s in data}
            losses = {"town": torch.zeros(())}
            for s, DI in DIs.items():
                y = data[s][t][n][1]
                assert y is not None
                classified = F.cross_entropy(local[s].head(z[s]), y)
                ours, theirs = half(DI, z[s], True), half(DI, z["town"], False)
                losses[s] = classified - options.mu * ours
                losses["town"] = losses["town"] - options.mu * w[s] * theirs
                CE[s].append(classified.item())
                d[s].append((ours.item(), theirs.item()))
            grads = {
                s: torch.autograd.grad(loss, list(local[s].parameters()), retain_graph=True)
                for s, loss in losses.items()
                if s != "town"
            }
            encoder = [p for name, p in local["town"].named_parameters() if "head." not in name]
            moved = torch.autograd.grad(losses["town"], encoder, retain_graph=True)
            for s, DI in DIs.items():
                whole = half(DI, z[s].detach(), True) + half(DI, z["town"].detach(), False)
                parts = torch.autograd.grad(whole / 2, list(DI.parameters()))
                for parameter, g in zip(DI.parameters(), parts, strict=True):
                    parameter.grad = g
                for parameter, g in zip(local[s].parameters(), grads[s], strict=True):
                    parameter.grad = g
            for parameter, g in zip(encoder, moved, strict=True):
                parameter.grad = g
            for optimizer in (*moves.values(), *steps.values()):
                optimizer.step()
        # As sites tell them, in steps of .01 and .001; each side tells its half of d_j.
        told = {s: [round(sum(part) / len(part), 3) for part in zip(*d[s], strict=True)] for s in d}
        reported = {s: (round(math.fsum(CE[s]) / len(CE[s]), 2), math.fsum(told[s])) for s in DIs}
        model = copy.deepcopy(model)
        model.load_state_dict(averaged({s: m.state_dict() for s, m in local.items()}, counts, w))
    return model, past


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
