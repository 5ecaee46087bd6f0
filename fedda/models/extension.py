"""The layers that a method adds to a model, described by the method's name and its settings.

A model file names both, so that any machine with the method installed can build the same model.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from fedda import plugins
from fedda.errors import FeddaError, ModelError
from fedda.methods import Method

# What adds the layers of an extension that belongs to no method, by the extension's name.
EXTENDERS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {}


@dataclass(frozen=True)
class Extension:
    """A method's own layers in a model."""

    method: str  # name of the method, whose `extend` adds the layers; or a name in EXTENDERS
    # what `extend` is given: any values that JSON can hold. They pass through JSON once, so that
    # they equal those read from a file.
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(self.settings, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{self.method} extends a model with the settings {self.settings!r}, which "
                f"a model's file cannot hold ({error}); use plain numbers, texts, lists and tables."
            ) from None
        object.__setattr__(self, "settings", plain)

    @classmethod
    def of(cls, method: Method, options: Any) -> Self | None:
        """The extension of a training's model; None if its method adds no layers."""
        settings = method.extension(options)
        return None if settings is None else cls(method.name, settings)

    def add_to(self, model: nn.Module) -> None:
        """Let the method add its layers.

        Raises:
            ConfigError: the method is not installed on this machine.
            ModelError: the method adds no layers, or cannot add them with these settings.
        """
        extend = EXTENDERS.get(self.method) or plugins.method(self.method).extend
        if extend is None:
            raise ModelError(
                f"The model needs layers of {self.method}, but the version installed here adds "
                "none; install the version that made the model."
            )
        try:
            extend(model, self.settings)
        except FeddaError:
            raise
        except Exception as error:  # another package's code, perhaps with a file's settings
            why = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{self.method} cannot add its layers to this model with the settings "
                f"{self.settings} ({type(error).__name__}: {why}); check the settings, and the "
                f"installed version of {self.method}."
            ) from error

    @property
    def known(self) -> bool:
        """Whether this machine has what adds the layers."""
        return self.method in EXTENDERS or self.method in plugins.methods()

    @property
    def own(self) -> bool:
        """Whether it is fedda that adds the layers, and no other package."""
        return self.method in EXTENDERS or self.method in plugins.own_methods()

    def __str__(self) -> str:
        return f"{self.method} {json.dumps(self.settings)}"
