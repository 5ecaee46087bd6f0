"""How a command ends when something a user can mend went wrong: one sentence and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedda.errors import FeddaError, KeyFileError

KEY_TROUBLE = 3


@contextmanager
def clear_exit() -> Iterator[None]:
    """Print a FeddaError as one sentence; exit 3 for keys and certificates, 1 for the rest."""
    try:
        yield
    except FeddaError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(KEY_TROUBLE if isinstance(error, KeyFileError) else 1) from None
