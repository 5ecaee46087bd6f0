"""How a network computes while it trains: in which precision, in which layout, compiled or not.

Precision and compilation are for passes that are differentiated. Votes of teachers, statistics,
tests and predictions always run in float32, as do losses and discriminators: the features that an
encoder gives are float32 again. Parameters, optimizer and BatchNorm's statistics are float32
throughout. The layout is for all passes; it changes nothing but how sums are rounded.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from fedda.config import Layout, Precision

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

    def prepare(self, module: nn.Module) -> None:
        """Lay out an encoder's weights in memory; their values do not change."""
        weights = next(module.parameters(), None)
        if weights is not None and self._is_last(weights.device):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __call__(self, encoder: nn.Module, x: Tensor) -> Tensor:
        """Features of inputs -> (N, d), float32."""
        if x.dim() == 4 and self._is_last(x.device):
            x = x.contiguous(memory_format=torch.channels_last)
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


def _has_hooks(encoder: nn.Module) -> bool:
    return any(m._forward_pre_hooks or m._forward_hooks for m in encoder.modules())
