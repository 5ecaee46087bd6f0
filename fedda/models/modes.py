"""Modes of a model: evaluation, and BatchNorm with the statistics of the batch at hand."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm


def batchnorms(model: nn.Module) -> dict[str, BatchNorm]:
    """The BatchNorm layers in order, by the name their state_dict entries start with."""
    return {name: m for name, m in model.named_modules() if isinstance(m, BatchNorm)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every layer is back in the mode it was in."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """BatchNorm normalises with each batch's own mean and variance; all else is in evaluation mode.

    Running statistics are neither used nor changed: KD3A's official teachers vote so. They are
    missing from the state_dict meanwhile. A layer needs more than one value per channel, so a
    batch of one vector is an error.
    """
    layers = [m for m in batchnorms(model).values() if m.running_mean is not None]
    kept = [(m.running_mean, m.running_var, m.track_running_stats) for m in layers]
    with evaluating(model):
        # Without running statistics a layer uses the batch's, whatever train() or eval() say.
        for m in layers:
            m.running_mean, m.running_var, m.track_running_stats = None, None, False
        try:
            yield
        finally:
            for m, (mean, var, track) in zip(layers, kept, strict=True):
                m.running_mean, m.running_var, m.track_running_stats = mean, var, track


@contextmanager
def inputs_of(layers: list[BatchNorm]) -> Iterator[dict[nn.Module, Tensor]]:
    """What enters each layer in the latest forward pass, by layer."""
    seen: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[layer] = inputs[0]

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
