"""A discriminator's state, which travels with the round's model so that a site may join any time.

    weights   of its layers, by name
    sync      (P,)  the g_sync that moved all copies last
    step      (1,)  and the optimizer's state, flat: adam's exp_avg (P,) and exp_avg_sq (P,),
                    sgd's momentum_buffer (P,), or adadelta's square_avg (P,) and acc_delta (P,)

A site that starts from this state moves its copy exactly as the sites that took part before. Every
member has these values anyway. They always travel in float32: Adam divides by the root of its
second moment, which half precision would often round to 0.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn, optim

from fedda.adversarial.discriminators import DiscriminatorConfig, count, layout
from fedda.wire.packing import Entry, Kind, Manifest

STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adadelta": ("square_avg", "acc_delta"),
}


def travelling_layout(d: int, network: DiscriminatorConfig) -> Manifest:
    """The layout of the packed state of a discriminator over d features."""
    P = count(d, network.hidden)
    flat = [Entry(name, "float32", (P,)) for name in ("sync", *STATE[network.optimizer])]
    entries = (*layout(d, network.hidden).entries, *flat, Entry("step", "float32", (1,)))
    return Manifest(Kind.MODEL, "float32", entries)


def state_of(DI: nn.Module, optimizer: optim.Optimizer, g_sync: Tensor) -> dict[str, Tensor]:
    """The state that travels, on the CPU and in the order of `travelling_layout`."""
    parameters = list(DI.parameters())
    names = STATE[type(optimizer).__name__.lower()]
    # Zeros are the state of an optimizer that has not moved yet, or keeps none.
    flat = {
        n: torch.cat([optimizer.state[w].get(n, torch.zeros_like(w)).flatten() for w in parameters])
        for n in names
    }
    steps = optimizer.state[parameters[0]].get("step", torch.zeros(()))  # sgd counts none
    state = {**DI.state_dict(), "sync": g_sync, **flat, "step": steps.reshape(1)}
    return {n: t.detach().to("cpu", torch.float32).clone() for n, t in state.items()}


def load_state(DI: nn.Module, optimizer: optim.Optimizer, state: Mapping[str, Tensor]) -> Tensor:
    """Set a discriminator and its optimizer to a state that travelled -> g_sync (P,)."""
    DI.load_state_dict({n: state[n] for n in DI.state_dict()})
    parameters = list(DI.parameters())
    flat = {
        n: _parts(state[n], parameters) for names in STATE.values() for n in names if n in state
    }
    moments = {
        i: {n: parts[i] for n, parts in flat.items()} | _steps(flat, state["step"])
        for i in range(len(parameters))
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return state["sync"].clone()


def _parts(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([w.numel() for w in parameters])
    return [part.view_as(w).clone() for part, w in zip(parts, parameters, strict=True)]


def _steps(flat: Mapping[str, object], step: Tensor) -> dict[str, Tensor]:
    return {"step": step.reshape(()).clone()} if "momentum_buffer" not in flat else {}
