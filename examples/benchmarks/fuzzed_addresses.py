"""Addresses of a server, drawn by chance, and what they mean by an independent reading."""

import ipaddress
import re

import numpy as np

from fedda.errors import FeddaError
from fedda.ops.address import address

HOSTS = ("hub.example.org", "localhost", "127.0.0.1", "10.0.0.300", "::1", "fe80::1", "2001:db8::7")
HOSTS += ("hub_1", "-hub", "hub example", "", "*", "h" * 70, "hub.", "münchen.example", "::g", "1")
PORTS = ("8443", "1", "65535", "0", "65536", "99999", "", "x", "-1", "+80", "08443", "٣", "80 ")
FORMS = ("{}:{}", "{}:{}", "[{}]:{}", "https://{}:{}", "{}:{}/", "user@{}:{}", " {}:{}", "[{}:{}")
LABEL = re.compile(r"(?![-])[^\W]([\w-]*\w)?")
BRACKETS = re.compile(r"\[([0-9a-f:]+)\](?::(.*))?")
USUAL = 8443  # the port if none is named


def parsed(text: str) -> tuple[str, int]:
    """Host and port, as every command takes them.

    Raises:
        FeddaError: it takes no such address.
    """
    found = address(text)
    return found.host, found.port


def meant(text: str) -> tuple[str, int] | None:
    """Host and port of an address; None if it is none."""
    rest = re.sub(r"^https?://", "", text.strip()).rstrip("/")
    if rest.startswith("["):
        split = BRACKETS.fullmatch(rest)
        host, port = split.groups() if split else ("", "")
        if ":" not in (host or ""):
            return None
    elif ":" in rest.rpartition(":")[0] and _is_host(rest.rpartition(":")[0]):
        return None  # it could also be an address alone
    elif _is_host(rest.rpartition(":")[0]):
        host, _, port = rest.rpartition(":")
        port = port if re.fullmatch("[0-9]+", port) or not _is_host(rest) else None
    else:
        host, port = rest, None
    if not _is_host(host):
        return None
    if port is None:
        return host, USUAL
    whole = re.fullmatch("[0-9]+", port, re.ASCII) and 1 <= int(port) <= 65535
    return (host, int(port)) if whole else None


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
        return True
    except ValueError:
        labels = text.removesuffix(".").split(".")
        fit = all(LABEL.fullmatch(label) and len(label) < 64 for label in labels)
        return fit and not labels[-1].isdecimal() and len(text) < 256


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
