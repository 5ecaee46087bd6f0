"""The frozen front of a pretrained network, which is not part of the model that travels.

With `model.train=bottleneck` it is the whole network, with `last-block` all before that block.
Every site makes it of its own copy of the weights. Nothing in it ever changes, so a site computes
its outputs once per image, and the run's model takes these outputs as inputs.
"""

import hashlib
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedda.config import ModelConfig

from .arithmetic import Arithmetic
from .ready import cut, ready
from .weights import fill

DIGEST = 16  # bytes
remembered: Any = cache  # whose type does not know that frozen settings can be told apart


class Normalise(nn.Module):
    """Bring images to the form that pretrained weights expect; it has no state of its own."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], repeat: bool) -> None:
        """Remember each colour's mean and deviation.

        Args:
            mean: of images in [0, 1].
            std: likewise.
            repeat: the images have one channel, and the network takes three.
        """
        super().__init__()
        self.repeat = repeat
        # Constants stay out of the state_dict, which is sent: it holds only what is learnt.
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / std -> (N, 3, H, W)."""
        if self.repeat:
            x = x.expand(-1, 3, -1, -1)
        return (x - self.mean) / self.std


class Backbone(nn.Module):
    """Images in [0, 1] (N, channels, H, W) -> what the run's model takes, (N, *out).

    It is always in evaluation mode, and none of its parameters learns.

    Attributes:
        shape: of one image.
    """

    def __init__(self, normalise: Normalise, front: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.normalise = normalise
        self.front = front
        self.shape = shape
        self.arithmetic = Arithmetic(layout="auto")
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> "Backbone":
        """Stay in evaluation mode, whatever is asked."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.arithmetic(self.front, self.normalise(x)).contiguous()

    def digest(self) -> str:
        """A hash of the weights and their names; sites with equal ones compute the same."""
        total = hashlib.blake2b(digest_size=DIGEST)
        for name, tensor in self.state_dict().items():
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return total.hexdigest()


def backbone(
    config: ModelConfig,
    shape: tuple[int, ...],
    weights: bool = True,
    fetch: bool = False,
    device: str = "cpu",
) -> Backbone:
    """Make the frozen part of a model, with this machine's copy of the weights.

    Args:
        config: the network, what learns of it, and where the weights come from.
        shape: of one image, (channels, H, W).
        weights: whether the weights are read; otherwise they are random.
        fetch: whether they are downloaded if this machine has no copy.
        device: `meta` gives shapes only.

    Raises:
        ModelError: the weights are not there, or do not fit.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        made = ready(config.name, shape[1:])
        if weights:
            fill(made.network, None, config, shape[1:], fetch)
        front = made.network if config.train == "bottleneck" else cut(config.name, made.network)[0]
        normalise = Normalise(made.mean, made.std, repeat=shape[0] == 1)
    return Backbone(normalise, front, shape).to(device)


@remembered
def digest(config: ModelConfig, shape: tuple[int, ...]) -> str:
    """The hash of the frozen part; its weights are fetched if this machine has no copy.

    Raises:
        ModelError: the weights are not there, or do not fit.
    """
    return backbone(config, shape, fetch=True).digest()


@remembered
def outputs(config: ModelConfig, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what the frozen part gives for one image; no weights are read."""
    made = backbone(config, shape, weights=False, device="meta")
    return tuple(made(torch.empty(2, *shape, device="meta")).shape[1:])
