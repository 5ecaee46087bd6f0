"""Ending what a node computes when nobody waits for it any more, for one as its key was revoked."""

import signal
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

from .failures import SessionLost


class Pointless(BaseException):
    """The session is lost, so nobody waits for what is being computed; raised in mid-work."""


class Interrupt:
    """Lets another thread end what the main thread computes, as a signal would.

    Within its `with` block `ask` raises Pointless in the main thread, if it is inside `working`.
    """

    def __init__(self) -> None:
        self._working = False
        here = threading.current_thread() is threading.main_thread()
        self._main = here and hasattr(signal, "pthread_kill")  # not on Windows: work goes on

    def __enter__(self) -> "Interrupt":
        if self._main:
            self._before = signal.signal(signal.SIGUSR1, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGUSR1, self._before)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Turn Pointless, raised in the `with` block, into SessionLost."""
        try:
            self._working = True
            yield
        except Pointless as error:
            raise SessionLost from error
        finally:
            self._working = False

    def ask(self) -> None:
        """End the work that the main thread is in; called from another thread."""
        if self._main and self._working:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _raise(self, number: int, frame: types.FrameType | None) -> None:
        if self._working:
            self._working = False
            raise Pointless
