"""The programs' entry points: Ctrl-C ends them by a word while their modules are imported."""

import os
import signal
from importlib import import_module


def main(program: str = "main") -> None:
    """Entry point of `fedda`, or of another program in `fedda.cli`."""
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:  # not where it is ignored, as in the background
        signal.signal(signal.SIGINT, _end)
    start = getattr(import_module("fedda.cli"), program)
    signal.signal(signal.SIGINT, former)
    start()


def client() -> None:
    """Entry point of `fedda-client`."""
    main("client")


def _end(*_: object) -> None:
    """End at once: an exception in the midst of an import may come out as another."""
    os.write(2, b"\nstopped before anything began\n")
    os._exit(130)
