"""How a network computes while it trains: in which precision, in which layout, compiled or not.

Precision and compilation are for passes that are differentiated. Votes of teachers, statistics,
tests and predictions always run in float32, as do losses and discriminators: the features that an
encoder gives are float32 again. Parameters, optimizer and BatchNorm's statistics are float32
throughout. The layout is for all passes; it changes nothing but how sums are rounded, BatchNorm's
on a processor more coarsely (`networks.layout_of`).
"""

import logging
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedda.config import Layout, Precision
from fedda.errors import ModelError

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
        # A compiled program does not call hooks that come later, such as those of `inputs_of`.
        if not self.compiled or _has_hooks(encoder):
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


def _has_hooks(encoder: nn.Module) -> bool:
    return any(m._forward_pre_hooks or m._forward_hooks for m in encoder.modules())
