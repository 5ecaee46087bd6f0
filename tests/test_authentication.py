"""Who signed a site's request, which site it is, and who may call the operator's port."""

import asyncio
import base64
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from typer.testing import CliRunner

from fedda import __version__
from fedda.cli import app
from fedda.cli.client import _default_name
from fedda.errors import RunError
from fedda.flower import fleet_pb2
from fedda.lane.invitation import sign
from fedda.ops import keys
from fedda.ops.refusal import OFFERS, Refusal, offers
from fedda.ops.spawn import LOOPBACK, REGISTERED
from server.journal import Journal
from server.presence import Sites
from server.superlink import authentication, port_owner, registered
from server.superlink.authentication import Caller, Guard, Unwelcome, Used
from server.superlink.filter import FLEET, FLEET_PREFIX, LocalOnly, Traffic
from server.superlink.listener import CONNECTION, Listener, ListenerLimits, neighbours
from server.superlink.registered import RegisteredKey
from server.superlink.rejections import Rejections
from server.superlink.site_calls import RefusedCall, SiteCalls
from tests.local_grid import FAST, RunConfig, ScriptedGrid, make_domains

KEY = ec.generate_private_key(ec.SECP384R1())
PUBLIC = keys.pem(KEY.public_key())
NODE: Any = {"node_id": 7}
Headers = list[tuple[bytes, bytes]]


def signed(age: float = 0.0, key: ec.EllipticCurvePrivateKey = KEY) -> Headers:
    """Headers as a SuperNode makes them, `age` seconds ago."""
    stamp = (datetime.now(UTC) - timedelta(seconds=age)).isoformat().encode()
    public = base64.b64encode(keys.pem(key.public_key()))
    values = (public, sign(key, stamp).encode(), stamp)
    return list(zip(authentication.HEADERS, values, strict=True))


def refusal(made: Guard, headers: Headers) -> str:
    found = made.caller(headers)
    assert isinstance(found, Unwelcome)
    return found.why.code


def test_a_signature_counts_once_and_a_revoked_key_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {PUBLIC: 7}
    made = Guard(nodes.get)
    headers = signed()
    caller = made.caller(headers)
    assert isinstance(caller, Caller) and (caller.node_id, caller.key) == (7, PUBLIC)
    assert refusal(made, headers) == "replay"
    assert isinstance(made.caller(signed()), Caller)
    nodes.clear()
    monkeypatch.setattr(authentication, "KNOWN_S", 0)
    made._known.clear()
    assert refusal(made, signed()) == "unknown"
    made = Guard(nodes.get, revoked=PUBLIC.__eq__)
    assert refusal(made, signed()) == "revoked"


@pytest.mark.parametrize("age", [-6.0, 306.0])
def test_a_signature_of_another_time_does_not_count(age: float) -> None:
    found = Guard({PUBLIC: 7}.get).caller(signed(age))
    assert isinstance(found, Unwelcome) and (found.why.code, found.node_id) == ("clock", 7)
    sentence = f"{abs(age):.0f} s {'behind' if age > 0 else 'ahead of'} the server's"
    assert sentence in found.why.at_site()


def test_headers_that_are_missing_doubled_or_no_values_are_no_signature() -> None:
    made = Guard({PUBLIC: 7}.get)
    whole = signed()
    spoilt: list[Headers] = [whole[:n] + whole[n + 1 :] for n in range(3)]
    spoilt += [[*whole, each] for each in whole]
    values = (b"", b"\xff", b"2026-01-01", b"9" * 5000, datetime.now(UTC).isoformat()[:-6].encode())
    for n, value in itertools.product(range(3), values):
        spoilt.append([*whole[:n], (whole[n][0], value), *whole[n + 1 :]])
    assert {refusal(made, headers) for headers in spoilt} <= {"signature", "unknown"}
    assert isinstance(made.caller(whole), Caller)


def test_a_bounded_number_of_signatures_is_remembered_and_none_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(authentication, "KEPT", 100)
    used = Used()
    taken = [n for n in range(1000) if used.take(n, 5000.0 + n, 5000.0 + n)]
    assert taken == list(range(1000))
    assert len(used.times) <= 100
    assert not any(used.take(n, 5000.0 + n, 6000.0) for n in range(1000))


def test_signatures_that_are_too_old_are_forgotten_before_they_are_many() -> None:
    """With one per tenth of a second, some 3,000 can still be used again: 305 s of them."""
    used = Used()
    for n in range(20_000):
        assert used.take(n, 1 + n / 10, 1 + n / 10)
        assert len(used.times) <= 1.25 * 10 * authentication.OLDEST + authentication.FEW
    assert not used.take(19_000, 1901.0, 2001.0)
    assert used.floor == 0


def test_every_request_of_flwrs_fleet_api_says_from_which_site_it_comes() -> None:
    """Else a signed request could be another site's."""
    for name, request in FLEET.items():
        assert request is PROTOBUF_REQUEST_TYPES["POST", f"{FLEET_PREFIX}{name}"]
        fields = {field.name for field in request.DESCRIPTOR.fields}
        own = {"public_key"} if name in ("register-node", "activate-node") else {"node", "node_id"}
        assert fields & own, name


def test_addresses_that_one_caller_commands_count_together() -> None:
    assert neighbours("10.1.2.3") == neighbours("::ffff:10.1.2.3") != neighbours("10.1.2.4")
    assert neighbours("2001:db8::1") == neighbours("2001:db8::ffff:1") != neighbours("2001:db9::1")
    assert neighbours("fe80::1%eth0") == neighbours("fe80::2")


def test_connections_beyond_the_limits_are_closed_and_others_take_their_place() -> None:
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.limits = ListenerLimits(in_all=3, per_address=2)
        listener.bind((LOOPBACK, 0))
        listener.listen()

        def call(address: str) -> socket.socket | None:
            client.append(socket.create_connection(listener.getsockname(), 10, (address, 0)))
            try:
                return listener.accept()[0]
            except BlockingIOError:
                assert client[-1].recv(1) == b""
                return None

        client: list[socket.socket] = []
        first, second = call("127.0.0.2"), call("127.0.0.2")
        assert first is not None and second is not None
        assert call("127.0.0.2") is None
        third = call("127.0.0.3")
        assert third is not None and call("127.0.0.4") is None
        first.close()
        first.close()  # counts once
        again = call("127.0.0.2")
        assert again is not None and call("127.0.0.5") is None
        for each in (second, third, again, *client):
            each.close()
        assert listener.open.total() == 0 and listener.refused == 3
        (said,) = listener.news()  # once, and not at every look
        assert "3 connections" in said and "127.0.0.5" in said and "3 in all" in said
        assert "--connections" in said and listener.news() == []


def test_an_operator_may_let_one_address_have_as_many_connections_as_the_system_allows() -> None:
    """So that a load balancer may stand before the server; else no caller takes most of them."""
    assert ListenerLimits().within(4096) == ListenerLimits(4096, 256)
    assert ListenerLimits().within(128) == ListenerLimits(128, 32)
    assert ListenerLimits(4096, 10_000).within(3000) == ListenerLimits(3000, 3000)
    assert ListenerLimits(4096, 5).within(3000) == ListenerLimits(3000, 5)


@pytest.fixture
def operators() -> Iterator[port_owner.Local]:
    with port_owner.Local(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def connected(listener: port_owner.Local) -> int:
    """Connect to a listener -> the port of the connection, which stays open."""
    with socket.create_connection(listener.getsockname()) as made, listener.accept()[0]:
        return made.getsockname()[1]


@pytest.mark.skipif(
    not port_owner.TCP.exists(), reason="this system does not say whose a socket is"
)
def test_connections_of_other_accounts_are_known(
    operators: port_owner.Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected(operators)
    assert not operators.strangers
    own = os.geteuid()
    monkeypatch.setattr(port_owner, "ROOT", -2)
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    port = connected(operators)
    assert operators.strangers == {port}


@pytest.mark.skipif(
    not port_owner.TCP.exists(), reason="this system does not say whose a socket is"
)
def test_a_connection_that_was_closed_is_nobodys(operators: port_owner.Local) -> None:
    """The system calls a socket root's whose program has closed it."""
    with socket.create_connection(operators.getsockname()) as made:
        port = made.getsockname()[1]
    with operators.accept()[0]:
        assert operators.strangers == {port}


def test_where_the_system_does_not_say_nobody_is_told_apart(
    operators: port_owner.Local, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(port_owner, "TCP", tmp_path / "none")
    connected(operators)
    assert not operators.strangers


def answered(scope: dict[str, Any], *others: Any) -> int:
    """The status of a request at the operator's port."""
    sent: list[Any] = []

    async def served(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(event: Any) -> None:
        sent.append(event)

    made: Any = LocalOnly(served, 8000, *others)
    asyncio.run(made({"type": "http", **scope}, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("path", "client", "status"),
    [
        ("/v1/control/start-run", ("127.0.0.1", 7), 403),
        ("/v1/runtime/acquire-task", ("127.0.0.1", 7), 403),
        ("/", ("127.0.0.1", 7), 403),
        ("//live", ("127.0.0.1", 7), 403),
        ("/live/events", ("127.0.0.1", 7), 200),
        ("/metrics", ("127.0.0.1", 7), 200),
        ("/v1/control/start-run", ("127.0.0.1", 8), 200),
        ("/v1/fleet/activate-node", ("127.0.0.1", 8), 403),  # a site that dials the wrong port
        ("/v1/control/start-run", None, 200),  # a socket file, which only this user can reach
    ],
)
def test_other_accounts_of_the_machine_may_but_look(path: str, client: Any, status: int) -> None:
    headers = [(b"host", b"127.0.0.1:8000")]
    assert answered({"path": path, "client": client, "headers": headers}, {7}) == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"host", b"127.0.0.1:8000")], 200),
        ([(b"host", b"LOCALHOST:8000")], 200),
        ([(b"host", b"[::1]:8000")], 200),
        ([(b"host", b"127.0.0.1")], 421),
        ([(b"host", b"evil.example:8000")], 421),
        ([(b"host", b"127.0.0.1:8000"), (b"host", b"evil.example")], 421),
        ([(b"host", b"127.0.0.1:8000"), (b"origin", b"https://evil.example")], 421),
        ([], 421),
    ],
)
def test_the_operators_port_answers_no_web_page(headers: Headers, status: int) -> None:
    assert answered({"headers": headers}) == status


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "registered.json"
    entries = {
        1: RegisteredKey("anna", ""),
        2: RegisteredKey("town", "target"),
        3: RegisteredKey("", ""),
    }
    registered.write(path, entries)
    monkeypatch.setenv(REGISTERED, str(path))
    return path


def test_a_server_without_a_registered_key_says_what_to_do(file: Path) -> None:
    file.unlink()
    with pytest.raises(RunError, match=r"No site is admitted .* fedda keys sign NAME\.pub"):
        registered.everyone()


@pytest.mark.parametrize(
    ("offer", "said"),
    [
        ((1, "anna", "source"), ""),
        ((1, "anna", "target"), ""),
        ((2, "town", "target"), ""),
        ((3, "carl", "source"), ""),  # registered without a name, which is nobody else's
        ((1, "town", "target"), "as 'town', but its key is that of 'anna'"),
        ((3, "anna", "source"), "as 'anna', but its key is that of 'a nameless site'"),
        ((2, "town", "source"), "as a source, but its key is for a target only"),
        ((9, "anna", "source"), "its key is not registered"),
    ],
)
def test_a_site_is_who_its_key_says(file: Path, offer: tuple[int, str, str], said: str) -> None:
    found = registered.objection(*offer)
    assert said in found and bool(said) == bool(found)


def test_without_keys_nothing_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REGISTERED, raising=False)
    assert registered.objection(9, "anyone", "source") == ""


@pytest.mark.parametrize(
    ("offer", "code"),
    [
        ({"role": "target", "name": "anna", "fedda": __version__}, "role source"),
        ({"role": "source", "name": "berta", "fedda": __version__}, "name"),
        ({"role": "source", "name": "anna", "fedda": "0.0.9"}, f"version {__version__}"),
        ({"role": "source", "name": "anna", "fedda": __version__}, ""),
    ],
)
def test_a_session_is_refused_to_a_site_that_no_run_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offer: dict[str, str], code: str
) -> None:
    file = tmp_path / "registered.json"
    registered.write(file, {1: RegisteredKey("anna", "source"), 2: RegisteredKey("berta", "")})
    monkeypatch.setenv(REGISTERED, str(file))
    turned = Rejections({1: "anna"}.get)  # type: ignore[arg-type]
    calls = SiteCalls(None, Traffic(), lambda headers: Caller(1, PUBLIC), turned=turned)  # type: ignore[arg-type]
    header = offers(offer["role"], offer["name"], offer["fedda"]).encode()
    scope = {"headers": [(OFFERS.encode(), header)], "client": ("10.0.0.5", 1)}
    for _ in range(3):
        with contextlib.nullcontext() if code == "" else pytest.raises(RefusedCall) as refused:
            calls._check_offer(Caller(1, PUBLIC), scope)
        if refused is not None:
            assert refused.value.why is not None and refused.value.why.header == code
    news = turned.news()  # once, and not at every try
    assert [line.partition(":")[0] for line in news] == ["site anna is refused"] * bool(code)


def test_the_console_is_not_filled_by_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Rejections(str)
    for number in range(1000):
        turned.note(Refusal("signature"), 0, f"10.0.{number}")
    assert turned.news() == []
    for number in range(1000):
        turned.note(Refusal("unknown"), 0, f"10.0.{number}")
    assert len(turned.news()) < 10
    assert len(turned._said) < 1000


def test_a_damaged_file_of_registered_sites_is_a_clear_error(file: Path) -> None:
    file.write_text("{")
    with pytest.raises(RunError, match=r"registered\.json.* cannot be read"):
        registered.objection(1, "anna", "source")


def test_once_all_registered_sites_have_joined_a_run_waits_for_no_other(
    tmp_path: Path, file: Path
) -> None:
    grid = ScriptedGrid(make_domains(tmp_path))
    everyone = {number: RegisteredKey(node["name"], "") for number, node in grid.nodes.items()}
    registered.write(file, everyone)
    config = RunConfig.parse(FAST | {"wait.settle": 3600.0, "wait.sites": 7200.0, "run.expect": 0})
    joined = Sites(grid, config, Journal()).gather()  # an hour later, if it waited
    assert {node.name for node in joined.nodes} == {node["name"] for node in grid.nodes.values()}
    registered.write(file, everyone | {99: RegisteredKey("late", "")})
    config = RunConfig.parse(FAST | {"wait.settle": 0.5, "wait.sites": 60.0, "run.expect": 0})
    began = time.monotonic()
    Sites(grid, config, Journal()).gather()
    assert time.monotonic() - began >= 0.5


def test_a_registered_site_that_a_run_names_is_waited_for_though_others_make_up_the_number(
    tmp_path: Path, file: Path
) -> None:
    grid = ScriptedGrid(make_domains(tmp_path))
    everyone = {number: RegisteredKey(node["name"], "") for number, node in grid.nodes.items()}
    registered.write(file, everyone)
    grid.offline = {"anna"}

    class Comes(Journal):
        def write(self, event: str, **facts: Any) -> None:
            grid.offline = set()

    settings = FAST | {"run.expect": 3, "run.sources": "anna,bert", "wait.settle": 3600.0}
    joined = Sites(grid, RunConfig.parse(settings), Comes()).gather()
    assert {node.name for node in joined.sources} == {"anna", "bert"}


def test_a_site_under_another_name_is_not_taken_and_named_once(tmp_path: Path, file: Path) -> None:
    grid = ScriptedGrid(make_domains(tmp_path))
    ids = {node["name"]: number for number, node in grid.nodes.items()}
    roles = {"town": "target"}
    entries = {i: RegisteredKey(name, roles.get(name, "source")) for name, i in ids.items()}
    entries[ids["anna"]] = RegisteredKey("zoe", "source")
    entries[ids["bert"]] = RegisteredKey("bert", "target")
    registered.write(file, entries)
    journal = Journal()
    config = RunConfig.parse(FAST | {"run.dir": str(tmp_path), "run.name": "r"})
    sites = Sites(grid, config, journal)
    for _ in range(3):
        sites.look()
        sites._again.clear()  # as if it was time to ask them again
    assert sites.there() == {ids["carl"], ids["town"]}
    said = [t["text"] for t in journal.troubles]
    assert len(said) == 2, said


def test_a_role_is_kept_with_the_key_and_shown(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["keys", *words, "--dir", str(tmp_path)])
        assert done.exit_code == 0, done.output
        return done.output

    run("add", "clinic-a", "--role", "source")
    run("add", "clinic-b")
    public = tmp_path / "c.pub"
    for site, options in (("clinic-c", ["--role", "target"]), ("clinic-d", [])):
        keys.add(tmp_path / "there", site)
        own = (tmp_path / "there" / "nodes" / f"{site}.pub").read_text().split()[:2]
        public.write_text(" ".join([*own, "me@home", "role=source\n"]))
        run("add", site, *options, "--public", str(public))
    nodes = tmp_path / "nodes"
    assert [keys.role(nodes / f"clinic-{n}.pub") for n in "abcd"] == ["source", "", "target", ""]
    assert "me@home" not in (nodes / "clinic-d.pub").read_text()
    keys.public_keys(tmp_path)  # still a key for every other program
    listed = run("list").splitlines()
    assert listed[0] == "clinic-a  source only  (the private key is still here)"
    assert listed[2:] == ["clinic-c  target only", "clinic-d"]


def test_the_data_folders_name_stays_at_a_site_that_has_a_key() -> None:
    data = Path("/data/patients-of-dr-x")
    assert _default_name(data, Path("/keys/clinic.a")) == "clinic.a"
    assert _default_name(data, Path("/keys/clinic-a.key")) == "clinic-a"
    assert _default_name(data, None) == "patients-of-dr-x"


# ---- sites that wait for work --------------------------------------------------------------------


@pytest.mark.parametrize("case", ["handed", "nothing", "gone", "failed", "not asked"])
def test_a_site_that_waited_for_work_is_handed_it_once_it_can_take_it(case: str) -> None:
    """A caller that hangs up while it waits takes no request with it.

    Its site's next process began before, so nothing would tell that this one was lost.
    """
    line, sent, told = SimpleNamespace(is_open=True), [], []
    handed = fleet_pb2.PullMessagesResponse()
    handed.messages_list.add()
    content = b"" if case == "nothing" else handed.SerializeToString()

    async def for_work(node_id: int, seconds: float) -> tuple[float, int]:
        line.is_open = case != "gone"
        return seconds, 0 if case == "not asked" else 2

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert case not in ("gone", "not asked")
        status = 500 if case == "failed" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(event: Any) -> None:
        sent.append(event)

    body = fleet_pb2.PullMessagesRequest(node=NODE).SerializeToString()
    headers = [(b"content-length", b"%d" % len(body)), (b"prefer", b"wait=1")]
    path = f"{FLEET_PREFIX}pull-messages"
    scope = {"type": "http", "path": path, "headers": headers, CONNECTION: line}
    wait = SimpleNamespace(for_work=for_work, handed=lambda *given: told.append(given))
    calls = SiteCalls(app, Traffic(), lambda _: Caller(7, b""), waiting=wait)  # type: ignore[arg-type]
    asyncio.run(calls(scope, receive, send))
    assert sent[1]["body"] == (content if case in ("handed", "failed") else b"")
    assert told == {"handed": [(7, 1, 2)], "nothing": [(7, 0, 2)]}.get(case, [])
