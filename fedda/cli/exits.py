"""How a command ends on an error that the user can correct: one sentence and an exit code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedda.errors import FeddaError, KeyFileError
from fedda.ops.proxies import loopback_is_direct
from fedda.results.plainly import echo

KEY_TROUBLE, INTERRUPTED = 3, 130


@contextmanager
def clear_exit() -> Iterator[None]:
    """Print a correctable error as one sentence; exit 3 for keys and certificates, else 1."""
    loopback_is_direct()
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        path = os.fsdecode(error.filename)
        echo(f"error: {path} cannot be used ({error.strerror}); give another", err=True)
        raise typer.Exit(1) from None
    except FeddaError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(KEY_TROUBLE if isinstance(error, KeyFileError) else 1) from None


@contextmanager
def interruptible(text: str) -> Iterator[None]:
    """At Ctrl-C, say what that leaves behind; exit 130."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"\n{text}", err=True)
        raise typer.Exit(INTERRUPTED) from None
