"""How a command ends on an error that the user can correct: one sentence and an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from fedda.errors import FULL, FeddaError, KeyFileError, UsageError, reason
from fedda.flower.supported import refusal
from fedda.ops.proxies import loopback_is_direct
from fedda.results.escaping import OUTPUT, echo, outlasting

USAGE, KEY_TROUBLE, INTERRUPTED = 2, 3, 130
CODES = {UsageError: USAGE, KeyFileError: KEY_TROUBLE}


@contextmanager
def clear_exit() -> Iterator[None]:
    """Print a correctable error as one sentence; exit by `CODES`, else 1."""
    loopback_is_direct()
    try:
        yield
    except OSError as error:
        is_full = error.errno in FULL
        if (is_full and error.filename == OUTPUT) or (not is_full and error.filename is None):
            raise  # `as_a_program` says that the output's disk is full
        where, advice = "a file", "make room in the folders of --dir, --out, --state-dir and --log"
        if error.filename is not None:
            where, advice = os.fsdecode(error.filename), "make room there"
        if not is_full:
            advice = "give the path of a file or folder that this account can use"
        echo(f"error: {where} cannot be used ({reason(error)}): {advice}", err=True)
        raise typer.Exit(1) from None
    except FeddaError as error:
        echo(f"error: {error}", err=True)
        codes = (code for kind, code in CODES.items() if isinstance(error, kind))
        raise typer.Exit(next(codes, 1)) from None


@contextmanager
def interruptible(text: str) -> Iterator[None]:
    """At Ctrl-C, say what that leaves behind; exit 130."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"\n{text}", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def as_a_program() -> Iterator[None]:
    """End a whole program with a sentence where its output goes to a file whose disk is full.

    Output that was closed, as by `>&-`, or that nobody reads on, goes nowhere. And Flower,
    which asks for it when it is imported, gets a home where the account has none. Accounts
    outside its group can write no file that it makes, as of a server's keys, whatever the umask.
    """
    if sentence := refusal():  # before it imports a Flower that it would not understand
        sys.exit(f"error: {sentence}")
    os.umask(os.umask(0o077) | 0o002)
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers: each gets its own
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    sys.stdout, sys.stderr = outlasting(sys.stdout), outlasting(sys.stderr)
    try:
        Path.home()
    except RuntimeError:
        os.environ.setdefault("FLWR_HOME", "/nonexistent")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL:
            raise
        with suppress(OSError):
            echo(f"error: the output cannot be written ({reason(error)}); make room", err=True)
        sys.exit(1)
