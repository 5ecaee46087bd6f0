"""The server's two listeners: what sites may request, what is counted, and how it ends."""

import asyncio
import dataclasses
import inspect
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from fedda.errors import KeyFileError, RunError
from fedda.ops import certificate, keys
from fedda.ops.federation import Deployment
from fedda.ops.spawn import LOOPBACK
from server.superlink import control, gateway
from server.superlink.filter import ALLOWED, FLEET, FleetOnly, Traffic, allowed
from tests.federation import Federation
from tests.patience import wait_until
from tests.processes import Member, alive, below, kill

TRICKS = [
    "/",
    "/docs",
    "/openapi.json",
    "/v1/control/list-nodes",
    "/v1/runtime/acquire-task",
    "//v1/control/list-nodes",
    "/v1//control/list-nodes",
    "/v1/fleet/../control/list-nodes",
    "/v1/fleet/..%2fcontrol/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes",
    "/v1/fleet/.%2e/control/list-nodes",
    "/v1/fleet/..;/control/list-nodes",
    "/v1/%66leet/pull-messages",
    "/%761/control/list-nodes",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages/../../control/list-nodes",
    "/v1/fleet/pull-messages%3f/../../control/list-nodes",
    "/v1/fleet/pull-messages%00",
    "/v1/fleet\\..\\control/list-nodes",
    "/V1/fleet/pull-messages",
    "/v1/fleet/",
    "/v1/fleet/unknown",
    *(f"/v1/fleet/{name}" for name in ("push-messages", "push-object", "pull-object", "get-fab")),
    "/health/../v1/control/list-nodes",
    "http://127.0.0.1/v1/control/list-nodes",
    "/v1/responses",
]


def scope(path: str, method: str = "POST", raw: bytes | None = None, **more: Any) -> dict[str, Any]:
    raw = path.encode() if raw is None else raw
    basis = {"type": "http", "method": method, "path": path, "raw_path": raw, "root_path": ""}
    return basis | {"http_version": "1.1", "headers": [(b"host", b"hub")]} | more


def call(
    filtered: FleetOnly, request: dict[str, Any], body: list[bytes] | None = None
) -> tuple[int, bytes]:
    """Send one request through the filter as a server would."""
    pieces = list(body or [b""])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(event: Any) -> None:
        sent.append(event)

    asyncio.run(filtered(request, receive, send))
    status = [event["status"] for event in sent if event["type"] == "http.response.start"]
    assert len(status) == 1
    return status[0], b"".join(event.get("body", b"") for event in sent)


async def echo(request: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Answer a request with its own body, twice: an ASGI application."""
    body, more = b"", True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            return
        body += event["body"]
        more = event["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body + body})


@pytest.mark.parametrize("name", FLEET)
def test_the_fleet_api_passes(name: str) -> None:
    assert allowed(scope(f"/v1/fleet/{name}"))
    assert not allowed(scope(f"/v1/fleet/{name}", "GET"))
    assert allowed(scope("/health", "GET")) and not allowed(scope("/health", "POST"))


@pytest.mark.parametrize("path", TRICKS)
def test_every_other_path_is_refused(path: str) -> None:
    assert not allowed(scope(path))
    assert not allowed(scope(path, "GET"))


@pytest.mark.parametrize(
    "more",
    [
        {"raw": b"/v1/fleet/%70ull-messages"},
        {"raw": b"//v1/fleet/pull-messages"},
        {"root_path": "/v1/control"},  # mounted
    ],
)
def test_the_raw_path_must_also_be_spelled_as_in_the_list(more: Any) -> None:
    assert not allowed(scope("/v1/fleet/pull-messages", **more))


def test_a_site_reaches_what_begins_and_ends_sessions_and_hands_out_invitations() -> None:
    """All else of flwr's Fleet API brings or fetches what belongs to runs."""
    from flwr.superlink.routers.fleet.router import router

    paths = {getattr(route, "path", "") for route in router.routes}
    reached = {path for method, path in ALLOWED if method == "POST"}
    brought = {path for path in paths - reached if path.startswith("/v1/fleet/")}
    assert reached < paths and brought == {
        f"/v1/fleet/{name}-{what}"
        for name, what in (
            *(("push", "messages"), ("push", "object"), ("pull", "object")),
            *(("get", "run"), ("get", "fab"), ("confirm", "message-received")),
        )
    }


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 1, 200), ("1.0", 1, 200), ("0.9", 1, 400), ("1.1", 0, 400), ("1.1", 2, 400)],
)
def test_a_request_says_whom_it_is_for(version: str, hosts: int, status: int) -> None:
    about = {"http_version": version, "headers": [(b"host", b"hub")] * hosts}
    traffic = Traffic()
    assert call(FleetOnly(echo, traffic), scope("/health", "GET", **about))[0] == status
    assert traffic.refused == (status == 400)


def test_traffic_is_counted_in_bytes_of_bodies(tmp_path: Path) -> None:
    traffic = Traffic()
    filtered = FleetOnly(echo, traffic)
    assert call(filtered, scope("/v1/fleet/activate-node"), [b"abc", b"de"]) == (200, b"abcdeabcde")
    call(filtered, scope("/v1/fleet/activate-node"), [b"x"])
    call(filtered, scope("/v1/control/list-nodes"))
    traffic.write(tmp_path / "traffic.json")
    read = json.loads((tmp_path / "traffic.json").read_text())
    assert read["routes"] == {
        "/v1/fleet/activate-node": {"requests": 2, "bytes-in": 6, "bytes-out": 12, "errors": 0}
    }
    assert read["total"] == {"requests": 2, "bytes-in": 6, "bytes-out": 12}
    assert read["refused"] == 1


def test_a_body_too_large_is_refused_by_its_announced_length_or_cut_off() -> None:
    traffic = Traffic()
    request = scope(
        "/v1/fleet/activate-node", headers=[(b"host", b"hub"), (b"content-length", b"11")]
    )
    filtered = FleetOnly(echo, traffic, max_body=10)
    assert call(filtered, request)[0] == 413 and traffic.routes == {}
    assert call(filtered, scope("/v1/fleet/activate-node"), [b"x" * 6, b"x" * 6, b"x"])[0] == 413
    assert call(filtered, scope("/v1/fleet/activate-node"), [b"x" * 6, b"x" * 4])[0] == 200


def test_a_body_that_is_cut_off_gives_413_even_if_the_application_fails() -> None:
    async def fragile(request: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise RuntimeError("client disconnected")

    filtered = FleetOnly(fragile, Traffic(), max_body=10)
    assert call(filtered, scope("/v1/fleet/activate-node"), [b"x" * 11, b""])[0] == 413


@pytest.fixture(scope="module")
def superlink() -> Any:
    return gateway.superlink(gateway.GatewaySettings())


def test_flwrs_server_configuration_has_the_fields_that_we_fill() -> None:
    from fedda.flower import SuperLinkLifespanConfig

    fields = {field.name for field in dataclasses.fields(SuperLinkLifespanConfig)}
    source = inspect.getsource(gateway.superlink)
    unset = {name for name in fields if f"        {name}=" not in source}
    assert not unset, f"flwr's SuperLink has new settings: {unset}; decide on them in gateway.py"


def test_the_superexec_is_found_where_we_look_for_it_and_started_again(superlink: Any) -> None:
    lifespan = superlink.state.superlink_lifespan
    assert gateway._superexec(superlink) is None and not gateway._begun_again(superlink)
    first = lifespan.superexec_process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        assert gateway._superexec(superlink) == first.pid and not gateway._begun_again(superlink)
        first.communicate()  # without it the server would take runs and begin none
        assert gateway._begun_again(superlink)
        assert gateway._superexec(superlink) not in (None, first.pid)
    finally:
        lifespan.superexec_process.kill()
        lifespan.superexec_process.wait()
        lifespan.superexec_process = None


@pytest.mark.slow
def test_a_process_group_is_ended_even_if_its_members_ignore_sigterm() -> None:
    script = "trap '' TERM; sleep 61.25 & echo ready; wait; sleep 61.25"
    shell = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert shell.stdout is not None
    with shell.stdout as out:
        out.readline()
        group = below(shell.pid)
        assert len(group) == 2
        gateway._end_group(shell.pid, patience=0.3)
    assert not alive(group)
    shell.wait()


def test_a_taken_port_is_a_clear_error() -> None:
    taken = gateway._listen(LOOPBACK, 0)
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"cannot listen on 127.0.0.1:{port} .*--port"):
            gateway._listen(LOOPBACK, port)
    with pytest.raises(RunError, match="give --host an address of this machine"):
        gateway._listen("192.0.2.1", port)


def test_answers_are_sent_at_once() -> None:
    """Without TCP_NODELAY on accepted connections every answer took 40 ms longer."""
    listener = gateway._listen(LOOPBACK, 0)
    accepted = []

    async def connect() -> None:
        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            options = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
            accepted.append(writer.get_extra_info("socket").getsockopt(*options))
            writer.close()

        async with await asyncio.start_server(on_connection, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()
            await writer.wait_closed()

    asyncio.run(connect())
    assert accepted == [1]


class FakeControl:
    """A server's registrations in memory."""

    def __init__(self) -> None:
        self.registered: dict[int, control.ControlledSite] = {}

    def sites(self) -> list[control.ControlledSite]:
        return list(self.registered.values())

    def register(self, key: Any, name: str) -> int:
        node = len(self.registered) + 1
        self.registered[node] = control.ControlledSite(node, name, False, keys.pem(key))
        return node

    def unregister(self, node_id: int) -> None:
        del self.registered[node_id]


def test_sites_are_admitted_and_turned_away_as_keys_come_and_go(tmp_path: Path) -> None:
    fake = FakeControl()
    folder = control.Folder(tmp_path)

    def sync() -> list[str]:
        return folder.sync(fake)  # type: ignore[arg-type]

    for name in ("b", "a"):
        keys.add(tmp_path, name)
    assert sync() == ["admitted a", "admitted b"]
    assert sync() == []
    other = tmp_path / "other"
    keys.add(other, "guest")
    fake.register(keys.public_keys(other)["guest"], "guest")
    keys.revoke(tmp_path, "a")
    assert sync() == ["turned away a"]
    assert sorted(site.name for site in fake.sites()) == ["b", "guest"]
    keys.add(tmp_path, "a")
    assert sync() == ["admitted a"]


def test_a_file_that_is_no_key_is_named_once_and_blocks_no_revocation(tmp_path: Path) -> None:
    fake, folder = FakeControl(), control.Folder(tmp_path)

    def sync() -> list[str]:
        return folder.sync(fake)  # type: ignore[arg-type]

    for name in ("a", "b"):
        keys.add(tmp_path, name)
    sync()
    half = tmp_path / "nodes" / "late.pub"
    half.write_text("ecdsa-sha2-")
    (tmp_path / "nodes" / "revoked").mkdir()
    (tmp_path / "nodes" / "revoked" / "old.pub").touch()
    keys.revoke(tmp_path, "a")
    first, second, away = sync()
    assert first.startswith(f"passed over: {half} is not an OpenSSH public key")
    assert "revoked/old.pub" in second and away == "turned away a"
    assert sync() == []
    assert folder.unread
    keys.add(tmp_path / "other", "late")
    half.write_bytes((tmp_path / "other" / "nodes" / "late.pub").read_bytes())
    assert sync() == ["admitted late"]


def ask_raw(hub: Deployment, port: int, target: str, method: str = "POST") -> int:
    """Send a request line exactly as written and return the status, 0 if the server hung up."""
    return send_raw(
        hub,
        port,
        f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        "Content-Type: application/protobuf\r\nAccept: application/protobuf\r\n"
        "Content-Length: 0\r\n\r\n",
    )


def send_raw(hub: Deployment, port: int, request: str) -> int:
    """Send a request exactly as written and return the status, 0 if the server hung up."""
    context = ssl.create_default_context(cafile=str(hub.ca))
    with (
        socket.create_connection((LOOPBACK, port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as stream,
    ):
        stream.sendall(request.encode())
        answer = stream.recv(200)
    return int(answer.split()[1]) if answer else 0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("gateway"))
    made.sites.clear()
    with made:
        yield made


ANOTHER = """
import socket, ssl, sys
context = ssl._create_unverified_context()
port, *lines = sys.argv[1:]
with socket.create_connection(("127.0.0.1", int(port))) as plain:
    with context.wrap_socket(plain) as stream:
        stream.sendall("\\r\\n".join([*lines, f"Host: 127.0.0.1:{port}", "", ""]).encode())
        print(stream.recv(99).split()[1].decode())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_another_account_of_the_machine_starts_no_run(hub: Federation) -> None:
    """Whoever may start one of an app of its own runs code as the server's account."""
    system = next(p for p in ("/usr/bin/python3", sys.executable) if Path(p).exists())

    def ask(target: str, user: int, *headers: str) -> int:
        """Ask as an account, without what only the server's could read -> the status."""
        command = [system, "-c", ANOTHER, str(hub.admin_port), f"{target} HTTP/1.1", *headers]
        asked = subprocess.run(
            command, user=user, cwd="/", capture_output=True, text=True, check=True
        )
        return int(asked.stdout)

    form = ("Content-Type: application/protobuf", "Content-Length: 0")
    for path in ("control/list-nodes", "control/start-run", "runtime/acquire-task"):
        for more in ((), ("X-Forwarded-For: 127.0.0.1", "X-Forwarded-Proto: https")):
            assert ask(f"POST /v1/{path}", 65534, *form, *more) == 403
    assert ask("GET /live", 65534) == 200
    assert ask("POST /v1/control/list-nodes", 0, *form) == 200


@pytest.mark.slow
def test_an_app_that_is_not_fedda_is_not_run(hub: Federation) -> None:
    with (hub.app / "server" / "app.py").open("a") as file:
        file.write("# something else\n")
    with pytest.raises(RunError, match=r"the run's program differs in server/app\.py"):
        hub.submit(hub.app)


@pytest.mark.slow
def test_sites_reach_only_the_fleet_api_and_operators_reach_everything(
    hub: Federation, tmp_path: Path
) -> None:
    # The operator's listener serves such a call, so it is the filter that refuses them below.
    assert ask_raw(hub, hub.admin_port, "/v1/control/list-nodes") == 200
    for target in TRICKS:
        assert ask_raw(hub, hub.port, target) in (400, 403), target
        assert ask_raw(hub, hub.port, target, "GET") in (400, 403), target
    assert ask_raw(hub, hub.port, "/v1/fleet/pull-messages") == 401
    assert ask_raw(hub, hub.port, "/health", "GET") == 200
    for unclear in ("GET /health\r\n\r\n", "GET /health HTTP/1.1\r\n\r\n"):
        assert send_raw(hub, hub.port, unclear) == 400

    listed = subprocess.run(
        ["flwr", "supernode", "list", "fedda", "--format", "json"],
        env=hub.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(listed.stdout)["success"] is True
    certificate.init(tmp_path / "other")
    authority = (hub.home / "ca.crt").read_bytes()
    with hub.control() as client:  # the server goes on with the authority that it was started with
        shutil.copy(tmp_path / "other" / "ca.crt", hub.home)
        keys.add(hub.home, "late")
        wait_until(lambda: len(client.sites()) == 1, "the new key was not admitted")
    (hub.home / "ca.crt").write_bytes(authority)
    with pytest.raises(KeyFileError, match=r"ca\.crt"):
        control.Control(f"{LOOPBACK}:{hub.admin_port}", tmp_path / "other" / "ca.crt").sites()

    server = hub.processes["superlink"]
    helpers = below(server.popen.pid)
    assert len(helpers) > 1, "no SuperExec was started"
    assert server.stop() == 0
    assert not alive(helpers)
    counted = json.loads(hub.traffic.read_text())
    assert counted["routes"].keys() == {"/v1/fleet/pull-messages", "/health"}
    assert counted["routes"]["/v1/fleet/pull-messages"]["errors"] == 1
    assert counted["refused"] >= 40
    hub.start_server()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(403, json={"detail": "not ours"}), r"\(HTTP 403\): not ours$"),
        (httpx.Response(404, text="nothing here"), r"\(HTTP 404\): nothing here$"),
        (httpx.Response(500, json=["odd"]), r'\(HTTP 500\): \["odd"\]$'),
        (httpx.Response(200, text="<html>"), "another program.*--admin-port"),
        (httpx.Response(501, html="<h1>no</h1>"), "another program.*--admin-port"),
    ],
)
def test_an_operator_is_told_why_a_server_refuses(answer: httpx.Response, told: str) -> None:
    asked = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(("POST", request.url.path))
        return answer

    transport = httpx.MockTransport(serve)
    address = "http://hub:8000/v1/control/"
    with control.Control("hub:8000", None) as client:
        assert str(client._client.base_url) == address
        client._client.close()
        client._client = httpx.Client(base_url=address, transport=transport)
        calls: list[Callable[[], object]] = [
            *(client.sites, lambda: client.unregister(1)),
            *(lambda: client.run_state(1), lambda: client.stop_run(1)),
            lambda: client.register(ec.generate_private_key(keys.CURVE).public_key(), "a"),
        ]
        for call in calls:
            with pytest.raises(RunError, match=told):
                call()
    assert {*asked} <= PROTOBUF_REQUEST_TYPES.keys() and len({*asked}) == len(calls)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("certificate verify failed: certificate has expired", "has expired: renew it"),
        ("certificate verify failed: self-signed certificate", "does not fit this folder's ca.crt"),
    ],
)
def test_an_operator_is_told_what_is_wrong_with_a_certificate(error: str, told: str) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(error)

    with control.Control("hub:8000", None) as client:
        client._client.close()
        transport = httpx.MockTransport(fail)
        client._client = httpx.Client(base_url="http://hub:8000", transport=transport)
        with pytest.raises(KeyFileError, match=told):
            client.sites()


@pytest.mark.nightly("fedda/ops/spawn.py", "fedda/ops/federation.py", "server/superlink/gateway.py")
def test_no_process_remains_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.federation import Federation\n"
        "hub = Federation(Path(sys.argv[1]))\nhub.sites = {'anna': hub.sites['anna']}\nwith hub:\n"
        "    print(*(p.popen.pid for p in hub.processes.values()), flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    started: set[Member] = set()
    try:
        assert parent.stdout is not None
        with parent.stdout as out:
            server, site = map(int, out.readline().split())
            started = below(server, site)
            assert len(started) >= 3  # server, SuperExec, site
            parent.send_signal(signal.SIGKILL)
            parent.wait()
        wait_until(lambda: not alive(started), f"left: {alive(started)}")
    finally:
        parent.kill()
        parent.wait()
        kill(started)
