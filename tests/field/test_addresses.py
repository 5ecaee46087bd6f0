"""Every address that people type is read, or refused in one sentence; each printed one is typed."""

import os
from collections.abc import Iterator

import httpx
import pytest

from fedda.errors import ConfigError
from fedda.ops import proxies
from fedda.ops.address import Address, address, host
from fedda.ops.proxies import loopback_is_direct, proxy_to

TYPED = {
    "hub.example.org:8443": Address("hub.example.org", 8443),
    "hub.example.org": Address("hub.example.org", 8443),
    " hub:1 ": Address("hub", 1),
    "https://hub:8443/": Address("hub", 8443),
    "HTTPS://hub:8443//": Address("hub", 8443),
    "http://127.0.0.1:8000": Address("127.0.0.1", 8000),
    "hub.example.org.:8443": Address("hub.example.org.", 8443),
    "klinik-münchen.de:8443": Address("klinik-münchen.de", 8443),
    "under_score:8443": Address("under_score", 8443),
    "0.0.0.0:65535": Address("0.0.0.0", 65535),
    "[::1]:8443": Address("::1", 8443),
    "::1": Address("::1", 8443),
    "[::1]": Address("::1", 8443),
    "https://[2001:db8::7]:9/": Address("2001:db8::7", 9),
    "[fe80::1%eth0]:8443": Address("fe80::1%eth0", 8443),
    "[::ffff:10.0.0.1]:8443": Address("::ffff:10.0.0.1", 8443),
}
REFUSED = [
    *(
        "",
        "  ",
        "-",
        "hub:",
        ":8443",
        "hub:0",
        "hub:65536",
        "hub:99999999999",
        "hub:port",
        "hub:-1",
    ),
    *("hub:84 43", "a b:1", "hub\t1", "hub\n:1", "hub:\u0663", "hub:1,other:2", "hub:1?x", ".:1"),
    *("https://", "ftp://hub:21", "hub:8443/path", "user@hub:1", "user:word@hub:1", ":::1:1"),
    *("::1:8443", "2001:db8::7:9000"),
    *("[]:1", "[::1:8443", "::1]:8443", "[hub]:8443", "[10.0.0.1]:8443"),
]


@pytest.mark.parametrize("text", TYPED)
def test_what_people_type_is_read_and_what_is_printed_can_be_typed(text: str) -> None:
    found = address(text)
    assert found == TYPED[text]
    assert address(str(found)) == found
    url = httpx.URL(f"https://{found}")  # as flwr's client makes one
    assert (url.port or 443) == found.port


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_address_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        address(text)
    assert "--superlink" in str(error.value) and "\n" not in str(error.value)


def test_where_a_port_is_needed_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        address("hub", port=None)
    with pytest.raises(ConfigError):
        address("::g:1", port=None)


@pytest.mark.parametrize(
    ("text", "read"), [("::", "::"), ("[::1]", "::1"), (" hub/ ", "hub"), ("0.0.0.0", "0.0.0.0")]
)
def test_a_host_is_read_without_a_port(text: str, read: str) -> None:
    assert host(text) == read


@pytest.mark.parametrize("text", ["hub:8443", "https://hub", "", "a b", "[::1]:8443"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--host .* is no host"):
        host(text)


HUB = Address("hub.example.org", 8443)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without proxies, and put back what a test sets."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    monkeypatch.setattr(proxies, "_dropped", {})
    monkeypatch.setattr(proxies, "_ranges", [])
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("bypass", ["", "intranet.example.org"])
def test_this_machine_is_dialled_through_no_proxy(variable: str, bypass: str) -> None:
    os.environ[variable] = "http://ann:secret@proxy.example.org:3128"
    os.environ["NO_PROXY"] = bypass
    loopback_is_direct()
    loopback_is_direct()
    with httpx.Client() as client:
        pools = {
            at: client._transport_for_url(httpx.URL(f"https://{at}"))
            for at in ("127.0.0.1:1", "localhost:1", "[::1]:1", str(HUB))
        }
    straight = [at for at, pool in pools.items() if pool is client._transport]
    assert straight == ["127.0.0.1:1", "localhost:1", "[::1]:1"]
    assert proxy_to(Address("127.0.0.1", 1), tls=True) == ""
    assert proxy_to(HUB, tls=True) == "http://proxy.example.org:3128"
    names = os.environ["NO_PROXY"].split(",")
    assert len(names) == len(set(names)) and (not bypass or bypass in names)


def test_hosts_that_the_environment_excepts_are_dialled_directly() -> None:
    os.environ["https_proxy"] = "proxy:3128"
    os.environ["no_proxy"] = "example.org"
    assert proxy_to(HUB, tls=True) == ""
    os.environ["no_proxy"] = "*"
    loopback_is_direct()
    assert os.environ["no_proxy"] == "*"
    assert proxy_to(HUB, tls=True) == ""
    os.environ["no_proxy"] = ""
    assert proxy_to(HUB, tls=True) == "http://proxy:3128"
    assert proxy_to(HUB, tls=False) == ""


@pytest.mark.parametrize(
    ("pattern", "host", "direct"),
    [
        ("10.0.0.0/8", "10.20.30.40", True),
        ("a.example.org, 10.0.0.0/8", "10.20.30.40", True),
        ("10.0.0.0/8", "11.20.30.40", False),
        ("10.0.0.0/8", "hub.example.org", False),
        ("fd00::/8", "fd00::5", True),
        ("*.example.org", "hub.example.org", True),
        ("*.example.org", "example.com", False),
    ],
)
def test_ranges_are_excepted_as_curl_excepts_them(pattern: str, host: str, direct: bool) -> None:
    os.environ["https_proxy"], os.environ["no_proxy"] = "http://proxy:3128", pattern
    loopback_is_direct()
    assert (proxy_to(Address(host, 443), tls=True) == "") == direct
    url = httpx.URL(f"https://{Address(host, 443)}")
    with httpx.Client() as client:
        assert (client._transport_for_url(url) is client._transport) == direct


def test_a_socks_proxy_that_cannot_be_used_ends_no_client_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxies, "find_spec", lambda name: None)
    os.environ["ALL_PROXY"] = "socks5://ann:secret@proxy:1080"
    loopback_is_direct()
    httpx.Client().close()  # without the package it would raise ImportError
    assert proxy_to(Address("::1", 1), tls=True) == ""
    with pytest.raises(ConfigError, match=r"ALL_PROXY names the proxy socks5://proxy:1080, and"):
        proxy_to(HUB, tls=True)
