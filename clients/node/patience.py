"""Waiting for a server: repeating a call, and connecting again, with growing pauses."""

import time
from collections.abc import Callable
from typing import TypeVar

from fedda.errors import KeyFileError

from .failures import Refused, SessionLost, Unreachable
from .fleet import Fleet

BACK_OFF_S = (0.5, 5.0)
# How long to try a key that the server certainly does not know: the server may just be starting.
UNKNOWN_KEY_S = 5.0

OnEvent = Callable[[str, str], None]
T = TypeVar("T")


def persist(call: Callable[[], T], tell: OnEvent, ends: float = float("inf")) -> T:
    """Repeat a call while the server does not answer, until the deadline."""
    pause, longest = BACK_OFF_S
    failed = False
    while True:
        try:
            result = call()
        except Unreachable as error:
            if not failed:
                tell("waiting", f"the server does not answer ({error}); trying again")
            failed = True
            if time.monotonic() + pause > ends:
                raise
            time.sleep(pause)
            pause = min(2 * pause, longest)
        else:
            if failed:
                tell("back", "the server answers again")
            return result


def join(connect: Callable[[], Fleet], superlink: str, tell: OnEvent, patience: float) -> Fleet:
    """Connect: wait for an answer without limit, but for a refused key only `patience` seconds.

    Raises:
        KeyFileError: the server keeps refusing the key, or it refuses the signature.
    """
    pause, longest = BACK_OFF_S
    refused_at = None
    shown = ""
    while True:
        try:
            return connect()
        except Unreachable as error:
            text = f"for {superlink}, which does not answer yet ({error})"
            refused_at = None
        except SessionLost as error:
            raise KeyFileError(
                f"{superlink} does not accept this machine's signature: check that its clock is "
                "right to within five minutes, and that --key is this site's own"
            ) from error
        except Refused as error:
            now = time.monotonic()
            refused_at = now if refused_at is None else refused_at
            if now - refused_at > (min(patience, UNKNOWN_KEY_S) if error.definite else patience):
                raise KeyFileError(
                    f"{superlink} does not accept this site's key: it is not registered, was "
                    "revoked, or another process uses it; ask the server's operator to run "
                    "`fedda keys list`, and give every site its own key"
                ) from error
            text = (
                f"for {superlink}, which refuses this key: either it is not registered, or the "
                f"previous session still counts as online (up to {patience:.0f} s)"
            )
        if text != shown:
            tell("waiting", text)
        shown = text
        time.sleep(pause)
        pause = min(2 * pause, longest)
