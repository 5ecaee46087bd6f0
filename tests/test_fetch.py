"""What a site makes of a request's pieces, and what it keeps of them."""

import gc
import tracemalloc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict

from clients.node import bridge
from clients.node.fleet import Fleet, MostBytes
from fedda import records
from fedda.errors import WireError
from fedda.flower import (
    get_all_nested_objects,
    get_object_tree,
    make_message,
    message_pb2,
    node_pb2,
)
from fedda.flower.freed import freeing
from fedda.flower.pieces import Piece, arrays_of, cut, names
from fedda.wire import Kind, pack
from tests.local_grid import Bench, Node


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Message:
    """A request with two models; the first holds a piece several times, the second once more."""
    monkeypatch.setattr("fedda.flower.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 64)
    one, two = np.zeros(40, np.float32), np.arange(40, dtype=np.float32)
    two[:16] = 0
    packed = {name: pack({"w": w}, Kind.MODEL) for name, w in (("model", one), ("teacher/a", two))}
    about = Metadata(7, "", 3, 1, "", "1", 0.0, 60.0, "train")
    message = make_message(metadata=about, content=records.write(packed, step={"round": 1}))
    cut(message)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def fetched(
    message: Message, pieces: dict[str, bytes], most_bytes: MostBytes = lambda _: 0
) -> Message:
    """What a site fetches whose server has these pieces."""
    site = Fleet.__new__(Fleet)
    site._node, site._seen, site._is_fedda = node_pb2.Node(node_id=1), {}, False
    site._most_bytes = most_bytes
    site._client = SimpleNamespace(  # type: ignore[assignment]
        PullObject=lambda request: message_pb2.PullObjectResponse(
            object_found=True,
            object_available=True,
            object_content=pieces[request.object_id],
        ),
        ConfirmMessageReceived=lambda request: message_pb2.ConfirmMessageReceivedResponse(),
    )
    return site.fetch(message, get_object_tree(message))


def test_pieces_that_come_several_times_are_joined_and_their_names_kept(sent: Message) -> None:
    pieces = {name: each.deflate() for name, each in get_all_nested_objects(sent).items()}
    arrays = sent.content.array_records["arrays"]
    of_one, of_two = (names(array) for array in arrays.values())
    assert len({*of_one}) < len(of_one) and {*of_one} & {*of_two}
    got = fetched(sent, pieces)
    assert records.read(got.content) == records.read(sent.content)
    for name, array in got.content.array_records["arrays"].items():
        assert names(array) == names(arrays[name])
        assert [piece.object_id for _, piece in array.__dict__["_chunks"]] == names(array)
    assert records.digest(got) == records.digest(sent)


def test_a_piece_that_is_not_what_its_name_says_is_refused(sent: Message) -> None:
    pieces = {name: each.deflate() for name, each in get_all_nested_objects(sent).items()}
    last = names(sent.content.array_records["arrays"]["teacher/a"])[-1]
    pieces[last] = Piece(memoryview(bytes(len(pieces[last])))).deflate()
    with pytest.raises(WireError, match="not what its name says"):
        fetched(sent, pieces)


def test_a_piece_that_is_named_many_times_is_not_joined_beyond_the_runs_model() -> None:
    """A head of some kilobytes could name fifty gigabytes."""
    piece, times = Piece(memoryview(bytes(1000))), 10_000
    array = Array("uint8", (1000 * times,), records.STYPE, b"")
    array.__dict__["_chunks"] = [(piece.object_id, piece)] * times
    record = ArrayRecord()
    record["model"] = array
    step = ConfigRecord({"round": 1})
    about = Metadata(7, "", 3, 1, "", "1", 0.0, 60.0, "train")
    message = make_message(metadata=about, content=RecordDict({"arrays": record, "step": step}))
    message.metadata.__dict__["_message_id"] = message.object_id
    pieces = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    seen = []

    def most_bytes(message: Message) -> int:
        arrays = message.content.array_records["arrays"]
        seen.append((dict(message.content["step"]), len(arrays["model"].data)))
        return 1000 * (times - 1)

    tracemalloc.start()
    with pytest.raises(ValueError, match=r"more than the 2,0\d\d bytes that the run's model"):
        fetched(message, pieces)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    with pytest.raises(ValueError, match="much larger than it may be"):
        fetched(message, pieces, most_bytes)
    assert seen == [({"round": 1}, 0)]  # the request's text is there before its arrays
    got = fetched(message, pieces, lambda _: 1000 * times)
    assert len(got.content.array_records["arrays"]["model"].data) == 1000 * times


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


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without garbage collections, as between two of them."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_message_is_freed_without_a_garbage_collection(sent: Message) -> None:
    pieces = {name: each.deflate() for name, each in get_all_nested_objects(sent).items()}
    got = fetched(sent, pieces)
    records.size(got.content)
    records.digest(got)
    content = weakref.ref(got.content)
    del got
    assert content() is None


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("freed", [False, True])
def test_an_answer_is_freed_without_a_garbage_collection(freed: bool) -> None:
    """As soon as this passes without `freeing`, httpx does so itself."""
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, text="yes")))
    client = freeing(client) if freed else client
    answer = client.post("http://localhost", content=b"asked")
    assert answer.text == "yes"
    answer, request = weakref.ref(answer), weakref.ref(answer.request)  # type: ignore[assignment]
    assert (answer() is None) == (request() is None) == freed  # type: ignore[operator]
