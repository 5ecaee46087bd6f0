"""How a network computes: in which precision, in which layout, compiled or not.

Precision and compilation are for passes that are differentiated. Votes of teachers, statistics,
tests and predictions always run in float32, as do losses and discriminators: the features that an
encoder gives are float32 again. Parameters, optimizer and BatchNorm's statistics are float32
throughout. The layout is for all passes; it changes nothing but how sums are rounded, BatchNorm's
on a processor more coarsely (`networks.layout_of`).

And in which mode: in evaluation, or with BatchNorm by the statistics of the current batch.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from fedda.config import Layout, Precision
from fedda.errors import ModelError
from fedda.maths.moments import Moments, merge, moments

logger = logging.getLogger("fedda.site")


class Arithmetic:
    """Runs an encoder as the settings of a training and of its site say.

    Args:
        precision: of the products in the encoder's layers; `bfloat16` is torch.autocast.
        layout: of images in memory; `auto` is channels-last, (N, H, W, C), on a processor.
        compiled: whether torch.compile makes a faster program of the encoder. Where it cannot, a
            warning says why, and the encoder runs as it is.
    """

    def __init__(
        self,
        precision: Precision = "float32",
        layout: Layout = "channels-first",
        compiled: bool = False,
    ) -> None:
        self.precision = precision
        self.layout = layout
        self.compiled = compiled
        self._program: Any = None

    def suit(self, module: nn.Module) -> Self:
        """Leave images channels-first where a layer's gradient needs it."""
        if self.layout != "channels-first" and any(map(_overruns, module.modules())):
            if self.layout == "channels-last":
                logger.warning(
                    "train.layout=channels-last has no effect: the network has a strided 1 x 1 "
                    "convolution of few channels, whose gradient fails so on a processor"
                )
            self.layout = "channels-first"
        return self

    def prepare(self, module: nn.Module) -> None:
        """Lay out an encoder's weights in memory; their values do not change."""
        self.suit(module)
        for weight in module.parameters():
            if weight.dim() == 4 and self._is_last(weight.device):
                # `contiguous` would leave one input channel as it is, and its products slower.
                weight.data = weight.data.to(memory_format=torch.channels_last)

    def __call__(self, encoder: nn.Module, x: Tensor) -> Tensor:
        """Features of inputs -> (N, d), float32.

        Raises:
            ModelError: the network takes a `view` of images, which needs channels-first.
        """
        if x.dim() != 4 or not self._is_last(x.device):
            return self._features(encoder, x)
        try:
            return self._features(encoder, x.contiguous(memory_format=torch.channels_last))
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            raise ModelError(
                "The network takes a `view` of images, which fails where channels are last; set "
                "train.layout to channels-first, or let the network use `reshape`."
            ) from error

    def _features(self, encoder: nn.Module, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return encoder(x)
        if self.precision == "float32":
            return self._run(encoder, x)
        with torch.autocast(x.device.type, torch.bfloat16):
            z = self._run(encoder, x)
        return z.float()

    def _is_last(self, device: torch.device) -> bool:
        return self.layout == "channels-last" or (self.layout == "auto" and device.type == "cpu")

    def _run(self, encoder: nn.Module, x: Tensor) -> Tensor:
        if not self.compiled:
            return encoder(x)
        # A compiled program does not call hooks that come later, such as those of `inputs_of`.
        if any(m._forward_pre_hooks or m._forward_hooks for m in encoder.modules()):
            return encoder(x)
        try:
            self._program = self._program or torch.compile(lambda x: encoder(x))
            return self._program(x)
        except Exception as error:  # no compiler, or a layer that it cannot compile
            why = " ".join(str(error).split())[:200]
            logger.warning(
                "--compile has no effect: torch.compile failed (%s: %s)", type(error).__name__, why
            )
            self.compiled = False
            return encoder(x)


def _overruns(module: nn.Module) -> bool:
    """Whether a layer's gradient ends the process, or is wrong, where channels are last.

    On a processor, oneDNN's gradient of 1 x 1 convolutions with a stride writes past its memory
    if they have fewer input channels than a vector of the processor holds numbers, 16 at most
    (https://github.com/uxlfoundation/oneDNN/issues/6035, open in torch 2.15).
    """
    return (
        isinstance(module, nn.Conv2d)
        and module.weight.device.type != "cuda"
        and module.kernel_size == (1, 1)
        and max(module.stride) > 1
        and module.in_channels // module.groups < 16
    )


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
