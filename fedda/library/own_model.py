"""A network that a program brings itself, for runs in its own process.

A site runs only code that is installed on its machine, so such a network cannot be trained over a
network of machines: for that, put the function into a package with an entry point `fedda.models`
(`fedda.plugins`).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from fedda import plugins
from fedda.config import ModelConfig
from fedda.config.sections import Flat
from fedda.errors import ConfigError, ModelError
from fedda.models import evaluating
from fedda.models.encoders import called

Network = Callable[[tuple[int, ...]], nn.Module]


def settings_of(network: Network | None) -> Flat:
    """The settings that choose a network of one's own, as it is; empty without one.

    Raises:
        ConfigError: it is a module and not a function that makes one.
    """
    if network is None:
        return {}
    if isinstance(network, nn.Module) or not callable(network):
        raise ConfigError(
            f"network is a {type(network).__name__}, but every site needs a network of its own; "
            "give a function that takes the shape of one input and makes the network."
        )
    plain = re.sub(r"[^\w.-]", "-", getattr(network, "__name__", type(network).__name__))
    return {"model.name": f"own:{plain[:90]}", "model.hidden": ""}


@contextmanager
def lent(network: Network | None) -> Iterator[None]:
    """Let the settings of a `with` block name the network, in this process alone."""
    name = settings_of(network).get("model.name")
    with plugins.lending("models", str(name), _made(network)) if network else nullcontext():
        yield


def _made(network: Network) -> Callable[[ModelConfig, tuple[int, ...]], tuple[nn.Module, int]]:
    """What makes encoders by a program's function, as a network of another package would."""
    first = True

    def made(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
        """Make an encoder for inputs of a shape -> the encoder, its number of features."""
        nonlocal first
        encoder = network(shape)
        if not isinstance(encoder, nn.Module):
            raise ModelError(
                f"network({shape}) gave a {type(encoder).__name__}; give a function that makes a "
                "torch.nn.Module."
            )
        if first:
            with torch.random.fork_rng(devices=[]):  # another one's random values change none here
                again = network(shape)
            if again is encoder:
                raise ModelError(
                    "network gave the same module twice, but every site needs one of its own; let "
                    "the function make a new one each time."
                )
            first = False
        with evaluating(encoder), torch.no_grad():
            features = encoder(torch.zeros(2, *shape))
        found = getattr(features, "shape", ())
        if len(found) != 2 or found[0] != 2:
            raise ModelError(
                f"network({shape}) gives {called(features)} for two inputs; it must give one row "
                "of features per input, as after nn.Flatten. fedda adds the layer that classifies "
                "them."
            )
        return encoder, found[1]

    return made
