"""Which sites count as online: those with an open connection, also if their heartbeats are late."""

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fedda.flower import Node, SendNodeHeartbeatRequest
from fedda.flower import fleet_pb2 as fleet
from server.superlink import present
from server.superlink.filter import FLEET_PREFIX, Traffic
from server.superlink.guard import WRONG, Caller
from server.superlink.listener import CONNECTION, KEEP_ALIVE, STAY_S, Listener, Protocol
from server.superlink.present import INTERVAL_S, Present
from server.superlink.site_calls import SiteCalls


class Line:
    """A connection that a test opens and closes."""

    def __init__(self) -> None:
        self.is_open, self.stays = True, False

    def stay(self) -> None:
        self.stays = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only the test moves on."""
    now = [1000.0]
    monkeypatch.setattr(present.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


@pytest.fixture
def beats() -> list[tuple[int, float]]:
    return []


@pytest.fixture
def sites(beats: list[tuple[int, float]]) -> Present:
    return Present(lambda node, interval: beats.append((node, interval)) or node != 9)


def heard(sites: Present, node: int, line: Any, beats: bool = True) -> None:
    sites.heard(node, line, beats)


def test_an_open_connection_stands_in_for_late_heartbeats(
    sites: Present, beats: list[tuple[int, float]], clock: Callable[[float], None]
) -> None:
    line = Line()
    heard(sites, 1, line)
    assert line.stays
    clock(10)
    sites.tend()
    assert beats == []  # its own heartbeat is not late
    for _ in range(100):
        clock(10)
        sites.tend()
    # Never longer than Flower waits, and no more often than needed.
    assert 1000 / (2 * INTERVAL_S) < len(beats) <= 1000 / 10 / 2
    assert set(beats) == {(1, INTERVAL_S)}


def test_a_broken_connection_and_a_site_that_left_are_not_kept_alive(
    sites: Present, beats: list[tuple[int, float]], clock: Callable[[float], None]
) -> None:
    broken, one, other, left = Line(), Line(), Line(), Line()
    for node, line in ((1, broken), (2, one), (2, other), (3, left)):
        heard(sites, node, line)
    heard(sites, 4, None)  # on a connection of which nothing is known
    broken.is_open = one.is_open = False
    sites.left(3)
    clock(100)
    sites.tend()
    assert beats == [(2, INTERVAL_S)]
    heard(sites, 1, back := Line())
    clock(100)
    sites.tend()
    assert sorted(beats) == [(1, INTERVAL_S), (2, INTERVAL_S), (2, INTERVAL_S)]
    assert back.stays


def test_other_requests_than_heartbeats_tell_of_the_connection_only(
    sites: Present, beats: list[tuple[int, float]], clock: Callable[[float], None]
) -> None:
    """A site that never joined, or whose session ended, is not brought back by a question."""
    line = Line()
    heard(sites, 1, line, beats=False)
    clock(100)
    sites.tend()
    assert beats == []


def test_a_revoked_site_is_asked_about_once(
    sites: Present, beats: list[tuple[int, float]], clock: Callable[[float], None]
) -> None:
    line = Line()
    heard(sites, 9, line)
    for _ in range(3):
        clock(100)
        sites.tend()
    assert beats == [(9, INTERVAL_S)]


def test_the_system_asks_whether_an_idle_site_is_there() -> None:
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            taken, _ = listener.accept()
            with taken:
                assert taken.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                for option, value in KEEP_ALIVE.items():
                    number = getattr(socket, option, None)
                    assert number is None or taken.getsockopt(socket.IPPROTO_TCP, number) == value


def test_a_connection_is_open_until_either_side_closes_it() -> None:
    async def seen() -> list[bool]:
        loop = asyncio.get_running_loop()
        config = SimpleNamespace(timeout_keep_alive=60)
        made: list[Protocol] = []

        def make() -> Protocol:
            protocol = Protocol.__new__(Protocol)
            protocol.transport, protocol.timeout_keep_alive = None, config.timeout_keep_alive  # type: ignore[assignment]
            made.append(protocol)
            return protocol

        protocol = make()
        found = [protocol.is_open]
        ours, theirs = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        protocol.transport = transport  # type: ignore[assignment]
        found.append(protocol.is_open)
        protocol.stay()
        assert protocol.timeout_keep_alive == STAY_S
        theirs.close()
        while not transport.is_closing():
            await asyncio.sleep(0.01)
        return [*found, protocol.is_open]

    assert asyncio.run(seen()) == [False, True, False]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("name", "request_", "heard_"),
    [
        ("send-node-heartbeat", SendNodeHeartbeatRequest(node=Node(node_id=5)), [(5, True)]),
        ("pull-messages", fleet.PullMessagesRequest(node=Node(node_id=5)), [(5, False)]),
        ("deactivate-node", fleet.DeactivateNodeRequest(node_id=5), [(5, False), 5]),
        ("send-node-heartbeat", SendNodeHeartbeatRequest(node=Node(node_id=6)), []),
    ],
)
def test_only_a_site_whose_signature_was_checked_is_heard(
    known: bool, name: str, request_: Any, heard_: list[Any]
) -> None:
    """Otherwise a stranger could keep a dead site online; and a site could keep another one."""
    told: list[Any] = []
    line = Line()

    def note(node: int, connection: Any, beats: bool) -> None:
        assert connection is line
        told.append((node, beats))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(event: Any) -> None:
        pass

    body = request_.SerializeToString()
    headers = [(b"content-length", str(len(body)).encode())]
    path = f"{FLEET_PREFIX}{name}"
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, CONNECTION: line}
    watching = SimpleNamespace(heard=note, left=told.append)
    caller = Caller(5, b"") if known else WRONG
    calls = SiteCalls(app, Traffic(), lambda _: caller, present=watching)  # type: ignore[arg-type]
    asyncio.run(calls(scope, receive, send))
    assert told == (heard_ if known else [])
