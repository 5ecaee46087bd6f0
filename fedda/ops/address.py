"""Addresses of servers as people type them, read and written in one place."""

import ipaddress
import re
from dataclasses import dataclass

from fedda.errors import UsageError

PORT = 8443  # where sites dial a server
LABEL = re.compile(r"\w([\w-]{0,61}\w)?")  # of a name; also with letters beyond ASCII
SCHEMES = ("https://", "http://")


@dataclass(frozen=True)
class Address:
    """A host, without brackets, and a port; as text it can be typed again."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this machine and to no other."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.rstrip(".").lower() == "localhost"


def address(text: str, option: str = "--superlink", port: int | None = PORT) -> Address:
    """Read HOST:PORT, also with a scheme, spaces around it, or a slash at its end.

    An address of IPv6 with a port needs brackets: `::1:8443` could also be an address without one.

    Args:
        text: what was typed.
        option: where, for the error.
        port: the port if the text names none; None: it must.

    Raises:
        UsageError: it is no address.
    """
    rest = text.strip()
    for scheme in SCHEMES:
        if rest.lower().startswith(scheme):
            rest = rest[len(scheme) :]
    rest = rest.rstrip("/")
    before, _, after = rest.rpartition(":")
    if ":" in before and _is_host(before) and not before.startswith("["):
        raise UsageError(
            f"{option} {text!r} could be an address alone, or one with a port: write "
            f"[{before}]:{after} or [{rest}]"
        )
    if after.isascii() and after.isdigit() and _is_host(before):
        found, number = before, int(after)
    elif port is not None and _is_host(rest):
        found, number = rest, port
    else:
        raise UsageError(
            f"{option} {text!r} is not HOST:PORT: give it like hub.example.org:8443 or [::1]:8443"
        )
    if not 0 < number < 2**16:
        raise UsageError(f"{option} {text!r} has the port {number}: give one from 1 to 65535")
    return Address(found.strip("[]"), number)


def host(text: str, option: str = "--host") -> str:
    """Read a host name or address without a port -> it without brackets.

    Raises:
        UsageError: it is none.
    """
    rest = text.strip().rstrip("/")
    if not _is_host(rest):
        raise UsageError(
            f"{option} {text!r} is no host: give a name or an address, without scheme and port"
        )
    return rest.strip("[]")


def _is_host(text: str) -> bool:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return bool(ipaddress.ip_address(bare)) and (bare == text or ":" in bare)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        name = all(map(LABEL.fullmatch, labels)) and not labels[-1].isdecimal()
        return bare == text and len(text) < 256 and name  # a last number is of an address
