"""Waiting for a server: repeating a call, and connecting again, with growing pauses."""

import time
from collections.abc import Callable
from typing import TypeVar

from fedda.errors import KeyFileError
from fedda.ops.proxies import named
from fedda.ops.refusal import Refusal

from .failures import Refused, SessionLost, Unreachable
from .fleet import Fleet

BACK_OFF_S = (0.5, 5.0)
QUIET_S = (60.0, 3600.0)  # until it is said again what a site waits for: at first, and at most
# How long to try a key that the server certainly does not know: the server may just be starting.
UNKNOWN_KEY_S = 5.0

REVOKED = Refusal("revoked")
OnEvent = Callable[[str, str], None]
T = TypeVar("T")


def persist(call: Callable[[], T], tell: OnEvent) -> T:
    """Repeat a call while the server does not answer."""
    pause, longest = BACK_OFF_S
    failed = False
    while True:
        try:
            result = call()
        except Unreachable as error:
            if not failed:
                tell("waiting", f"the server does not answer ({error}); trying again")
            failed = True
            time.sleep(pause)
            pause = min(2 * pause, longest)
        else:
            if failed:
                tell("back", "the server answers again")
            return result


def join(
    connect: Callable[[], Fleet],
    superlink: str,
    tell: OnEvent,
    patience: float,
    again: bool = False,
    proxy: str = "",
) -> Fleet:
    """Connect: wait for an answer without limit, but for a refused key only `patience` seconds.

    Args:
        connect: opens a session.
        superlink: the server's address, for what is told.
        tell: called with what keeps this site waiting.
        patience: seconds to try a key that the server may only refuse for now.
        again: whether the server has accepted this key before.
        proxy: the one that the server is dialled through, for what is told.

    Raises:
        KeyFileError: the server keeps refusing the key, or the signature made with it.
    """
    pause, longest = BACK_OFF_S
    refused_at = None
    shown, said_at, quiet = "", time.monotonic(), QUIET_S[0]
    began = said_at
    while True:
        try:
            return connect()
        except Unreachable as error:
            text = f"for {superlink}, which does not answer yet: {error}"
            text += " (it is dialled directly, and not through this environment's proxy)" * named()
            if proxy:
                fact = str(error).partition(";")[0]
                text = (
                    f"for {superlink}, to which the proxy {proxy} gives no way yet ({fact}): check "
                    "the proxy, or name the server's host in NO_PROXY"
                )
            if error.why is not None:
                text = f"for {superlink}, which refuses this site: {error}"
            refused_at = None
        except (Refused, SessionLost) as error:
            unknown = isinstance(error, SessionLost)
            definite = not isinstance(error, Refused) or error.definite
            now = time.monotonic()
            refused_at = now if refused_at is None else refused_at
            for_long = now - refused_at > (min(patience, UNKNOWN_KEY_S) if definite else patience)
            if error.why is not None and (for_long or error.why.lasts):
                raise KeyFileError(_reason(superlink, error.why, again)) from error
            if for_long:
                raise KeyFileError(_refusal(superlink, definite, unknown, again)) from error
            text = f"for {superlink}, which does not know this key (yet)"
            if error.why is not None:
                text = f"for {superlink}, which refuses this site: {error.why.at_site()}"
            elif not definite:
                text = (
                    f"for {superlink}, which refuses this key: either it is not registered, or the "
                    f"previous session still counts as online (up to {patience:.0f} s)"
                )
        now = time.monotonic()
        if text != shown:
            tell("waiting", text)
            shown, said_at, quiet = text, now, QUIET_S[0]
        elif now - said_at >= quiet:
            tell("waiting", f"for {now - began:.0f} s now, {text}")
            said_at, quiet = now, min(2 * quiet, QUIET_S[1])
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _reason(superlink: str, why: Refusal, again: bool) -> str:
    """What the server says why it refuses this site, in one sentence."""
    if again and why.code in ("unknown", "revoked"):
        return f"{superlink} does not accept this site's key any more: {REVOKED.at_site()}"
    return f"{superlink} does not accept this site's key: {why.at_site()}"


def _refusal(superlink: str, definite: bool, unknown: bool, again: bool) -> str:
    """Why the server refuses a key, in one sentence."""
    if definite and again:
        return (
            f"{superlink} does not accept this site's key any more: it was revoked, or is not "
            "registered there now; ask the server's operator whether this site may take part again"
        )
    reasons = ["it is not registered", "was revoked"]
    if not definite:
        reasons.append("another process uses it")
    if unknown:  # a wrong clock has the same effect
        reasons.append("this machine's clock is more than five minutes wrong")
    *first, last = reasons
    return (
        f"{superlink} does not accept this site's key: {', '.join(first)}, or {last}; ask the "
        "server's operator to run `fedda keys list`, and give every site its own key"
    )
