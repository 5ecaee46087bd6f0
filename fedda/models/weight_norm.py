"""A head that trains with weight normalisation, and is a plain linear layer before and after."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils import parametrizations

from .networks import Model


@contextmanager
def weight_normed(model: Model) -> Iterator[None]:
    """Train the head's W as g v / |v|, row by row (Salimans and Kingma, 2016).

    Inside, another head is in the model's place, for which the optimizer must be made. It begins
    with the same W, and the model's own head then gets the W and b that came of it.
    """
    head, fresh = model.head, model.fresh
    model.head = normed = copy.deepcopy(head)
    parametrizations.weight_norm(normed, "weight")
    model.fresh = fresh | {f"head.{name}" for name, _ in normed.named_parameters()}
    try:
        yield
        with torch.no_grad():
            head.weight.copy_(normed.weight)
            head.bias.copy_(normed.bias)
    finally:
        model.head, model.fresh = head, fresh
