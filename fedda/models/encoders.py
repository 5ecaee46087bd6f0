"""The small networks by name, and those that other packages add: all but the linear head.

digit-cnn   Feng et al., KD3A, ICML 2021, Table 4
lenet       Gan et al., FRUDA, appendix F.0.2: the LeNet of its Rotated MNIST
mlp         hidden layers of `model.sizes`; for Amazon Review KD3A has three linear layers in all
identity    no encoder: the inputs are features, such as vectors of a pretrained network

Other packages can add encoders (`fedda.plugins`); a site builds only those it has installed.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from fedda import plugins
from fedda.config import NETWORKS, TIMM, WIDEST, ModelConfig
from fedda.errors import FeddaError, ModelError

from .modes import evaluating

Encoder = tuple[nn.Module, int]  # from inputs to features (N, width), and the width


def encoder(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """Make an encoder by name, for inputs of this shape -> the encoder and its number of features.

    Raises:
        ModelError: no such network is installed here, or it does not take such inputs.
    """
    return _SMALL.get(config.name, _added)(config, shape)


def _digit_cnn(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """KD3A, Table 4. Padded convolutions keep the size; each of the two poolings halves it."""
    channels, height, width = shape
    encoder = nn.Sequential(
        *(nn.Conv2d(channels, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 5, padding=2), nn.BatchNorm2d(128), nn.ReLU()),
        nn.Flatten(),
    )
    return encoder, 128 * (height // 4) * (width // 4)


def _lenet(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """FRUDA, F.0.2: unpadded convolutions of 20 and 50 channels, each pooled, then 500 units."""
    channels, height, width = shape
    sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    encoder = nn.Sequential(
        *(nn.Conv2d(channels, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(50 * sides[0] * sides[1], 500), nn.ReLU()),
    )
    return encoder, 500


def _mlp(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """Linear, BatchNorm and ReLU per hidden layer; some methods need the BatchNorm."""
    try:
        sizes = [int(size) for size in config.sizes.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > WIDEST:
        raise ModelError(
            f"model.sizes is '{config.sizes}', but mlp needs the sizes of its hidden layers; "
            "set it to, for example, 1000,500,100."
        )
    layers: list[nn.Module] = [nn.Flatten()]
    for before, size in zip([math.prod(shape), *sizes[:-1]], sizes, strict=True):
        layers += [nn.Linear(before, size), nn.BatchNorm1d(size), nn.ReLU()]
    return nn.Sequential(*layers), sizes[-1]


def _identity(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """No encoder: the inputs are the features."""
    return nn.Flatten(), math.prod(shape)


def _added(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """Build an encoder of another package and check it on an input of this shape.

    Raises:
        ModelError: it is not installed on this machine, does not take these inputs, or gives
            another number of features than it says.
    """
    added = plugins.installed("models").get(config.name)
    if added is None:
        plugins.check_barred("models", config.name)
        raise ModelError(
            f"The network '{config.name}' is not installed on this machine; install the package "
            f"that adds it, or set model.name to {TIMM}NAME or one of {', '.join(NETWORKS)}."
            f"{plugins.why_not('models', config.name)}"
        )
    called = f"The network {config.name} of {added.origin}"
    try:
        encoder, width = added.value(config, shape)
        with evaluating(encoder), torch.no_grad():
            given = tuple(encoder(torch.zeros(2, *shape)).shape)
    except FeddaError:
        raise
    except Exception as error:  # another package's code, on any shape of data
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{called} does not take inputs of shape {shape} ({type(error).__name__}: {why}); "
            "choose another network, or other settings of model and input."
        ) from error
    if given != (2, width):
        raise ModelError(
            f"{called} says that it gives {width} features per input, but for two inputs it gives "
            f"an array of shape {given}; correct the package."
        )
    return encoder, width


_SMALL: dict[str, Callable[[ModelConfig, tuple[int, ...]], Encoder]] = {
    "digit-cnn": _digit_cnn,
    "lenet": _lenet,
    "mlp": _mlp,
    "identity": _identity,
}
