"""Modes of a model: evaluation, and BatchNorm with the statistics of the current batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm


def batchnorms(model: nn.Module) -> dict[str, BatchNorm]:
    """The BatchNorm layers in order, by name; their state_dict entries start with that name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, BatchNorm)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards put every layer back into its former mode."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm normalise by each batch's mean and variance; all else is in evaluation mode.

    Running statistics are neither used nor changed, and meanwhile the state_dict lacks them. The
    teachers of KD3A's official code vote in this mode. A layer needs more than one value per
    channel, so a batch of one vector is an error.
    """
    layers = [m for m in batchnorms(model).values() if m.running_mean is not None]
    saved = [(m.running_mean, m.running_var, m.track_running_stats) for m in layers]
    with evaluating(model):
        # A layer without running statistics uses the batch's in both train() and eval() mode.
        for m in layers:
            m.running_mean, m.running_var, m.track_running_stats = None, None, False
        try:
            yield
        finally:
            for m, (mean, var, track) in zip(layers, saved, strict=True):
                m.running_mean, m.running_var, m.track_running_stats = mean, var, track


@contextmanager
def inputs_of(layers: list[BatchNorm]) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the input of each layer in the latest forward pass, by layer."""
    seen: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[layer] = inputs[0]

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
