"""Attacks on the server's public listener, over TLS and with keys, by strangers and by a site."""

import base64
import contextlib
import http.client
import random
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

from fedda.flower import fleet_pb2
from fedda.ops import keys
from fedda.ops.spawn import LOOPBACK, Process
from server.superlink.filter import FLEET
from tests import test_authentication
from tests.federation import Federation
from tests.fuzzing import mutated
from tests.patience import PATIENCE, wait_until
from tests.processes import wait_for_act

pytestmark = pytest.mark.slow

FILES = 256  # that the server may have open: a limit that is reached quickly
MIB = 2**20
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256


class Hub(Federation):
    """A server with few files, honest sites, and registered ones that the tests play."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, acting=True)
        self.lines: list[Line] = []

    def _keys(self) -> None:
        super()._keys()
        for name in ("mallory", "trent", "victor"):
            keys.add(self.home, name)

    def _start(self, name: str, arguments: Any) -> Process:
        process = super()._start(name, arguments)
        if name == "superlink":
            process.stop()
            limited = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", *process.command]
            process.log.unlink()
            process = Process(name, limited, process.log, process.env)
            self.processes[name] = process
        return process

    def key(self, name: str) -> ec.EllipticCurvePrivateKey:
        return keys.load_node_key(self.home / "nodes" / name)

    def id_of(self, name: str) -> int:
        with self.control() as control:
            return next(site.node_id for site in control.sites() if site.name == name)

    def works(self) -> bool:
        """Whether the server answers a stranger's question for its health, and then hangs up."""
        line = Line(self)
        status, _ = line.ask("/health", b"", {}, "GET")
        return status == 200 and line.closed


class Line:
    """A connection to the public listener, opened when it is needed."""

    def __init__(self, hub: Hub, address: str = LOOPBACK) -> None:
        self.hub = hub
        self.address = address
        self._open: http.client.HTTPSConnection | None = None
        hub.lines.append(self)

    def ask(
        self, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
    ) -> tuple[int, bytes]:
        """Send a request and return the answer's status and body."""
        kinds = dict.fromkeys(("content-type", "accept"), "application/protobuf")
        head = kinds | {"user-agent": "fedda"} | headers
        if self._open is None:
            context = ssl.create_default_context(cafile=str(self.hub.ca))
            self._open = http.client.HTTPSConnection(
                LOOPBACK,
                self.hub.port,
                context=context,
                timeout=PATIENCE,
                source_address=(self.address, 0),
            )
        self._open.request(method, path, body, head)
        answer = self._open.getresponse()
        content = answer.read()
        if self._open.sock is None:  # closed by the server's wish
            self._open = None
        return answer.status, content

    @property
    def closed(self) -> bool:
        return self._open is None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def signed(key: ec.EllipticCurvePrivateKey, age: float = 0.0) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in test_authentication.signed(age, key)}


@dataclass
class Site:
    """A registered site that does what a test wants."""

    hub: Hub
    name: str

    def __post_init__(self) -> None:
        self.key = self.hub.key(self.name)
        self.line = Line(self.hub)
        self.id = self.hub.id_of(self.name)
        self.node: Any = {"node_id": self.id}

    def ask(self, route: str, request: Any) -> tuple[int, bytes]:
        return self.line.ask(f"/v1/fleet/{route}", request.SerializeToString(), signed(self.key))

    def activate(self) -> None:
        self.leave()  # a heartbeat counts as a session, too
        request = fleet_pb2.ActivateNodeRequest(
            public_key=keys.pem(self.key.public_key()), heartbeat_interval=30
        )
        assert self.ask("activate-node", request)[0] == 200

    def leave(self) -> None:
        self.ask("deactivate-node", fleet_pb2.DeactivateNodeRequest(node_id=self.id))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("public")) as made:
        yield made
        for line in made.lines:
            line.close()


def requests(node_id: int, public: bytes) -> dict[str, bytes]:
    """A well-formed body for each route of the Fleet API."""
    made = {}
    for name, kind in FLEET.items():
        request: Any = kind()
        fields = {field.name for field in request.DESCRIPTOR.fields}
        if "node" in fields:
            request.node.node_id = node_id
        if "node_id" in fields:
            request.node_id = node_id
        if "public_key" in fields:
            request.public_key = public
        if "heartbeat_interval" in fields:
            request.heartbeat_interval = 30
        made[name] = request.SerializeToString()
    return made


def memory(hub: Hub) -> int:
    """Bytes of memory that the server's process holds."""
    text = Path(f"/proc/{hub.processes['superlink'].popen.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


METHODS = ("POST", "GET", "PRI", "CONNECT", "p")
PATHS = ("/v1/fleet/push-object", "/v1/fleet/pull-messages", "/health", "*", "/v1/control/stop-run")
VERSIONS = ("1.1", "1.0", "2.0", "9")
NAMES = ("content-length", "transfer-encoding", "host", "upgrade", "expect", "x")
VALUES = ("-1", "9" * 40, "chunked", "chunked, gzip", "websocket", "100-continue", "\0")


def garbage(draw: random.Random) -> bytes:
    """Bytes that are no request, or hardly one."""
    line = f"{draw.choice(METHODS)} {draw.choice(PATHS)} HTTP/{draw.choice(VERSIONS)}"
    header = f"{draw.choice(NAMES)}: {draw.choice(VALUES)}\r\n"
    text = f"{line}\r\nHost: x\r\n{header * draw.randint(1, 2)}\r\n".encode()
    return draw.choice([text, mutated(draw, text), draw.randbytes(200), b"A" * 40_000])


@pytest.mark.parametrize(
    "frames", [250, pytest.param(2500, marks=pytest.mark.nightly("server/superlink"))]
)
def test_nothing_malformed_is_taken_or_ends_the_server(hub: Hub, frames: int) -> None:
    """Requests that are none, and bodies of a site that are changed at random."""
    draw = random.Random(7)
    site = Site(hub, "mallory")
    log = hub.home / "superlink.log"
    began, written = memory(hub), log.stat().st_size
    context = ssl.create_default_context(cafile=str(hub.ca))
    strange = frames // 8
    for _ in range(strange):
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, hub.port)) as plain:
            if draw.random() < 0.2:
                plain.sendall(garbage(draw))  # where a TLS handshake is expected
                continue
            with context.wrap_socket(plain, server_hostname=LOOPBACK) as stream:
                stream.sendall(garbage(draw))
                stream.settimeout(0.01)
                assert not stream.recv(40).startswith(b"HTTP/1.1 5")
    honest = requests(site.id, keys.pem(site.key.public_key()))
    seen: Counter[int] = Counter()
    for _ in range(frames - strange):
        name = draw.choice(list(FLEET))
        body = mutated(draw, honest[name])
        status, _ = site.line.ask(f"/v1/fleet/{name}", body, signed(site.key))
        assert status < 500, (name, body)
        seen[status] += 1
    assert {200, 400, 401, 403} <= seen.keys(), "the frames did not get far enough"
    for name in ("push-messages", "push-object", "pull-object", "get-run", "get-fab"):
        assert site.line.ask(f"/v1/fleet/{name}", b"", signed(site.key))[0] == 403, name
    site.leave()
    assert hub.works()
    assert memory(hub) - began < 64 * MIB
    assert b"Traceback" not in log.read_bytes()[written:]


def test_a_call_that_no_registered_site_has_just_signed_is_refused_on_every_route(hub: Hub) -> None:
    site, stranger = Site(hub, "mallory"), ec.generate_private_key(ec.SECP384R1())
    other = hub.key("trent")
    public = keys.pem(site.key.public_key())
    heartbeat = requests(site.id, public)["send-node-heartbeat"]
    for name, body in requests(site.id, public).items():
        wrong = signed(site.key)
        wrong["flwr-signature"] = signed(stranger)["flwr-signature"]
        used = signed(site.key)
        assert site.line.ask("/v1/fleet/send-node-heartbeat", heartbeat, used)[0] == 200
        mauled = dict(used)
        mauled["flwr-signature"] = other_form(used["flwr-signature"])
        calls = {
            "anonymous": {},
            "an unregistered key": signed(stranger),
            "a wrong signature": wrong,
            "an old signature": signed(site.key, age=310),
            "a signature of the future": signed(site.key, age=-60),
            "no time": {k: v for k, v in signed(site.key).items() if k != "flwr-timestamp"},
            "another site's": signed(other),
            "a signature of another call": used,
            "such a signature, written otherwise": mauled,
        }
        for what, headers in calls.items():
            status, _ = site.line.ask(f"/v1/fleet/{name}", body, headers)
            assert status in (401, 403), (name, what, status)
    site.leave()


def other_form(signature: str) -> str:
    """The second form in which the same signature of an elliptic curve is valid."""
    r, s = decode_dss_signature(base64.b64decode(signature))
    return base64.b64encode(encode_dss_signature(r, ORDER - s)).decode()


def test_flowers_own_supernode_begins_no_session(hub: Hub) -> None:
    """It knows no lanes, and a run would wait for it in vain."""
    site = Site(hub, "trent")
    body = requests(site.id, keys.pem(site.key.public_key()))["activate-node"]
    another = signed(site.key) | {"user-agent": "python-httpx/0.28"}
    assert site.line.ask("/v1/fleet/activate-node", body, another) == (403, b"refused: program\n")
    wait_until(lambda: "SuperNodes need" in hub.processes["superlink"].text(), "no word of it")


def test_a_stranger_is_refused_before_it_has_sent_a_body(hub: Hub) -> None:
    context = ssl.create_default_context(cafile=str(hub.ca))
    head = (
        b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n"
        b"Content-Type: application/protobuf\r\n\r\n"
    )
    with (
        socket.create_connection((LOOPBACK, hub.port), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname=LOOPBACK) as stream,
    ):
        stream.sendall(head)
        assert stream.recv(100).startswith(b"HTTP/1.1 401")


def test_a_site_gets_its_answer_while_strangers_hold_all_the_connections_they_can(hub: Hub) -> None:
    """Idle connections, half handshakes, half heads, and as many as there are addresses."""
    context = ssl.create_default_context(cafile=str(hub.ca))
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for n in range(2 * FILES):
            plain = stack.enter_context(socket.socket())
            plain.settimeout(PATIENCE)
            plain.bind((f"127.0.0.{2 + n % 2}", 0))
            with contextlib.suppress(OSError):
                plain.connect((LOOPBACK, hub.port))
                if n % 3 == 1:
                    plain.sendall(b"\x16\x03\x01\x02\x00\x01")  # how a handshake begins
                held.append(plain)
        assert hub.works()  # by a new connection from a third address
        short = {"method": "fedavg", "rounds": 1, "run.evaluate": False}
        assert hub.begin("held", short).finish()["events"] == []
    with contextlib.ExitStack() as stack:
        for start in (b"", b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n", b"\r\n" * 8):
            plain = stack.enter_context(socket.create_connection((LOOPBACK, hub.port)))
            stream = stack.enter_context(context.wrap_socket(plain, server_hostname=LOOPBACK))
            stream.sendall(start)
            stream.settimeout(PATIENCE)
            held.append(stream)
        for each in held[-3:]:
            with contextlib.suppress(ssl.SSLError, ConnectionResetError):
                assert each.recv(1) == b"", "a request that never ends is waited for"
    assert hub.works()


def test_a_site_that_is_revoked_while_it_works_is_out_within_seconds(hub: Hub) -> None:
    site = Site(hub, "victor")
    site.activate()
    request = fleet_pb2.PullMessagesRequest(node=site.node)
    assert site.ask("pull-messages", request)[0] == 200
    keys.revoke(hub.home, "victor")
    wait_until(lambda: site.ask("pull-messages", request)[0] == 401, "it is still served")
    public = keys.pem(site.key.public_key())
    for name, body in requests(site.id, public).items():
        assert site.line.ask(f"/v1/fleet/{name}", body, signed(site.key))[0] in (401, 403), name


def test_a_site_is_ended_by_its_revocation_even_in_the_middle_of_work(hub: Hub) -> None:
    hub.act("bert", {"1": ["hold", 0]})
    run = hub.begin("revoked", {"method": "fedavg"})
    wait_for_act(hub, run.folder, "bert", "hold in round 1")
    bert, anna = hub.processes["bert"], hub.processes["anna"]
    keys.revoke(hub.home, "bert")
    assert bert.popen.wait(PATIENCE) == 3  # its work would be longer
    assert "does not accept this site's key any more: it was revoked" in bert.text()

    number = hub.id_of("anna")
    assert anna.stop() == 0
    assert "left the server" in anna.text()
    with hub.control() as control:  # one that is killed counts as online for 15 s and more
        assert number not in {site.node_id for site in control.sites() if site.online}
        control.stop_run(run.id)
