"""The lean grid, with a dictionary in place of a SuperLink, and the shortened middleware."""

import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedda import records, wire
from fedda.wire import Kind
from server.simulation import LocalGrid
from server.superlink import filter as filters
from server.superlink import gateway, lean_grid


class Store:
    """The objects of a SuperLink and one message that waits to be pulled."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away: Counter[str] = Counter()  # how many pulls come too early for an object
        self.lost: set[str] = set()
        self.unwanted: set[str] = set()  # objects of a message that its site has confirmed
        self.waiting: Message | None = None
        self.confirmed: list[str] = []

    def PushMessages(self, request: Any) -> Any:
        pieces: set[str] = set()
        for tree in request.message_object_trees:
            pieces |= names(tree)
        ids = [m.metadata.message_id for m in request.messages_list]
        return runtime_pb2.PushAppMessagesResponse(
            message_ids=ids, objects_to_push=pieces - set(self.objects), session_id="s"
        )

    def PushObject(self, request: Any) -> Any:
        stored = request.object_id not in self.unwanted
        if stored:
            self.objects[request.object_id] = request.object_content
        return message_pb2.PushObjectResponse(stored=stored)

    def PullMessages(self, request: Any) -> Any:
        assert self.waiting is not None
        with no_object_id_recompute():
            tree = get_object_tree(self.waiting)
            head = message_to_proto(remove_content_from_message(self.waiting))
        return runtime_pb2.PullAppMessagesResponse(
            messages_list=[head], message_object_trees=[tree]
        )

    def PullObject(self, request: Any) -> Any:
        name = request.object_id
        self.away[name] -= 1
        return message_pb2.PullObjectResponse(
            object_found=name not in self.lost,
            object_available=self.away[name] < 0,
            object_content=self.objects[name],
        )

    def ConfirmMessageReceived(self, request: Any) -> Any:
        self.confirmed.append(request.message_object_id)


def names(tree: Any) -> set[str]:
    return {tree.object_id}.union(*map(names, tree.children))


def sample_message(size: int) -> Message:
    arrays = {"w": np.random.default_rng(0).random(size, dtype=np.float32)}
    content = records.write({"model": wire.pack(arrays, Kind.MODEL)}, metrics={"loss": 0.5})
    about = Metadata(7, "", 3, 1, "q", "1", 0.0, 60.0, "train")
    return make_message(metadata=about, content=content)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def grid(store: Store) -> HttpGrid:
    plain = HttpGrid(token="t")
    plain._client = store  # type: ignore[assignment]
    plain._run = SimpleNamespace(run_id=7)  # type: ignore[assignment]
    leaner = lean_grid.lean(plain)
    assert isinstance(leaner, lean_grid.LeanGrid)
    return leaner


@pytest.mark.parametrize("size", [10, 3_000_000])  # of one piece, and of three
def test_a_pushed_message_can_be_pulled(grid: HttpGrid, store: Store, size: int) -> None:
    message = sample_message(size)
    (pushed,) = grid.push_messages([message])
    store.waiting = message
    store.away[max(store.objects, key=lambda k: len(store.objects[k]))] = 2
    (reply,) = grid.pull_messages([pushed])
    assert store.confirmed == [pushed] == [reply.metadata.message_id]
    arrays, tables = records.read(reply.content)
    sent, _ = records.read(message.content)
    assert arrays["model"].buffer == sent["model"].buffer
    assert tables == {"metrics": {"loss": 0.5}}


def test_a_message_may_be_confirmed_before_its_last_piece_was_pushed(
    grid: HttpGrid, store: Store
) -> None:
    """A site that has a piece of an earlier message does not wait for it; nor does the run end."""
    message = sample_message(10)
    store.unwanted = {names(get_object_tree(message)).pop()}
    (pushed,) = grid.push_messages([message])
    assert pushed == message.metadata.message_id
    assert set(store.objects) == names(get_object_tree(message)) - store.unwanted


def test_a_reply_that_is_not_complete_is_an_error_of_its_site(grid: HttpGrid, store: Store) -> None:
    message = sample_message(10)
    (pushed,) = grid.push_messages([message])
    store.waiting = message
    store.lost = set(store.objects)
    (reply,) = grid.pull_messages([pushed])
    assert reply.has_error()
    assert (reply.metadata.src_node_id, reply.metadata.reply_to_message_id) == (3, "q")


def test_a_reply_that_is_no_message_is_an_error_of_its_site(grid: HttpGrid, store: Store) -> None:
    message = sample_message(10)
    (pushed,) = grid.push_messages([message])
    store.waiting = message
    store.objects = dict.fromkeys(store.objects, b"ConfigRecord  2\0{}")
    (reply,) = grid.pull_messages([pushed])
    assert reply.has_error()


def forge(store: Store, kind: type, body: Callable[[bytes], bytes]) -> None:
    """Replace the content of all objects of a kind, as a site with another program could."""
    for name, content in store.objects.items():
        head, _, old = content.partition(b"\0")
        what, children, _ = head.split(b" ")
        if what.decode() == kind.__qualname__:
            new = body(old)
            store.objects[name] = b"%s %s %d\0%s" % (what, children, len(new), new)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MetricRecord, lambda old: b"\xff" * 9),
        (RecordDict, lambda old: b"["),
        (Message, lambda old: b"\xff" * 9),
        (Array, lambda old: b"[" * 200_000),
        (Array, lambda old: b"{}"),
        (Array, lambda old: json.dumps(json.loads(old) | {"arraychunk_ids": [9]}).encode()),
    ],
)
def test_a_reply_that_cannot_be_read_is_an_error_of_its_site(
    grid: HttpGrid, store: Store, kind: type, body: Callable[[bytes], bytes]
) -> None:
    message = sample_message(10)
    (pushed,) = grid.push_messages([message])
    store.waiting = message
    forge(store, kind, body)
    (reply,) = grid.pull_messages([pushed])
    assert reply.has_error() and reply.metadata.src_node_id == 3


def test_content_that_is_no_record_dict_is_an_error_of_its_site(
    grid: HttpGrid, store: Store
) -> None:
    message = sample_message(10)
    message.__dict__["_content"] = MetricRecord({"loss": 0.5})
    store.waiting = message
    store.objects = {k: v.deflate() for k, v in get_all_nested_objects(message).items()}
    (reply,) = grid.pull_messages(["any"])
    assert reply.has_error()


def test_a_piece_named_a_million_times_fills_no_memory(grid: HttpGrid, store: Store) -> None:
    message = sample_message(1000)
    (pushed,) = grid.push_messages([message])
    store.waiting = message
    again = {"arraychunk_ids": [0] * 10**6}
    forge(store, Array, lambda old: json.dumps(json.loads(old) | again).encode())
    (reply,) = grid.pull_messages([pushed])
    assert reply.has_error()
    assert -store.away.total() < 30  # pulls


def test_another_grid_stays_as_it_is() -> None:
    other = LocalGrid(lambda message, context: message, [])  # type: ignore[arg-type]
    assert lean_grid.lean(other) is other


def test_busy_paths_pass_fewer_layers_and_the_operators_paths_all() -> None:
    app = gateway.superlink(gateway.Settings())
    layers = {m.cls.__name__ for m in app.user_middleware}
    # A layer that flwr renames would silently stay; a new layer must be looked at.
    assert layers == filters.OPERATORS | filters.SWITCHED_OFF | {
        "BaseHTTPMiddleware",
        "ProtobufTranslationMiddleware",
        "NodeAuthMiddleware",
    }
    filters.shortened(app)
    assert {m.cls.__name__ for m in app.user_middleware} == layers
