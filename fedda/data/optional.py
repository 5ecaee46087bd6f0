"""Packages that only some data, networks and files need: `pip install fedda` leaves them out."""

from importlib import import_module
from typing import Any

from fedda.errors import DataError, FeddaError


def needed(module: str, extra: str, what: str, kind: type[FeddaError] = DataError) -> Any:
    """Import a module of an optional package.

    Raises:
        DataError: it is not installed; or an error of another kind.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise kind(
            f"{what} needs the package {package}, which is not installed: "
            f"pip install 'fedda[{extra}]'"
        ) from error
