"""What a method adds to a model: which method, and the settings that it is added by.

A model file names both, so whoever has the method can build the same model from it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from fedda import plugins
from fedda.errors import FeddaError, ModelError
from fedda.methods import Method


@dataclass(frozen=True)
class Extension:
    """A method's own layers in a model.

    Attributes:
        method: whose `extend` adds them.
        settings: what that is given, whatever JSON can hold; kept as JSON gives it back, so that
            what a file says equals what was asked for.
    """

    method: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(self.settings, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"The settings by which {self.method} extends a model are {self.settings!r}, which "
                f"a model's file cannot hold ({error}); use plain numbers, texts, lists and tables."
            ) from None
        object.__setattr__(self, "settings", plain)

    @classmethod
    def of(cls, method: Method, options: Any) -> Self | None:
        """The one of a training's model; None if its method adds nothing to that."""
        settings = method.extension(options)
        return None if settings is None else cls(method.name, settings)

    def add_to(self, model: nn.Module) -> None:
        """Let the method add its layers.

        Raises:
            ConfigError: there is no such method here.
            ModelError: it adds nothing to models, or cannot with these settings.
        """
        extend = plugins.method(self.method).extend
        if extend is None:
            raise ModelError(
                f"{self.method} is asked to extend a model, but the one installed here extends "
                "none; install the version of it that the model is made for."
            )
        try:
            extend(model, self.settings)
        except FeddaError:
            raise
        except Exception as error:  # another's code, on settings that a file may have brought
            why = " ".join(str(error).split())[:200]
            raise ModelError(
                f"{self.method} cannot extend this model by {self.settings} "
                f"({type(error).__name__}: {why}); see to its settings and its version."
            ) from error

    def __str__(self) -> str:
        return f"{self.method} {json.dumps(self.settings)}"
