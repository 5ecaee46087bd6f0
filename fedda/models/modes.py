"""Modes of a model: evaluation, and BatchNorm with the statistics of the current batch."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fedda.maths.moments import Moments, merge, moments


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


@torch.no_grad()
def own_statistics(model: nn.Module, batches: Iterable[Tensor]) -> int:
    """Estimate BatchNorm's statistics anew, from forward passes -> how many.

    Li et al., ICLR workshop 2017, algorithm 1. A layer's inputs depend on the statistics of the
    layers before it. So each batch is normalised by its own statistics, as in training. Dropout
    stays off, as in the test that follows.

    Args:
        model: its running statistics are replaced, and no parameter changes.
        batches: inputs of the model, in random order.
    """
    seen: dict[nn.Module, Moments] = {}
    layers, steps = list(batchnorms(model).values()), 0
    with batch_statistics(model), inputs_of(layers) as entering:
        for x in batches:
            model(x)
            for layer in layers:
                batch = moments(entering[layer])
                seen[layer] = merge(seen[layer], batch) if layer in seen else batch
            steps += 1
    for layer in layers:
        if layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.copy_(seen[layer].mean)
            layer.running_var.copy_(seen[layer].variance)
    return steps


@contextmanager
def plain_modes() -> Iterator[None]:
    """Compute as in a process of its own, whatever modes of torch the program is in."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # not else, as it costs time at each call
            stack.enter_context(torch.device("cpu"))
        yield
