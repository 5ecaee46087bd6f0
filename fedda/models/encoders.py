"""The small networks by name, and those that other packages add: all but the linear head.

digit-cnn   Feng et al., KD3A, ICML 2021, Table 4
lenet       Gan et al., FRUDA, appendix F.0.2: the LeNet of its Rotated MNIST
mlp         hidden layers of `model.hidden`; for Amazon Review KD3A has three linear layers in all
identity    no encoder: the inputs are features, such as vectors of a pretrained network

Other packages can add encoders (`fedda.plugins`); a site builds only those it has installed.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fedda import plugins
from fedda.config import NETWORKS, TIMM, ModelConfig
from fedda.errors import FeddaError, ModelError

from .arithmetic import evaluating

Encoder = tuple[nn.Module, int]  # from inputs to features (N, width), and the width


def encoder(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """Make an encoder by name, for inputs of this shape -> the encoder and its number of features.

    Raises:
        ModelError: no such network is installed here, or it does not take such inputs.
    """
    return _SMALL.get(config.name, _added)(config, shape)


def _digit_cnn(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """KD3A, Table 4. Padded convolutions keep the size; each of the two poolings halves it.

    Ours: of images larger than 32 pixels, the last layer's output is averaged to 8 x 8, as large as
    it is with 32, so that layers that follow do not grow with the images.
    """
    channels, height, width = shape
    sides = [min(side // 4, 8) for side in (height, width)]
    pooled = [nn.AdaptiveAvgPool2d((sides[0], sides[1]))] if max(height, width) > 35 else []
    encoder = nn.Sequential(
        *(nn.Conv2d(channels, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 5, padding=2), nn.BatchNorm2d(128), nn.ReLU()),
        *pooled,
        nn.Flatten(),
    )
    return encoder, 128 * sides[0] * sides[1]


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
    """Hidden layers alone; some methods need their BatchNorm."""
    if not config.hidden:
        raise ModelError(
            "model.hidden is empty, but mlp consists of hidden layers; set it to, for example, "
            "1000,500,100."
        )
    layers = hidden(math.prod(shape), config.widths, config.dropout)
    return nn.Sequential(nn.Flatten(), *layers), config.widths[-1]


def hidden(width: int, widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Hidden layers on features (N, width), as KD3A's code has two -> (N, widths[-1]).

    Linear, BatchNorm and ReLU each, and dropout between two.
    """
    layers: list[nn.Module] = []
    for before, size in zip([width, *widths], widths, strict=False):
        layers += [nn.Dropout(dropout)] * bool(layers and dropout)
        layers += [nn.Linear(before, size), nn.BatchNorm1d(size), nn.ReLU()]
    return nn.Sequential(*layers)


def _added(config: ModelConfig, shape: tuple[int, ...]) -> Encoder:
    """Build an encoder of another package and check it on an input of this shape.

    Raises:
        ModelError: it is not installed on this machine, does not take these inputs, or gives
            another number of features than it says.
    """
    added = plugins.installed("models").get(config.name)
    if added is None:
        plugins.check_barred("models", config.name)
        if config.name.startswith("own:"):
            raise ModelError(
                f"The network '{config.name}' was a program's own function; read the run with "
                "fedda.load(dir, network=...) and this function."
            )
        raise ModelError(
            f"The network '{config.name}' is not installed on this machine; install the package "
            f"that adds it, or set model.name to {TIMM}NAME or one of {', '.join(NETWORKS)}."
            f"{plugins.why_not('models', config.name)}"
        )
    network = f"The network {config.name} of {added.origin}"
    try:
        encoder, width = added.value(config, shape)
        with evaluating(encoder), torch.no_grad():
            given = encoder(torch.zeros(2, *shape))
    except FeddaError:
        raise
    except Exception as error:  # another package's code, on any shape of data
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{network} does not take inputs of shape {shape} ({type(error).__name__}: {why}); "
            "choose another network, or other settings of model and input."
        ) from error
    if getattr(given, "shape", ()) != (2, width):
        raise ModelError(
            f"{network} says that it gives {width} features per input, but for two inputs it gives "
            f"{called(given)}; correct the package."
        )
    return encoder, width


def called(given: object) -> str:
    """What a network gave, for a message."""
    shaped = isinstance(given, torch.Tensor)
    return f"an array of shape {tuple(given.shape)}" if shaped else f"a {type(given).__name__}"


_SMALL: dict[str, Callable[[ModelConfig, tuple[int, ...]], Encoder]] = {
    "digit-cnn": _digit_cnn,
    "lenet": _lenet,
    "mlp": _mlp,
    "identity": lambda config, shape: (nn.Flatten(), math.prod(shape)),
}
