"""What can go wrong between a node and its server, as six exceptions.

Unreachable   no answer, or a passing fault of the server: try the same call again
SessionLost   the server does not know this session any more: connect again
RunOver       the server refuses the call, for example because the run has ended: drop the message
Away          a run cannot be reached while another one asks: work for that, the message comes again
Refused       the server opens no session for this key: the site may wait, or its key is wrong
KeyFileError  the certificate or key is wrong, and trying again will not help
"""

from collections.abc import Callable
from typing import TypeVar

import httpx
from google.protobuf.message import DecodeError

from fedda.errors import KeyFileError
from fedda.ops.refusal import REFUSED, Refusal

MEANWHILE = {"clock", "replay"}  # refusals after which a session goes on
PASSING = (408, 429)  # of all refusals, those after which the same call may succeed

# Of a connection that fails: a part of what the system says, and what to check.
RESOLVE = "its name cannot be resolved; check its spelling in --superlink, and this network's DNS"
CLOSED = "nothing listens there; check the port in --superlink, and whether the server runs"
ADVICE = {
    "name or service not known": RESOLVE,
    "no address associated": RESOLVE,
    "name resolution": RESOLVE,
    "nodename nor servname": RESOLVE,
    "connection refused": CLOSED,
    "no route to host": "no network leads there; check the address in --superlink and the firewall",
    "unreachable": "no network leads there; check the address in --superlink and the firewall",
    "timed out": "no answer in time; check the address in --superlink and the firewall between",
}

Q = TypeVar("Q")
A = TypeVar("A")


class Failure(Exception):
    """A call that failed; `why` is the server's reason, if it gave one."""

    def __init__(self, text: str = "", why: Refusal | None = None) -> None:
        super().__init__(text)
        self.why = why


class Unreachable(Failure):
    pass


class SessionLost(Failure):
    pass


class RunOver(Failure):
    pass


class Away(Failure):
    pass


class Refused(Failure):
    """If `definite`, the key is unknown; else it is unknown, or its old session is still online."""

    def __init__(self, definite: bool, why: Refusal | None = None) -> None:
        super().__init__("", why)
        self.definite = definite


def ask(call: Callable[[Q], A], request: Q) -> A:
    """Make one call, and raise its failure as one of these exceptions."""
    try:
        return call(request)
    except httpx.HTTPStatusError as error:
        why = Refusal.read(error.response.headers.get(REFUSED))
        raise _meaning(error.response.status_code, why) from error
    except (ValueError, DecodeError) as error:
        # For example the web page of a proxy or a hotel, instead of the server's answer.
        raise Unreachable("something else answers at this address") from error
    except httpx.RequestError as error:
        text = str(error).lower()
        if "certificate" in text:
            raise KeyFileError(_certificate_advice(text)) from error
        if "ssl" in text and ("wrong version" in text or "record layer" in text):
            raise KeyFileError(
                "the server at this address does not speak TLS: check --superlink, or give "
                "--insecure if the server runs without TLS on purpose"
            ) from error
        raise Unreachable(_unreachable(error)) from error


def _meaning(status: int, why: Refusal | None) -> Exception:
    if why is not None and why.code in MEANWHILE:
        return Unreachable(why.at_site(), why)
    if status == 401:
        return SessionLost("HTTP 401", why)
    if 400 <= status < 500 and status not in PASSING:
        return RunOver(f"HTTP {status}", why)
    return Unreachable(f"HTTP {status}", why)


def _unreachable(error: httpx.RequestError) -> str:
    """What a person can check when there is no answer, by what the system says."""
    text = str(error)
    if isinstance(error, httpx.ProxyError):
        return f"the proxy refuses to connect ({text})"
    for sign, advice in ADVICE.items():
        if sign in text.lower():
            return advice
    return type(error).__name__ + (f", {text}" if text else "")


def _certificate_advice(text: str) -> str:
    if "expired" in text:
        return (
            "the server's certificate has expired: its operator renews it with `fedda keys renew` "
            "(and check this machine's clock)"
        )
    if "not yet valid" in text:
        return "the server's certificate is not valid yet: check this machine's clock"
    if "mismatch" in text or "not valid for" in text:
        return (
            "the server's certificate is for another host name: use a name it was made for in "
            "--superlink, or have it made again with `fedda keys renew --host NAME`"
        )
    return (
        "the server's certificate is not signed by the authority in --ca: give the ca.crt that "
        "belongs to this server"
    )
