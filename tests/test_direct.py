"""Calls that the server answers without flwr's web stack, and sites that wait for work."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fedda.flower import (
    PROTOBUF_REQUEST_TYPES,
    SUPERLINK_NODE_ID,
    TASK_TOKEN_HEADER,
    Node,
    SendNodeHeartbeatRequest,
)
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import message_pb2 as proto
from server.superlink import direct, gateway, waiting
from server.superlink.direct import Direct, RunCalls
from server.superlink.filter import FLEET_PREFIX, shortened
from server.superlink.waiting import Waiting, wanted

SERVER = Node(node_id=SUPERLINK_NODE_ID)


async def asked(app: Any, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Ask an ASGI application -> status and body."""
    sent: list[Any] = []
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return left.pop() if left else {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)

    given = {"content-type": "application/protobuf", "accept": "application/protobuf", **headers}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(e.get("body", b"") for e in sent)


@pytest.fixture(scope="module")
def app() -> Any:
    return gateway.superlink(gateway.GatewaySettings())


@pytest.mark.parametrize("threads", [False, True])
def test_direct_answers_are_those_of_the_whole_stack(app: Any, threads: bool) -> None:
    state = app.state.linkstate_factory.state()
    node = state.create_node("owner", "name", f"key {threads}".encode(), 30)
    state.activate_node(node, 30)
    requests = {
        "send-node-heartbeat": SendNodeHeartbeatRequest(node=Node(node_id=node)),
        "pull-messages": fleet.PullMessagesRequest(node=Node(node_id=node)),
    }
    requests["send-node-heartbeat"].heartbeat_interval = 30

    async def both(name: str, request: Any) -> None:
        mine = await Direct(state, threads).of_site(request)
        stack = shortened(app, guarded=True)
        theirs = await asked(stack, FLEET_PREFIX + name, request.SerializeToString())
        assert (200, mine) == theirs

    for name, request in requests.items():
        asyncio.run(both(name, request))


def test_what_a_handler_refuses_is_left_to_the_whole_stack(app: Any) -> None:
    state = app.state.linkstate_factory.state()
    made = Direct(state, False)
    refused = [
        proto.PullObjectRequest(run_id=7, object_id="a"),
        proto.PushObjectRequest(run_id=7, object_id="a", object_content=b"x" * 2**17),
        proto.ConfirmMessageReceivedRequest(run_id=7, message_object_id="a"),
        fleet.PushMessagesRequest(),
        fleet.ActivateNodeRequest(),  # has no short way
    ]
    assert [asyncio.run(made.of_site(request)) for request in refused] == [None] * 5


def test_every_call_with_a_short_way_is_one_of_flwrs() -> None:
    fleets = {PROTOBUF_REQUEST_TYPES["POST", p] for _, p in PROTOBUF_REQUEST_TYPES if "fleet" in p}
    assert set(direct.HANDLERS) <= fleets
    for name, (kind, _) in direct.OF_A_RUN.items():
        assert PROTOBUF_REQUEST_TYPES["POST", direct.RUNTIME + name] is kind


@pytest.mark.parametrize(
    ("path", "tokens", "short"),
    [
        ("pull-object", ["right"], True),
        ("pull-object", ["wrong"], False),
        ("pull-object", ["right", "right"], False),
        ("pull-object", [], False),
        ("get-nodes", ["right"], False),
        ("pull-object/", ["right"], False),
    ],
)
def test_a_runs_program_is_known_by_its_token(path: str, tokens: list[str], short: bool) -> None:
    task = SimpleNamespace(run_id=3)
    state = SimpleNamespace(
        get_task_by_token={"right": task}.get, get_object=lambda run, name: b"piece of %d" % run
    )
    passed: list[bytes] = []

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        passed.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 401, "headers": []})

    body = proto.PullObjectRequest(node=SERVER, object_id="a").SerializeToString()
    calls = RunCalls(whole, Direct(state, False))

    async def with_tokens(scope: Any, receive: Any, send: Any) -> None:
        scope["headers"] += [(TASK_TOKEN_HEADER.lower().encode(), t.encode()) for t in tokens]
        await calls(scope, receive, send)

    status, answer = asyncio.run(asked(with_tokens, direct.RUNTIME + path, body))
    assert status == (200 if short else 401) and passed == ([] if short else [body])
    if short:
        assert proto.PullObjectResponse.FromString(answer).object_content == b"piece of 3"


FAR = 3600.0  # seconds


def stored(node: int, reply: bool = False) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(
            dst_node_id=node, run_id=3, reply_to_message_id="a" if reply else ""
        )
    )


def test_a_site_waits_until_there_is_work_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is work, it would otherwise wait longer than the test may take."""
    monkeypatch.setattr(waiting, "LATER", 0.0)

    async def play() -> None:
        state = SimpleNamespace(
            store_message_and_object_tree=lambda message: "done", store_object=None
        )
        made = Waiting(state)
        began_with = [await made.for_work(node, FAR) for node in (7, 8, 9)]
        assert all(may for _, may in began_with), "work may be older than this server"
        for node in (7, 8, 9):
            made.handed(node, 0)
        monkeypatch.setattr(waiting, "WHILE", 0.2)
        waited, may = await made.for_work(7, FAR)
        assert waited >= 0.19 and not may
        monkeypatch.setattr(waiting, "WHILE", FAR)
        assert not (await made.for_work(7, 0.0))[1]

        def later() -> None:  # as a thread of the SuperLink does
            assert state.store_message_and_object_tree(stored(9, reply=True)) == "done"
            assert state.store_message_and_object_tree(stored(8)) == "done"

        other, mine, reply = (asyncio.create_task(made.for_work(n, FAR)) for n in (7, 8, 9))
        await asyncio.sleep(0)  # all three wait from here on
        thread = threading.Thread(target=later)
        thread.start()
        assert (await mine)[1]
        thread.join()
        assert not other.done() and not reply.done()
        state.store_message_and_object_tree(stored(7))
        await other
        state.store_message_and_object_tree(stored(7))  # while it does not wait
        await asyncio.sleep(0.01)
        for left in (1, 0):
            assert (await made.for_work(7, FAR))[1]  # again and again, until it was handed both
            made.handed(7, 1)
            assert (await made.for_work(7, 0.0))[1] == (left > 0)
        state.store_message_and_object_tree(stored(7))  # it expires before the site asks
        assert (await made.for_work(7, FAR))[1]
        made.handed(7, 0)
        waits = asyncio.create_task(made.for_work(7, FAR))
        await asyncio.sleep(0)
        assert not waits.done() and not reply.done()
        made.close()
        await asyncio.gather(waits, reply)
        await made.for_work(7, FAR)
        assert not made._idle

    asyncio.run(play())


def test_the_more_sites_wait_the_longer_each_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they all together ask no more often; but one that would not is not kept."""
    state = SimpleNamespace(store_message_and_object_tree=None, store_object=None)
    kept: list[float] = []

    def timeout(seconds: float) -> Any:
        kept.append(seconds)
        return asyncio.timeout(0)

    async def play() -> None:
        made = Waiting(state)
        for before in (0, 99, 499, 10_000):
            made._idle = before
            made.handed(7, 0)
            await made.for_work(7, 60.0)
            await made.for_work(7, 2.0)

    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    asyncio.run(play())
    assert kept == [1.0, 1.0, 1.0, 1.0, 5.0, 2.0, 10.0, 2.0]


def test_a_piece_that_is_on_its_way_is_given_once_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks again and again; a piece that is there, or will not come, is not waited for."""
    pieces: dict[str, bytes] = {"late": b"", "never": b"", "there": b"x"}
    asked_for: list[str] = []

    def get(run: int, name: str) -> bytes | None:
        asked_for.append(name)
        return pieces.get(name)

    def put(run: int, session: str, name: str, content: bytes) -> bool:
        pieces[name] = content
        return True

    async def play() -> None:
        state = SimpleNamespace(
            store_message_and_object_tree=None,
            store_object=put,
            get_object=get,
            get_task_by_token={"t": SimpleNamespace(run_id=3)}.get,
        )
        made = Waiting(state)
        answers = Direct(state, False, made)
        monkeypatch.setattr(waiting, "WHILE", FAR)
        assert await answers.piece("t", "there", FAR) == b"x"
        assert await answers.piece("t", "unknown", FAR) is None
        assert await answers.piece("t", "late", 0) == b""
        assert await answers.piece("wrong", "there", FAR) is None
        request = proto.PullObjectRequest(node=SERVER, object_id="late").SerializeToString()
        one = asyncio.create_task(answers.piece("t", "late", FAR))
        other = asyncio.create_task(answers.of_run("pull-object", "t", request, FAR))
        last = asyncio.create_task(answers.piece("t", "never", FAR))
        await asyncio.sleep(0)
        del asked_for[:]
        put_down = threading.Thread(target=state.store_object, args=(3, "s", "late", b"now"))
        put_down.start()  # as a thread of the SuperLink does
        assert await one == b"now"
        given = await other
        put_down.join()
        assert given is not None
        assert proto.PullObjectResponse.FromString(given).object_content == b"now"
        assert asked_for == ["late", "late"] and not last.done()
        made.close()
        assert await last == b"" and not made._waits

    asyncio.run(play())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"wait=1", 1.0), (b" wait=20 ", 20.0), (b"wait=", 0), (b"wait=-1", 0), (b"respond-async", 0)],
)
def test_only_a_site_that_says_so_waits(value: bytes, seconds: float) -> None:
    assert wanted([(b"host", b"x"), (b"prefer", value)]) == seconds
    assert wanted([(b"host", value)]) == 0
