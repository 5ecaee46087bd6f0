"""Packages that only some forms of data need, and that `pip install fedda` leaves out."""

from importlib import import_module
from typing import Any

from fedda.errors import DataError


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional package.

    Raises:
        DataError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{what} needs the package {package}, which is not installed: "
            f"pip install 'fedda[{extra}]'"
        ) from error
