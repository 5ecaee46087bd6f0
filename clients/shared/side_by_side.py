"""Several models side by side at a target, with one optimizer; they stay there between rounds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, optim

from fedda import models
from fedda.errors import ConfigError
from fedda.maths.ensemble import Heads, SideBySide
from fedda.models import Model
from fedda.wire.packing import Packed

from ..site import state
from ..site.workspace import Network

# Keys under which a state has the models' names, in their order, and the target's class shares.
NAMES, SHARES = "names", "shares"


class Ensemble(Network):
    """Models side by side.

    Args:
        module: the models (`fedda.maths.ensemble`).
        names: the name of the source of each; an empty name for the run's own model.
        shares: (C,) of the target's classes, as estimated when the models came; None: even.
        optimizer: trains them.
    """

    def __init__(
        self,
        module: Model,
        names: Sequence[str],
        shares: Tensor | None,
        optimizer: optim.Optimizer | None = None,
    ) -> None:
        super().__init__(module, optimizer)
        self.names, self.shares = list(names), shares

    def state_dict(self) -> state.SiteState:
        """Return weights, buffers, the optimizer's state, the names and the shares."""
        saved = super().state_dict()
        saved.about[NAMES] = self.names
        saved.about[SHARES] = None if self.shares is None else self.shares.tolist()
        return saved


def parts_of(model: Model) -> tuple[SideBySide, Heads]:
    """The encoders and the heads of models side by side."""
    encoders, heads = model.encoder, model.head
    assert isinstance(encoders, SideBySide) and isinstance(heads, Heads)
    return encoders, heads


@torch.no_grad()
def fill(model: Model, plain: Model, packed: Sequence[Packed]) -> None:
    """Load models as they came into models side by side.

    Args:
        model: the models side by side.
        plain: a model of the run; it holds one after the other, and the last one afterwards.
        packed: the models, in order.
    """
    encoders, heads = parts_of(model)
    for k, each in enumerate(packed):
        models.load_arrays(plain, each.unpack())
        encoders.members[k].load_state_dict(plain.encoder.state_dict())
        heads.weight[k].copy_(plain.head.weight)
        heads.bias[k].copy_(plain.head.bias)


def groups(model: Model, plain: Model, rate: float) -> list[dict[str, Any]]:
    """Parameter groups of all encoders, with the rates that `Model.groups` gives a single one.

    Raises:
        ConfigError: the encoder has no parameters.
    """
    encoders, _ = parts_of(model)
    names = {id(p): name for name, p in plain.encoder.named_parameters()}
    found = [
        {
            "params": [m.get_parameter(names[id(p)]) for m in encoders.members for p in inside],
            "lr": group["lr"],
        }
        for group in plain.groups(rate)
        if (inside := [p for p in group["params"] if id(p) in names])
    ]
    if not found:
        raise ConfigError(
            "The method adapts the encoder, but this network's encoder has nothing that learns; "
            "set model.bottleneck, or another model.name."
        )
    return found
