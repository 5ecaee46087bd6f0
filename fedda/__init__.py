"""Federated unsupervised domain adaptation, on Flower.

simulate   train a method over sites of this machine
compare    train several methods on the same sites, targets and seeds
load       a finished run, from its folder
"""

from importlib import import_module
from typing import Any

from fedda import halves

__version__ = "0.2.0"
# The names are loaded below; `__init__.pyi` says their types.
# pyright: reportUnsupportedDunderAll=false
__all__ = [
    "Comparison",
    "Doubt",
    "Model",
    "Results",
    "Run",
    "Training",
    "__version__",
    "compare",
    "load",
    "simulate",
]

# Where each name is; loaded when it is first used, so that `import fedda` takes no time.
_PLACES = {
    "simulated": ("simulate",),
    "outcome": ("Doubt", "Model", "Results", "Run", "Training", "load"),
}

halves.name_as_in_wheel()


def __getattr__(name: str) -> Any:
    """Load a name of the library when it is first asked for."""
    for module, names in _PLACES.items():
        if name in names:
            found = getattr(import_module("fedda.library." + module), name)
            globals()[name] = found
            return found
    if name in __all__:
        from importlib.metadata import entry_points  # it takes 30 ms

        for point in entry_points(group="fedda.library", name=name):
            return globals().setdefault(name, point.load())
    raise AttributeError(f"module 'fedda' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
