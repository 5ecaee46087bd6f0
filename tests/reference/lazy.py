"""Lazy synchronisation and DILS on one machine: no sites, no buffers, no exchange."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn, optim

Row = list[float]


def applied(
    gradients: Sequence[Sequence[Row]], p: int, halves: int = 2, overlap: bool = False
) -> list[Row | None]:
    """Eq. 27: the gradients that move the copies in each step, from the members' gradients.

    Args:
        gradients: a gradient per step n = 1, 2, ... and member.
        p: steps per window.
        halves: the sum is divided by halves * p.
        overlap: whether a sum is used only p steps after its exchange.
    """
    moves: list[Row | None] = []
    for n in range(1, len(gradients) + 1):
        last = n // p * p - (p if overlap else 0)  # t_p, the latest sync-up step that counts
        if last < p:
            moves.append(None)
            continue
        window = [row for step in gradients[last - p : last] for row in step]
        moves.append([math.fsum(column) / (halves * p) for column in zip(*window, strict=True)])
    return moves


def protect(g: Row, clip: float) -> Row:
    """Keep the direction and limit the length to `clip`."""
    length = math.sqrt(math.fsum(v * v for v in g))
    return [v * clip / length for v in g] if length > clip else list(g)


LOG: dict[str, Callable[[Tensor], Tensor]] = {
    "DI": lambda v: torch.sigmoid(v).log().mean(),
    "1 - DI": lambda v: (1 - torch.sigmoid(v)).log().mean(),
}


def whole_loss(loss: str, f_S: Tensor, f_T: Tensor) -> Tensor:
    """Eqs. 6 and 15 without the penalty, for both sides together."""
    if loss == "wassda":
        return -(f_S.mean() - f_T.mean())
    return -LOG["DI"](f_S) - LOG["1 - DI"](f_T)


def mapping(loss: str, f_S: Tensor, f_T: Tensor) -> Tensor:
    """Eqs. 7, 13, 16; CADA inverts the source's labels too."""
    return {
        "adda": lambda: -LOG["DI"](f_T),
        "grl": lambda: LOG["1 - DI"](f_T),
        "wassda": lambda: f_S.mean() - f_T.mean(),
        "cada": lambda: -LOG["DI"](f_T) - LOG["1 - DI"](f_S),
    }[loss]()


def algorithm_1(
    loss: str,
    E: nn.Module,
    DI: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    p: int,
    lr: float,
    DI_lr: float,
    penalty: Callable[[nn.Module, Tensor, str], Tensor] | None = None,
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Algorithm 1 on one machine that has both sides' batches -> E_opt, E_T, DI.

    One discriminator is moved by half the mean gradient of the whole loss over the latest full
    window of p steps; all gradients are stored and looked up. Both optimizers are plain SGD.
    """
    E_opt, E_T = copy.deepcopy(E), copy.deepcopy(E)
    DI = copy.deepcopy(DI)
    moving = [*E_T.parameters(), *(E_opt.parameters() if loss == "cada" else [])]
    encoders = optim.SGD(moving, lr=lr)
    history: list[list[Tensor]] = []
    for n, (x_S, x_T) in enumerate(batches, start=1):
        z_S, z_T = E_opt(x_S), E_T(x_T)
        total = whole_loss(loss, DI(z_S), DI(z_T))
        if penalty is not None:
            total = total + penalty(DI, z_S, "source") / 2 + penalty(DI, z_T, "target") / 2
        history.append(list(torch.autograd.grad(total, list(DI.parameters()), retain_graph=True)))
        objective = mapping(loss, DI(z_S), DI(z_T))
        encoders.zero_grad()
        for parameter, g in zip(moving, torch.autograd.grad(objective, moving), strict=True):
            parameter.grad = g
        encoders.step()
        last = n // p * p
        if last:
            window = history[last - p : last]
            with torch.no_grad():
                for i, parameter in enumerate(DI.parameters()):
                    parameter -= DI_lr * sum(step[i] for step in window) / (2 * p)
    return E_opt, E_T, DI
