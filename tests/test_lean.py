"""The lean grid, with a dictionary in place of a SuperLink, and the shortened middleware."""

import json
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, Metadata, MetricRecord, RecordDict

from fedda import flower, records, wire
from fedda.flower import (
    HttpGrid,
    create_message_error_unavailable_ins_message,
    get_all_nested_objects,
    get_object_tree,
    make_message,
    message_pb2,
    message_to_proto,
    no_object_id_recompute,
    remove_content_from_message,
    runtime_pb2,
)
from fedda.flower.pieces import Piece, cut
from fedda.wire import Kind
from server.simulation import LocalGrid
from server.superlink import filter as filters
from server.superlink import gateway, lean_grid
from strategies.sites.mail import given_up


class Store:
    """The objects of a SuperLink and the messages that wait to be pulled."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away: Counter[str] = Counter()  # how many pulls come too early for an object
        self.lost: set[str] = set()
        self.unwanted: set[str] = set()  # objects of a message that its site has confirmed
        self.late: set[str] = set()  # objects that are announced but not there
        self.inbox: list[Message] = []
        self.handed: set[str] = set()  # requests that are forgotten, as their reply was handed out
        self.confirmed: list[str] = []
        self._client = httpx.Client()

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
        """Hand out what has come; of a request that is forgotten, say that no reply will come."""
        inbox, self.inbox = self.inbox, []
        inbox += [unavailable(name) for name in self.handed & set(request.message_ids)]
        self.handed |= {message.metadata.reply_to_message_id for message in inbox}
        with no_object_id_recompute():
            trees = [get_object_tree(message) for message in inbox]
            heads = [message_to_proto(remove_content_from_message(m)) for m in inbox]
        return runtime_pb2.PullAppMessagesResponse(messages_list=heads, message_object_trees=trees)

    def PullObject(self, request: Any) -> Any:
        name = request.object_id
        self.away[name] -= 1
        return message_pb2.PullObjectResponse(
            object_found=name not in self.lost,
            object_available=self.away[name] < 0 and name not in self.late,
            object_content=self.objects[name],
        )

    def ConfirmMessageReceived(self, request: Any) -> Any:
        self.confirmed.append(request.message_object_id)


def names(tree: Any) -> set[str]:
    return {tree.object_id}.union(*map(names, tree.children))


def sample_message(size: int, node: int = 3, answers: str = "q") -> Message:
    arrays = {"w": np.random.default_rng(node).random(size, dtype=np.float32)}
    content = records.write({"model": wire.pack(arrays, Kind.MODEL)}, metrics={"loss": 0.5})
    about = Metadata(7, "", node, 1, answers, "1", 0.0, 60.0, "train")
    return make_message(metadata=about, content=content)


def unavailable(answers: str) -> Message:
    """What a SuperLink says of a request that it does not know (any more)."""
    message = create_message_error_unavailable_ins_message(answers, 7)
    assert given_up(message)
    return message


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
    leaner._asked["q"] = lean_grid.Asked(3, time.monotonic() + 600)  # what `sample_message` answers
    return leaner


@pytest.mark.parametrize("size", [10, 3_000_000])  # of one piece, and of three
def test_a_pushed_message_can_be_pulled(grid: HttpGrid, store: Store, size: int) -> None:
    message = sample_message(size)
    grid.push_messages([message])
    store.inbox = [message]
    store.away[max(store.objects, key=lambda k: len(store.objects[k]))] = 2
    (reply,) = grid.pull_messages(["q"])
    assert store.confirmed == [message.metadata.message_id] == [reply.metadata.message_id]
    arrays, tables = records.read(reply.content)
    sent, _ = records.read(message.content)
    assert arrays["model"].buffer == sent["model"].buffer
    assert tables == {"metrics": {"loss": 0.5}}


@pytest.mark.parametrize("size, pieces", [(0, 0), (10, 1), (12_000_000, 3)])
def test_a_message_is_cut_into_the_pieces_that_flower_makes(size: int, pieces: int) -> None:
    def sent(message: Message) -> dict[str, bytes]:
        content = get_all_nested_objects(message.content)
        return {name: each.deflate() for name, each in content.items()}

    about, data = Metadata(7, "", 3, 1, "q", "1", 0.0, 60.0, "train"), np.random.bytes(size)
    plain, ours = (Array("uint8", (size,), "fedda", data) for _ in range(2))
    contents = [RecordDict({"a": ArrayRecord({"w": array})}) for array in (plain, ours)]
    messages = [make_message(metadata=about, content=content) for content in contents]
    cut(messages[1])
    ((ours,),) = (record.values() for record in contents[1].array_records.values())
    assert [type(each) for each in ours.children.values()] == [Piece] * pieces
    assert sent(messages[1]) == sent(messages[0])
    ours.data = b"other"
    assert [each.deflate()[-5:] for each in ours.children.values()] == [b"other"]


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
    grid.push_messages([message])
    store.inbox = [message]
    store.lost = set(store.objects)
    (reply,) = grid.pull_messages(["q"])
    assert reply.has_error()
    assert (reply.metadata.src_node_id, reply.metadata.reply_to_message_id) == (3, "q")


def test_a_reply_that_is_no_message_is_an_error_of_its_site(grid: HttpGrid, store: Store) -> None:
    message = sample_message(10)
    grid.push_messages([message])
    store.inbox = [message]
    store.objects = dict.fromkeys(store.objects, b"ConfigRecord  2\0{}")
    (reply,) = grid.pull_messages(["q"])
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
    grid.push_messages([message])
    store.inbox = [message]
    forge(store, kind, body)
    (reply,) = grid.pull_messages(["q"])
    assert reply.has_error() and reply.metadata.src_node_id == 3


def test_content_that_is_no_record_dict_is_an_error_of_its_site(
    grid: HttpGrid, store: Store
) -> None:
    message = sample_message(10)
    message.__dict__["_content"] = MetricRecord({"loss": 0.5})
    store.inbox = [message]
    store.objects = {k: v.deflate() for k, v in get_all_nested_objects(message).items()}
    (reply,) = grid.pull_messages(["q"])
    assert reply.has_error()


def test_a_piece_named_a_million_times_fills_no_memory(grid: HttpGrid, store: Store) -> None:
    message = sample_message(1000)
    grid.push_messages([message])
    store.inbox = [message]
    again = {"arraychunk_ids": [0] * 10**6}
    forge(store, Array, lambda old: json.dumps(json.loads(old) | again).encode())
    (reply,) = grid.pull_messages(["q"])
    assert reply.has_error()
    assert -store.away.total() < 30  # pulls


@pytest.mark.parametrize(
    ("node", "answers"),
    [(3, ""), (3, "other"), (1, ""), (4, "q")],
    ids=["to nothing", "to a closed request", "in the server's name", "for another node"],
)
def test_a_message_that_nobody_asked_for_is_not_even_fetched(
    grid: HttpGrid, store: Store, node: int, answers: str
) -> None:
    unasked, wanted = sample_message(10, node, answers), sample_message(10)
    grid.push_messages([unasked, wanted])
    store.inbox = [unasked, wanted]
    (reply,) = grid.pull_messages(["q"])
    assert reply.metadata.src_node_id == 3
    assert store.confirmed == [wanted.metadata.message_id]


def test_a_reply_counts_as_that_of_the_node_that_was_asked(grid: HttpGrid, store: Store) -> None:
    """The head is what the SuperLink checked; the message inside it is the site's own text."""
    message = sample_message(10)
    grid.push_messages([message])
    store.inbox = [message]
    posing = sample_message(10, node=9, answers="other")
    head, tree = message_to_proto(remove_content_from_message(message)), get_object_tree(posing)
    store.objects |= {k: v.deflate() for k, v in get_all_nested_objects(posing).items()}
    answer = runtime_pb2.PullAppMessagesResponse(messages_list=[head], message_object_trees=[tree])
    store.PullMessages = lambda request: answer  # type: ignore[method-assign]
    (reply,) = grid.pull_messages(["q"])
    assert (reply.metadata.src_node_id, reply.metadata.reply_to_message_id) == (3, "q")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_grid, "IDLE", 0.01)
    monkeypatch.setattr(lean_grid, "BACK", (0.0, 0.0))
    monkeypatch.setattr(lean_grid, "RETRY", (0.001, 0.002))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("place", [0, 1, 2, -1])
def test_a_reply_whose_pieces_are_late_delays_no_other_and_is_complete_in_the_end(
    grid: HttpGrid, store: Store, place: int
) -> None:
    late, other = sample_message(3_000_000), sample_message(10, 4, "p")
    grid.push_messages([late, other])
    grid._asked["p"] = lean_grid.Asked(4, time.monotonic() + 600)  # type: ignore[attr-defined]
    own = names(get_object_tree(late)) - names(get_object_tree(other))
    pieces = sorted(own, key=lambda name: len(store.objects[name]))
    store.late, store.inbox = {pieces[place]}, [late, other]
    assert [r.metadata.src_node_id for r in grid.pull_messages(["q", "p"])] == [4]
    assert list(grid.pull_messages(["q"])) == []
    store.late = set()
    (reply,) = grid.pull_messages(["q"])
    found, sent = (records.read(m.content)[0]["model"].buffer for m in (reply, late))
    assert found == sent


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("idle", "stay"), [(0.01, 600.0), (600.0, 0.01)])
def test_a_reply_whose_pieces_come_slowly_holds_no_other_for_long(
    grid: HttpGrid, store: Store, monkeypatch: pytest.MonkeyPatch, idle: float, stay: float
) -> None:
    monkeypatch.setattr(lean_grid, "IDLE", idle)
    monkeypatch.setattr(lean_grid, "STAY", stay)
    slow, other = sample_message(3_000_000), sample_message(10, 4, "p")
    grid.push_messages([slow, other])
    grid._asked["p"] = lean_grid.Asked(4, time.monotonic() + 600)  # type: ignore[attr-defined]
    store.away = Counter(dict.fromkeys(names(get_object_tree(slow)), 20))
    store.inbox = [slow, other]
    came: list[int] = []
    waiting = {"q": 3, "p": 4}
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            came.append(waiting.pop(reply.metadata.reply_to_message_id))
            assert not reply.has_error()
    assert came == [4, 3]


@pytest.mark.usefixtures("hasty")
def test_a_reply_may_take_as_long_as_its_request_is_valid(
    grid: HttpGrid, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its site is stopped in the middle of sending it."""
    message, clock = sample_message(10), [time.monotonic()]
    grid._asked["q"] = lean_grid.Asked(3, clock[0] + 600)  # type: ignore[attr-defined]
    fake = SimpleNamespace(
        monotonic=lambda: clock[0], sleep=lambda s: clock.append(clock.pop() + s)
    )
    monkeypatch.setattr(lean_grid, "time", fake)
    grid.push_messages([message])
    store.inbox, store.late = [message], {min(store.objects)}
    assert list(grid.pull_messages(["q"])) == []
    clock[0] += 500
    assert list(grid.pull_messages(["q"])) == []
    store.late = set()
    (reply,) = grid.pull_messages(["q"])
    assert reply.has_content()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("how", ["expired", "deleted"])
def test_a_reply_whose_pieces_never_come_is_given_up(
    grid: HttpGrid, store: Store, how: str
) -> None:
    ends = time.monotonic() + (600 if how == "deleted" else 0.1)
    grid._asked["q"] = lean_grid.Asked(3, ends)  # type: ignore[attr-defined]
    message = sample_message(10)
    grid.push_messages([message])
    store.inbox, store.late = [message], {min(store.objects)}
    assert list(grid.pull_messages(["q"])) == []
    store.lost = {min(store.objects)} if how == "deleted" else set()
    replies: list[Message] = []
    while not replies:
        replies = list(grid.pull_messages(["q"]))
    assert given_up(replies[0])
    assert replies[0].metadata.reply_to_message_id == "q"


def test_another_grid_stays_as_it_is() -> None:
    other = LocalGrid(lambda message, context: message, [])  # type: ignore[arg-type]
    assert lean_grid.lean(other) is other


def test_busy_paths_pass_fewer_layers_and_the_operators_paths_all() -> None:
    app = gateway.superlink(gateway.GatewaySettings())
    layers = {m.cls.__name__ for m in app.user_middleware}
    # A layer that flwr renames would silently stay; a new layer must be looked at.
    assert layers | {flower.TRACING_LAYER} == filters.OPERATORS | filters.SWITCHED_OFF | {
        "BaseHTTPMiddleware",
        "ProtobufTranslationMiddleware",
        "NodeAuthMiddleware",
    }
    filters.shortened(app)
    assert {m.cls.__name__ for m in app.user_middleware} == layers
