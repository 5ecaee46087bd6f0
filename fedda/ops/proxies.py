"""Which proxy a program dials through: none to this machine, the environment's to others."""

import ipaddress
import os
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from fedda.errors import ConfigError

from .address import Address

HERE = ("localhost", "127.0.0.1", "::1")
_dropped: dict[str, str] = {}  # of schemes that this installation cannot use, by variable

_ranges: list[str] = []  # of NO_PROXY


def loopback_is_direct() -> None:
    """Let no program that runs here, or that it starts, dial this machine through a proxy.

    httpx, urllib and gRPC read these variables. A SOCKS proxy that httpx lacks a package for ends
    each of its clients, also one that dials this machine; so it is forgotten, but for `proxy_to`.
    """
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if named.strip() != "*":
        names = [name.strip() for name in named.split(",") if name.strip()]
        names += [name for name in HERE if name not in names]
        _ranges.extend(name for name in names if "/" in name)
        names = [name for name in names if not {*"/:"} <= {*name}]  # httpx ends at IPv6 ranges
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(names)
    for name, value in list(os.environ.items()):
        socks = value.lower().startswith("socks") and find_spec("socksio") is None
        if name.lower().endswith("_proxy") and socks:
            _dropped[name.lower()] = os.environ.pop(name)


def proxy_to(address: Address, tls: bool) -> str:
    """The proxy through which an address is dialled, without its password; empty if by none.

    Raises:
        ConfigError: the environment names one that cannot be used.
    """
    proxy = proxy_as_named(address, tls)
    return _shown(proxy) if proxy else ""


def proxy_as_named(address: Address, tls: bool) -> str:
    """The same as the environment names it, with a password if it has one.

    Raises:
        ConfigError: the environment names one that cannot be used.
    """
    if address.is_loopback or proxy_bypass(f"{address.host}:{address.port}"):
        return ""
    exempt = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    if any(_covers(pattern.strip(), address.host) for pattern in (*exempt, *_ranges)):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*exempt, address.host])
        return ""
    kinds, found = ("https" if tls else "http", "all"), getproxies()
    lost = [name for name in (f"{kind}_proxy" for kind in kinds) if name in _dropped]
    if lost:
        raise ConfigError(
            f"{lost[0].upper()} names the proxy {_shown(_dropped[lost[0]])}, and this installation "
            "cannot use SOCKS: install it with `pip install 'httpx[socks]'`, or name the server's "
            f"host in NO_PROXY ({address.host})"
        )
    return next((found[kind] for kind in kinds if found.get(kind)), "")


def named() -> bool:
    """Whether the environment names a proxy, used or not."""
    return bool(_dropped) or any(name != "no" for name in getproxies())


def _covers(pattern: str, host: str) -> bool:
    """Whether a part of NO_PROXY that httpx does not know covers a host: 10.0.0.0/8, *.hub.org."""
    if pattern.startswith("*."):
        return host.lower().endswith(pattern[1:].lower())
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(pattern.strip("[]"), strict=False)
    except ValueError:
        return False


def _shown(proxy: str) -> str:
    """A proxy's URL without user and password."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
