"""The server's own way to fetch replies: what sites send is bounded and never ends a run."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedda import records, wire
from server.lean import LeanGrid
from server.local import LocalGrid

MODEL = wire.pack({"w": np.arange(3_000_000, dtype=np.float32)}, wire.Kind.MODEL)  # three pieces


class Store:
    """What a SuperLink keeps, as its run-time API gives it out."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.pulls = 0
        self.replies: list[Any] = []
        self.trees: list[Any] = []

    def put(self, reply: Message) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.objects |= {k: v.deflate() for k, v in get_all_nested_objects(reply).items()}
        head = remove_content_from_message(reply) if reply.has_content() else reply
        self.replies.append(message_to_proto(head))
        self.trees.append(get_object_tree(reply))

    def forge(self, kind: type, body: Callable[[bytes], bytes]) -> None:
        """Replace what objects of a kind hold, as a site could that writes its own."""
        for name, content in self.objects.items():
            head, _, old = content.partition(b"\0")
            what, children, _ = head.split(b" ")
            if what.decode() == kind.__qualname__:
                new = body(old)
                self.objects[name] = b"%s %s %d\0%s" % (what, children, len(new), new)

    def PullMessages(self, request: Any) -> Any:
        return SimpleNamespace(messages_list=self.replies, message_object_trees=self.trees)

    def PullObject(self, request: Any) -> Any:
        self.pulls += 1
        content = self.objects[request.object_id]
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        pass


@pytest.fixture
def store() -> Store:
    LocalGrid(lambda message, context: message, [])  # type: ignore[arg-type]  # names the task
    return Store()


def fetched(store: Store) -> list[Message]:
    inner = HttpGrid.__new__(HttpGrid)
    run = SimpleNamespace(run_id=1)
    inner.__dict__ |= {"_client": store, "node": None, "_run": run}
    grid = LeanGrid(inner)
    grid.sent = len(MODEL.buffer)
    return list(grid.pull_messages(["one"]))


def reply(content: RecordDict) -> Message:
    request = Message(RecordDict(), 7, "train", ttl=9)
    request.metadata.__dict__["_message_id"] = "one"
    return Message(content, reply_to=request)


def honest() -> Message:
    return reply(records.write({"model": MODEL}, metrics={"loss": 0.5}))


def test_a_reply_arrives_as_it_was_sent(store: Store) -> None:
    store.put(honest())
    (found,) = fetched(store)
    arrays, tables = records.read(found.content)
    assert arrays == {"model": MODEL} and tables == {"metrics": {"loss": 0.5}}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (MetricRecord, lambda old: b"\xff" * 9),
        (ConfigRecord, lambda old: b"\xff" * 9),
        (RecordDict, lambda old: b"["),
        (Message, lambda old: b"\xff" * 9),
        (Array, lambda old: b"[" * 200_000),
        (Array, lambda old: b"{}"),
        (Array, lambda old: json.dumps(json.loads(old) | {"arraychunk_ids": [9]}).encode()),
    ],
)
def test_what_cannot_be_read_is_an_error_of_its_site(store: Store, kind: type, body: Any) -> None:
    store.put(honest())
    store.forge(kind, body)
    (found,) = fetched(store)
    assert found.has_error() and found.metadata.src_node_id == 7


def test_a_content_of_another_kind_is_an_error_of_its_site(store: Store) -> None:
    odd = reply(RecordDict())
    odd.__dict__["_content"] = MetricRecord({"loss": 0.5})
    store.put(odd)
    assert fetched(store)[0].has_error()


def test_a_piece_named_a_million_times_fills_no_memory(store: Store) -> None:
    store.put(honest())
    again = {"arraychunk_ids": [0] * 10**6}
    store.forge(Array, lambda old: json.dumps(json.loads(old) | again).encode())
    assert fetched(store)[0].has_error()
    assert store.pulls < 30
