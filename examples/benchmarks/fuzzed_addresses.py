"""Addresses of a server, drawn by chance, and what they mean by an independent reading."""

import ipaddress
import re

import numpy as np

from fedda.cli.client import _check_options  # pyright: ignore[reportPrivateUsage]
from fedda.errors import FeddaError

HOSTS = ("hub.example.org", "localhost", "127.0.0.1", "10.0.0.300", "::1", "fe80::1", "2001:db8::7")
HOSTS += ("hub_1", "-hub", "hub example", "", "*", "h" * 70, "hub.", "münchen.example", "::g", "1")
PORTS = ("8443", "1", "65535", "0", "65536", "99999", "", "x", "-1", "+80", "08443", "٣", "80 ")
FORMS = ("{}:{}", "{}:{}", "[{}]:{}", "https://{}:{}", "{}:{}/", "user@{}:{}", " {}:{}", "[{}:{}")
NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def parsed(text: str) -> tuple[str, int]:
    """Host and port, as `fedda-client --superlink` takes them.

    Raises:
        FeddaError: it takes no such address.
    """
    _check_options(text, None, None, insecure=True)
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def meant(text: str) -> tuple[str, int] | None:
    """Host and port of an address; None if it is none."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        return None
    if host.startswith("[") != host.endswith("]"):
        return None
    bare = host[1:-1] if host.startswith("[") else host
    try:
        version = ipaddress.ip_address(bare).version
    except ValueError:
        labels = bare.removesuffix(".").split(".")
        name = all(NAME.fullmatch(label) for label in labels) and not host.startswith("[")
        return (bare, int(port)) if name and not labels[-1].isdecimal() else None
    return (bare, int(port)) if version == 6 or bare == host else None


def addresses(rng: np.random.Generator) -> tuple[str, str, str]:
    """One address -> it, right, refused or wrong, and what was seen."""
    host, port, form = (str(rng.choice(each)) for each in (HOSTS, PORTS, FORMS))
    text = form.format(host, port)
    right = meant(text)
    try:
        found = parsed(text)
    except FeddaError as error:
        seen = str(error)
        return text, ("wrong" if "\n" in seen else "refused" if right else "right"), seen
    except Exception as error:
        return text, "wrong", f"{type(error).__name__}: {error}"
    return text, ("right" if found == right else "wrong"), f"taken as {found}, but means {right}"
