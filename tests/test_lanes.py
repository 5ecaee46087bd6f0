"""Lanes: a run's messages on one stream to each site, over the server's public port."""

import asyncio
import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from clients.node import lanes as site_end
from clients.node.lanes import Lanes
from clients.node.resident import Resident, Stopped, work
from fedda.errors import Code, RunError, WireError
from fedda.flower import SUPERLINK_NODE_ID, ErrorCode, TaskIdentity, make_message, node_pb2
from fedda.lane import dialer, invitation, parcels, tls
from fedda.lane.invitation import KIND, LaneInvitation
from fedda.lane.lane_end import LaneEnd
from fedda.lane.lane_host import LaneHost
from fedda.lane.parcels import Incoming, Outgoing
from fedda.ops.address import Address
from fedda.ops.address import address as parsed
from server import lane_grid
from server.lane_grid import LaneGrid
from server.simulation import identity
from server.superlink import listener as superlink_listener
from server.superlink.listener import Listener, Loop
from server.superlink.relay import Relay
from tests.patience import PATIENCE, wait_until

RUN = 7
NODES = (11, 12, 13)


# ---- messages as frames --------------------------------------------------------------------------


def request(arrays: dict[str, np.ndarray] | None = None, node: int = 11, **table: Any) -> Message:
    content = RecordDict({"step": ConfigRecord({"round": 1, **table})})
    if arrays:
        content["arrays"] = ArrayRecord({name: Array(a) for name, a in arrays.items()})
    return Message(content, node, "train", ttl=table.pop("ttl", 60.0), group_id="1")


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with identity():
        TaskIdentity.task_id, TaskIdentity.run_id = 1, RUN
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        yield


def through(message: Message) -> Message:
    """A message, sent frame by frame."""
    out, incoming = Outgoing.of(message, "q"), None
    while (frame := out.next()) is not None:
        if frame[0] == parcels.BEGIN:
            incoming = Incoming.parse(frame[1 + parcels.OFFSET :])
            incoming.keeps = True
        else:
            assert incoming is not None and frame[0] == parcels.PART
            incoming.take(memoryview(frame)[1:])
    assert incoming is not None and incoming.got == incoming.size
    return incoming.message()


def test_a_message_comes_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "PIECE", 7)
    sent = request(
        {"a": np.arange(5.0), "none": np.zeros((0, 3)), "b": np.ones((2, 3), np.float32)},
        numbers=[0.1, 1e-320, -0.0],
        whole=2**62,
        yes=True,
        raw=b"\0\xff",
        several=[b"a", b""],
        words=["ä", ""],
    )
    sent.content["metrics"] = MetricRecord({"loss": float("inf"), "n": 3, "all": [1.5, 2.5]})
    came = through(sent)
    assert came.metadata.message_id == "q" and came.metadata.dst_node_id == 11
    assert came.metadata.ttl == 60.0 and came.metadata.group_id == "1"
    assert came.content == sent.content and [*came.content] == [*sent.content]
    array = came.content.array_records["arrays"]["b"]
    assert np.array_equal(array.numpy(), np.ones((2, 3), np.float32))
    came = through(Message(Error(5, "gone"), reply_to=request()))
    assert came.has_error() and (came.error.code, came.error.reason) == (5, "gone")


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "no JSON": lambda head: head[:-1],
    "a list": lambda _: b"[]",
    "no metadata": lambda head: head.replace(b'"ttl"', b'"x"'),
    "never ends": lambda head: head.replace(b'"ttl":60.0', b'"ttl":NaN'),
    "a size below 0": lambda head: head.replace(b",168]", b",-168]"),
    "a size that is too large": lambda head: head.replace(b",168]", b",1e15]"),
    "an unknown record": lambda head: head.replace(b'"step","c"', b'"step","x"'),
    "a long name": lambda head: head.replace(b'[["a"', b'[["' + b"a" * 300 + b'"'),
    "a table in a table": lambda head: head.replace(b'"round":1', b'"round":{"c":1}'),
    "deep": lambda _: b"[" * 10**5,
}


@pytest.mark.parametrize("how", SPOILS)
def test_a_head_that_cannot_be_read_is_refused(how: str) -> None:
    head = Outgoing.of(request({"a": np.arange(5.0)}), "q").head
    assert SPOILS[how](head) != head
    Incoming.parse(head)
    with pytest.raises(WireError):
        Incoming.parse(SPOILS[how](head))


def test_a_message_goes_on_at_the_byte_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "PIECE", 16)
    came: list[Incoming] = []
    one, other = LaneEnd(lambda *_: True, came.append), LaneEnd(lambda *_: True, came.append)
    sent = request({"a": np.arange(20.0), "b": np.arange(3.0)})
    one.send(sent, "q")

    def connect(most: int) -> int:
        """Connect, and pass on so many frames of `one` -> how many bytes of arrays these had."""
        numbers = one.open(lambda: None)[0], other.open(lambda: None)[0]
        there, back = one.frames(numbers[0]), other.frames(numbers[1])
        other.take(numbers[1], next(there))
        one.take(numbers[0], next(back))
        size = 0
        for frame in (next(there) for _ in range(most)):
            other.take(numbers[1], frame)
            size += len(frame) - 1 if frame[0] == parcels.PART else 0
        if came:
            one.take(numbers[0], next(back))
        one.lost(numbers[0])
        other.lost(numbers[1])
        return size

    sizes = [connect(4), connect(1), connect(3), connect(24)]
    assert sizes == [48, 0, 32, 440 - 80] and one.is_sent("q")
    assert came[0].message().content == sent.content


HELLO: dict[str, Any] = {"me": "x", "you": "", "whole": [], "partial": None, "notes": 0}


def test_what_is_not_due_is_refused() -> None:
    line = LaneEnd(lambda *_: True, lambda _: None)
    posted = b"N" + (1).to_bytes(8) + bytes(8) + b"\1note"  # for an end that takes none
    about = HELLO | {"you": line._me}
    hello = parcels.control(parcels.HELLO, about)
    begin = Outgoing.of(request({"a": np.arange(4.0)}), "q").next()
    assert begin is not None
    later = begin[:1] + (8).to_bytes(8) + begin[9:]
    piece, longer = b"P" + bytes(8), b"P" + bytes(161)
    for sent in (
        [b""],
        [b"X"],
        [hello, posted],
        [hello, b"N"],
        [parcels.control(parcels.HELLO, about | {"notes": 1})],
        [begin],
        [piece],
        [hello, hello],
        [hello, piece],
        [hello, later],
        [hello, begin, begin],
        [hello, begin, piece, longer],
        [hello, begin, longer],
        [parcels.control(parcels.HELLO, about | {"partial": ["q", 5]})],
        [parcels.control(parcels.HELLO, about | {"whole": 3})],
    ):
        number, _ = line.open(lambda: None)
        line.partial = None
        for frame in sent[:-1]:
            line.take(number, frame)
        with pytest.raises(WireError):
            line.take(number, sent[-1])


# ---- a run's program and its sites, over TLS and the relay ---------------------------------------


class Server(Grid):
    """Flower's grid as far as a `LaneGrid` needs it."""

    def __init__(self) -> None:
        self.sites: dict[int, Session] = {}
        self.keys: dict[int, bytes] = {}
        self.replies: dict[str, Message] = {}
        self.invited: list[Message] = []

    run = None  # type: ignore[assignment]

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *args: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [*self.sites]

    def get_nodes(self) -> list[Any]:
        return [
            node_pb2.NodeInfo(node_id=n, public_key=self.keys.get(n, b""), name=f"site-{n}")
            for n in self.sites
        ]

    def push_messages(self, messages: Any) -> list[str]:
        names = []
        for message in messages:
            meta = message.metadata
            assert meta.message_type == KIND and meta.src_node_id == SUPERLINK_NODE_ID
            name = secrets.token_hex(8)
            about = Metadata(
                *(RUN, name, SUPERLINK_NODE_ID, meta.dst_node_id, "", meta.group_id),
                *(meta.created_at, meta.ttl, KIND),
            )
            self.invited.append(message)
            if site := self.sites.get(meta.dst_node_id):
                site.messages.put(make_message(metadata=about, content=message.content))
            names.append(name)
        return names

    def pull_messages(self, message_ids: Any) -> list[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def send_and_receive(self, *_: Any, **__: Any) -> list[Message]:
        raise NotImplementedError


class Session:
    """A site's session at that server."""

    def __init__(self, node: int, key: Any = None) -> None:
        self.node_id, self.waited = node, 1.0
        self.key = key or ec.generate_private_key(ec.SECP384R1())
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def receive(self) -> Message | None:
        with contextlib.suppress(queue.Empty):
            return self.messages.get(timeout=0.2)
        return None


class Node:
    """A site: it does what `act` does with each request."""

    def __init__(self, server: Server, port: int, node: int, key: Any, act: Any) -> None:
        self.session = server.sites[node] = Session(node, key)
        self.told: list[tuple[str, str]] = []
        self.lanes = Lanes(f"127.0.0.1:{port}", self.tell, lambda _: 2**30)
        resident = Resident(lambda m, c: act(m, c), {}, self.tell)
        self._over = False
        self.lanes.over(cast(Any, self.session))
        honest = self.lanes.receive

        def receive() -> Any:
            if self._over:
                raise Stopped
            return honest()

        self.lanes.receive = receive  # type: ignore[method-assign]

        def serve() -> None:
            with contextlib.suppress(Stopped):
                work(resident, self.lanes)

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()

    def tell(self, kind: str, text: str) -> None:
        self.told.append((kind, text))

    def lane(self) -> site_end.Lane:
        wait_until(lambda: bool(self.lanes._lanes), "the site has no lane")
        return next(iter(self.lanes._lanes.values()))

    def kill(self) -> None:
        """End it without a word, as far as the server can tell."""
        self.lanes._now, self._over = -1, True
        for lane in self.lanes._lanes.values():
            lane.close()

    def close(self) -> None:
        self.kill()
        self._thread.join(PATIENCE)


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


class Field:
    """A run's program, the server's port, and sites."""

    def __init__(self, own_port: bool = False) -> None:
        self._open = contextlib.ExitStack()
        self.server, self.nodes = Server(), dict[int, Node]()
        self.relay = self._open.enter_context(Relay())
        listener = Listener(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self.listener, self.port = listener, listener.getsockname()[1]
        loop = Loop()
        loop.takes = self.relay.takes
        started, stop = threading.Event(), list[asyncio.Event]()

        async def serve() -> None:
            stop.append(asyncio.Event())
            server = await loop.create_server(asyncio.Protocol, sock=listener)
            started.set()
            await stop[0].wait()
            server.close()
            while len(asyncio.all_tasks()) > 1:  # strangers that say nothing
                await asyncio.sleep(0.01)

        def run() -> None:
            loop.run_until_complete(serve())
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        started.wait(PATIENCE)
        self._open.callback(thread.join, PATIENCE)
        self._open.callback(lambda: loop.call_soon_threadsafe(stop[0].set))
        place = Address("127.0.0.1", 0) if own_port else Path(self.relay._folder.name)
        self.grid = self._open.enter_context(LaneGrid(self.server, place))

    def join(self, node: int, act: Any = echo, key: Any = None, known: Any = None) -> Node:
        """Let a site join; `known` is the key that the server knows of it."""
        if known is not None:
            form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            self.server.keys[node] = known.public_key().public_bytes(*form)
        self.nodes[node] = Node(self.server, self.port, node, key, act)
        return self.nodes[node]

    def ask(self, *messages: Message, seconds: float = PATIENCE) -> dict[int, Message]:
        replies = self.grid.send_and_receive(messages, timeout=seconds)
        return {reply.metadata.src_node_id: reply for reply in replies}

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self._open.close()


@pytest.fixture
def field() -> Iterator[Field]:
    made = Field()
    try:
        yield made
    finally:
        made.close()


def model(megabytes: float = 9.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"model": rng.random(int(megabytes * 2**17)), "more": rng.random(3)}


def test_requests_and_replies_cross(field: Field) -> None:
    for node in NODES:
        field.join(node)
    sent = [request(model(), node) for node in NODES]
    replies = field.ask(*sent)
    assert {*replies} == {*NODES}
    assert all(reply.content == sent[0].content for reply in replies.values())
    for _ in range(20):
        assert {*field.ask(*(request(node=node) for node in NODES))} == {*NODES}
    assert len(field.server.invited) == len(NODES)  # one ordinary message to each site


def test_without_a_gateway_a_run_has_a_port_of_its_own() -> None:
    with contextlib.closing(Field(own_port=True)) as field:
        field.join(11)
        assert field.ask(sent := request(model()))[11].content == sent.content
        assert field.relay.route.requests == 0 and field.grid.host.port not in (0, field.port)
        with pytest.raises(RunError, match="cannot listen on "):
            LaneHost(Address("127.0.0.1", field.grid.host.port))


def test_a_run_at_a_port_that_sites_do_not_reach_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(Field(own_port=True)) as field:
        assert field.grid.advice() == ""
        field.server.sites[12] = Session(12)  # which never comes
        field.grid.push_messages([request(node=12)])
        wait_until(lambda: bool(field.server.invited), "nobody is invited")
        assert "1 site was invited" in field.grid.advice()
        assert "-c run.listen=HOST:PORT" in field.grid.advice()
    monkeypatch.setattr(site_end, "GONE_S", 0.2)
    gone = LaneInvitation(invitation.new_name(), tls.fresh("x")[0].decode(), "0" * 64, 1)
    lane = site_end.Lane(gone, "127.0.0.1:2", "", queue.SimpleQueue())
    wait_until(lambda: lane.over, "it tries for ever")
    assert "a run invites this site and cannot be reached" in caplog.text
    lane.close()


def test_a_message_that_is_no_invitation_is_dropped(field: Field) -> None:
    """Nothing that another node sends, or that Flower brings, is worked on."""
    node = field.join(11)
    own, other = SUPERLINK_NODE_ID, 12
    for source, kind in ((own, "train"), (other, KIND), (own, KIND)):
        about = Metadata(RUN, "m", source, 11, "", "{}", time.time(), 60.0, kind)
        node.session.messages.put(make_message(metadata=about, content=RecordDict()))
    wait_until(lambda: len(node.told) == 3, "it says nothing")
    said = [text for kind, text in node.told if kind == "refused"]
    assert "needs `fedda-client --stock`" in said[0] and "node 12" in said[1]
    assert "cannot be read" in said[2] and not node.lanes._lanes
    assert field.ask(request())[11].has_content()


@pytest.mark.parametrize(
    ("takes", "held", "pause"),
    [
        (0.01, 0.0, site_end.POLL_S),
        (1.0, 1.0, site_end.PAUSE_S),
        (0.7, 0.0, 1.4),
        (1.7, 1.0, 1.4),
        (75.0, 1.0, site_end.MOST_PAUSE_S),  # the system stopped this process meanwhile
    ],
)
def test_a_busy_server_is_asked_less_often(
    monkeypatch: pytest.MonkeyPatch, takes: float, held: float, pause: float
) -> None:
    """A slow answer means that it is busy, unless it only held the request."""
    lanes = Lanes("hub:1", lambda *_: None)
    now, slept = [100.0], list[float]()

    class Asked(Session):
        def receive(self) -> None:
            now[0] += takes
            lanes._now -= len(slept) > 2

    session = Asked(7)
    session.waited = held
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(site_end, "time", clock)
    lanes._poll(cast(Any, session), lanes._now)
    assert slept == pytest.approx([pause] * 4)


def test_flowers_own_strategy_runs_on_it(field: Field) -> None:
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        content = RecordDict({"arrays": arrays})
        content["metrics"] = MetricRecord({"num-examples": 1, "loss": 0.5})
        return Message(content, reply_to=message)

    for node in NODES:
        field.join(node, train)
    start = ArrayRecord([np.arange(4.0)])
    result = FedAvg(fraction_evaluate=0.0).start(field.grid, start, num_rounds=2)
    assert np.array_equal(result.arrays.to_numpy_ndarrays()[0], np.arange(4.0))
    assert len(result.train_metrics_clientapp) == 2


def test_a_connection_that_breaks_loses_nothing(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "PIECE", 2**16)
    node, sent = field.join(11), request(model(20.0))
    field.ask(request())
    ends, sizes = [node.lane().line, field.grid._sites[11].line], list[int]()

    def cut(line: LaneEnd) -> None:
        """Break the connection in the middle of the request, and then of the reply."""
        if line in ends and line.partial is not None:
            ends.remove(line)
            sizes.append(line.partial.got)
            node.lane().line.cut()

    at_each_piece(monkeypatch, cut)
    (name,) = field.grid.push_messages([sent])
    (reply,) = _wait(field, name)
    assert reply.content == sent.content and not ends and max(sizes) < 20 * 2**20
    assert len(field.server.invited) == 1  # it came back by itself


def at_each_piece(monkeypatch: pytest.MonkeyPatch, act: Callable[[LaneEnd], None]) -> None:
    """Let an end of a lane do something whenever a piece of a message came."""
    honest = LaneEnd._part

    def part(self: LaneEnd, piece: memoryview) -> None:
        honest(self, piece)
        act(self)

    monkeypatch.setattr(LaneEnd, "_part", part)


def hanging() -> tuple[threading.Event, threading.Event, Any]:
    """Work that says when it has begun, and ends when it is told to."""
    began, over = threading.Event(), threading.Event()

    def hang(message: Message, context: Context) -> Message:
        began.set()
        over.wait(PATIENCE)
        return echo(message, context)

    return began, over, hang


def part_from(lane: site_end.Lane) -> Callable[[], None]:
    """Let no connection to a run's program be made from a site -> what ends that."""
    dials = lane._dialer
    there, dials._address = dials._address, "127.0.0.1:1"
    lane.line.cut()
    return lambda: setattr(dials, "_address", there)


def ask_meanwhile(field: Field, lane: site_end.Lane) -> None:
    """Another run asks the same site."""
    wait_until(lambda: not lane.line.connected, "the first run can be reached")
    with LaneGrid(field.server, Path(field.relay._folder.name)) as other:
        (reply,) = other.send_and_receive([request(round=2)], timeout=PATIENCE)
    assert reply.content["step"]["round"] == 2  # type: ignore[index]


def test_a_reply_to_a_run_that_is_away_holds_up_no_other(field: Field) -> None:
    began, over, hang = hanging()
    node = field.join(11, hang)
    (name,) = field.grid.push_messages([request()])
    assert began.wait(PATIENCE)
    meet = part_from(node.lane())
    over.set()
    ask_meanwhile(field, node.lane())
    meet()
    (reply,) = _wait(field, name)
    assert reply.has_content()


def test_a_request_of_a_run_that_is_away_comes_again(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "PIECE", 2**16)
    node, sent = field.join(11), request(model(20.0))
    field.ask(request())
    (lane, meets) = node.lane(), list[Callable[[], None]]()

    def part(line: LaneEnd) -> None:
        if line is lane.line and not meets:
            meets.append(part_from(lane))

    at_each_piece(monkeypatch, part)
    (name,) = field.grid.push_messages([sent])
    wait_until(lambda: bool(meets), "no piece came")
    ask_meanwhile(field, lane)
    meets[0]()
    (reply,) = _wait(field, name)
    assert reply.content == sent.content
    assert [kind for kind, _ in node.told].count("put off") == 1


def test_a_restarted_site_says_so(field: Field) -> None:
    began, over, hang = hanging()
    node = field.join(11, hang)
    (name,) = field.grid.push_messages([request()])
    assert began.wait(PATIENCE)
    wait_until(lambda: field.grid._asked[name].taken, "nobody knows that it came")
    node.kill()
    field.join(11)  # another process of the same node
    (reply,) = _wait(field, name)
    over.set()
    assert reply.has_error() and reply.error.code == Code.RESTARTED
    assert reply.metadata.src_node_id == 11
    assert field.ask(request())[11].has_content()


def test_a_server_can_say_who_works_on_what(field: Field) -> None:
    _, over, hang = hanging()
    field.join(11, hang)
    field.join(12)
    names = field.grid.push_messages([request(), request(node=12)])
    wait_until(lambda: field.relay.working() == {11: ("train", RUN)}, "11 does not work alone")
    over.set()
    wait_until(lambda: field.relay.working() == {}, "somebody works still")
    assert len([*field.grid.pull_messages(names)]) == 2
    assert field.relay.route.requests == 2 and field.relay.route.bytes_out > 1000


def test_a_request_that_was_not_taken_is_sent_to_the_next_process(field: Field) -> None:
    node = field.join(11)
    field.ask(request())
    node.kill()
    (name,) = field.grid.push_messages([request(round=5)])
    field.join(11)
    (reply,) = _wait(field, name)
    assert reply.content["step"]["round"] == 5  # type: ignore[index]


def _wait(field: Field, name: str) -> list[Message]:
    replies: list[Message] = []
    wait_until(
        lambda: bool(replies.extend(field.grid.pull_messages([name])) or replies), "no reply"
    )
    return replies


def test_a_deadline_ends_the_wait_and_a_late_reply_is_dropped(field: Field) -> None:
    late = threading.Event()

    def slow(message: Message, context: Context) -> Message:
        if message.content["step"]["round"] == 1:  # type: ignore[index]
            late.wait(PATIENCE)
        return echo(message, context)

    field.join(11, slow)
    field.ask(request(round=0))
    sent = Message(request(model()).content, 11, "train", ttl=0.7)
    (reply,) = field.grid.send_and_receive([sent], timeout=PATIENCE)
    assert reply.has_error() and reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    late.set()
    assert field.ask(request(round=2))[11].has_content()
    wait_until(lambda: not field.grid._asked and not field.grid._large, "something is kept")


def test_memory_holds_few_large_replies(field: Field) -> None:
    for node in NODES:
        field.join(node)
    names = field.grid.push_messages([request(model(), node) for node in NODES])
    seen = 0
    for _ in range(20):
        for reply in field.grid.pull_messages(names):
            seen += 1
            time.sleep(0.3)  # meanwhile all replies could come
            kept = [s.line.partial for s in field.grid._sites.values()]
            size = sum(p.got for p in kept if p) + sum(
                each.reply.got
                for each in field.grid._asked.values()
                if isinstance(each.reply, Incoming)
            )
            assert size < 2.1 * 9 * 2**20, "more replies are kept than there is room for"
            del reply
        if seen == len(NODES):
            return
    raise AssertionError("not all replies came")


def test_a_reply_that_is_too_large_is_not_taken(field: Field) -> None:
    def grow(message: Message, context: Context) -> Message:
        return Message(request(model(30.0)).content, reply_to=message)

    field.join(11, grow)
    reply = field.ask(request(model(1.0)))[11]
    assert reply.has_error() and reply.error.code == ErrorCode.UNKNOWN
    field.grid.expect(30 * 2**20)
    assert field.ask(request())[11].has_content()


def test_a_request_that_is_too_large_is_refused(field: Field) -> None:
    node = field.join(11)
    node.lanes._most_bytes = lambda _: 1000
    reply = field.ask(request(model()))[11]
    assert reply.has_error() and reply.error.code == Code.WIRE
    assert field.ask(request())[11].has_content()


def test_a_request_that_nobody_fetches_does_not_hold_up_the_next(field: Field) -> None:
    field.join(11)
    (name,) = field.grid.push_messages([Message(request(model()).content, 11, "train", ttl=0.001)])
    assert field.ask(request(model()))[11].has_content()
    for reply in field.grid.pull_messages([name]):
        assert reply.has_error()


def test_only_the_invited_site_with_its_key_is_served(
    field: Field, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    field.join(11, key=right, known=right)
    assert field.ask(request())[11].has_content()
    field.join(12, key=wrong, known=right)
    (name,) = field.grid.push_messages([Message(request().content, 12, "train", ttl=2.0)])
    (reply,) = _wait(field, name)
    assert reply.has_error() and "site-12 without its key is refused" in caplog.text


def call(field: Field, ticket: str, *sent: bytes, ca: bytes | None = None) -> list[bytes]:
    """Call a run as a stranger does -> what it answers until it hangs up."""
    invited = LaneInvitation(field.grid.host.name, field.grid.host.certificate, ticket)
    credentials = grpc.ssl_channel_credentials(ca or invited.certificate.encode())
    options = [("grpc.ssl_target_name_override", invited.name)]
    with grpc.secure_channel(f"127.0.0.1:{field.port}", credentials, options) as channel:
        stream = channel.stream_stream(invitation.PATH)(
            iter(sent), metadata=((tls.TICKET, ticket),), timeout=PATIENCE
        )
        found: list[bytes] = []
        with contextlib.suppress(grpc.RpcError):
            found.extend(stream)
        return found


def test_strangers_are_refused_in_a_sentence(
    field: Field, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(15):
        (answer,) = call(field, secrets.token_hex(32), b"H{}")
        assert b"knows no such ticket" in answer
    assert caplog.text.count("a stranger without a ticket of this run is refused") == 10
    assert not call(field, "a" * 64, b"H{}", ca=tls.fresh(field.grid.host.name)[0])
    field.join(11)
    assert field.ask(request())[11].has_content()


def test_idle_strangers_do_not_keep_a_site_from_its_run(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink_listener, "HANDSHAKE_S", 1.0)
    idle = []
    hello = b"\x16\x03\x01\x02\x00" + field.grid.host.name.encode()
    for _ in range(60):
        for first in (b"", hello[:3], hello + bytes(600)):
            each = socket.create_connection(("127.0.0.1", field.port))
            each.sendall(first)
            idle.append(each)
    field.join(11)
    assert field.ask(request(model()))[11].has_content()
    for each in idle:
        each.close()
    wait_until(lambda: field.listener.open.total() < 5, "connections are left")


@pytest.mark.parametrize(
    ("what", "frame"),
    [
        ("is not due", b"Xunknown"),
        ("belongs to no message", b"P" + bytes(100)),
        ("cannot be read", b"B" + bytes(8) + b"{}"),
        ("cannot be read", b"B" + bytes(8) + b"[" * 10**5),
    ],
)
def test_a_site_that_sends_nonsense_costs_its_stream_alone(
    field: Field, caplog: pytest.LogCaptureFixture, what: str, frame: bytes
) -> None:
    node = field.join(11)
    field.join(12)
    field.ask(request(), request(node=12))
    with node.lane().line.lock:
        node.lane().line._control.append(frame)
        node.lane().line.lock.notify_all()
    wait_until(lambda: what in caplog.text, caplog.text)
    assert "the stream of site-11 is closed" in caplog.text
    assert field.ask(request(), request(node=12)).keys() == {11, 12}


def test_a_second_stream_takes_the_place_of_the_first(
    field: Field, caplog: pytest.LogCaptureFixture
) -> None:
    node = field.join(11)
    field.ask(request())
    lane = node.lane()
    second = site_end.Lane(lane._dialer._invited, lane._dialer._address, "", node.lanes._requests)
    wait_until(lambda: "opened a second stream; the first is closed" in caplog.text, "no word")
    lane.close()
    wait_until(lambda: second.line.connected, "the second has no connection")
    assert field.ask(request())[11].has_content()
    second.close()


def test_a_stream_that_stalls_is_closed_and_its_room_is_free(
    field: Field, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_grid, "STALL_S", 0.5)
    monkeypatch.setattr(lane_grid, "HOLD_S", 0.2)
    node = field.join(11)
    field.ask(request(node=11))
    line, stalls = node.lane().line, threading.Event()
    honest = line._next

    def stall(number: int) -> Any:
        frame = honest(number)
        if frame is not None and frame[0] == parcels.PART and not stalls.is_set():
            stalls.set()
            time.sleep(3.0)
        return frame

    line._next = stall  # type: ignore[method-assign]
    sent = request(model())
    (name,) = field.grid.push_messages([sent])
    (reply,) = _wait(field, name)
    assert "stalls; it is closed" in caplog.text and reply.content == sent.content
    assert not field.grid._large


def test_a_run_that_is_over_ends_its_streams(field: Field) -> None:
    lane = field.join(11).lanes
    field.ask(request())
    ours = next(iter(lane._lanes.values()))
    field.grid.close()
    wait_until(lambda: ours.over, "the lane goes on")


def test_an_invitation_that_cannot_be_read_is_refused() -> None:
    made = LaneInvitation(invitation.new_name(), tls.fresh("x")[0].decode(), "0" * 64)
    assert LaneInvitation.parse(made.text()) == made
    spoilt = [{"name": "lane-/etc"}, {"ticket": 3}, {"certificate": ""}, {"host": "x"}]
    spoilt += [{"port": 2**16}, {"port": "1"}, {"port": True}]
    texts = [json.dumps(asdict(made) | each) for each in spoilt]
    for text in (*texts, "", "[]", "[" * 10**5, made.text()[:-1]):
        with pytest.raises(WireError):
            LaneInvitation.parse(text)


@pytest.mark.parametrize(
    ("address", "way"),
    [
        ("127.0.0.1:8443", ("grpc.enable_http_proxy", 0)),
        ("near.example.org:8443", ("grpc.enable_http_proxy", 0)),
        ("hub.example.org:8443", ("grpc.http_proxy", "http://me:secret@proxy:3128")),
    ],
)
def test_a_lane_goes_through_the_proxy_of_flowers_messages(
    address: str, way: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "near.example.org")
    monkeypatch.setenv("no_proxy", "near.example.org")
    assert dialer._way(parsed(address)) == way
