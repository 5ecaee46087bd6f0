"""What a site makes of the pieces of a message of Flower's, and what it takes on a lane."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, Metadata

from clients.node import bridge
from clients.node.fleet import Fleet
from fedda import records
from fedda.errors import WireError
from fedda.flower import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    make_message,
    message_pb2,
    node_pb2,
)
from fedda.records import arrays_of
from fedda.wire import Kind, pack
from tests.local_grid import Bench, Node


@pytest.fixture
def sent() -> Message:
    """A request with two models."""
    packed = {n: pack({"w": np.arange(40.0)}, Kind.MODEL) for n in ("model", "teacher/a")}
    about = Metadata(7, "", 3, 1, "", "1", 0.0, 60.0, "train")
    message = make_message(metadata=about, content=records.write(packed, step={"round": 1}))
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def pieces_of(message: Message) -> dict[str, bytes]:
    return {name: each.deflate() for name, each in get_all_nested_objects(message).items()}


def fetched(message: Message, pieces: dict[str, bytes]) -> Message:
    """What a site fetches whose server has these pieces."""
    site = Fleet.__new__(Fleet)
    site._node = node_pb2.Node(node_id=1)
    site._client = SimpleNamespace(  # type: ignore[assignment]
        PullObject=lambda request: message_pb2.PullObjectResponse(
            object_found=True,
            object_available=True,
            object_content=pieces[request.object_id],
        ),
        ConfirmMessageReceived=lambda request: message_pb2.ConfirmMessageReceivedResponse(),
    )
    return site.fetch(message, get_object_tree(message))


def test_a_message_is_fetched_as_it_was_sent(sent: Message) -> None:
    got = fetched(sent, pieces_of(sent))
    assert records.read(got.content) == records.read(sent.content)
    assert records.digest(got) == records.digest(sent)


def test_a_piece_that_is_not_what_its_name_says_is_refused(sent: Message) -> None:
    pieces = pieces_of(sent)
    last = max(pieces, key=lambda name: len(pieces[name]))
    pieces[last] = pieces[last][:-1] + b"x"
    with pytest.raises(WireError, match="not what its name says"):
        fetched(sent, pieces)


def test_a_piece_that_is_named_many_times_fills_no_memory(sent: Message) -> None:
    """A head of some kilobytes could name gigabytes."""
    array = next(arrays_of(sent.content))
    plain = array.deflate
    times = 2**28 // 150

    def many() -> bytes:
        head, _, body = plain().partition(b"\0")
        told = json.loads(body)
        told["arraychunk_ids"] *= times
        long = json.dumps(told).encode()
        kind, children, _ = head.decode().split(" ")
        return f"{kind} {children} {len(long)}".encode() + b"\0" + long

    pieces = pieces_of(sent)
    name = array.object_id
    pieces[name] = many()
    tree = get_object_tree(sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedda.flower.get_object_id", lambda content: names[content])
        names = {content: n for n, content in pieces.items()}
        assert names and tree
        with pytest.raises(WireError, match=r"has .* bytes of arrays"):
            fetched(sent, pieces)
    assert get_object_id(pieces[name]) != name


@pytest.mark.usefixtures("fresh_sites")
def test_what_a_requests_arrays_may_have_follows_from_its_settings(domains: list[Node]) -> None:
    made = Bench(domains, "kd3a")
    made.round()
    asked = [request for request in made.grid.requests if "step" in request.content]
    for request in asked:
        node = made.grid.nodes[request.metadata.dst_node_id]
        size = sum(len(array.data) for array in arrays_of(request.content))
        # A target may get a teacher for each site of the run, itself included.
        assert size <= bridge.most_bytes(request, node) <= 2 * size
        task = request.content["task"]
        assert isinstance(task, ConfigRecord)
        task["method"] = "none"
        assert bridge.most_bytes(request, node) == 0
    assert len(asked) == len(domains)
