"""Flower's grid, with the memory of one copy of a reply and without its pauses.

flwr holds a reply three times while it fetches it (as pieces, joined, and joined again as bytes),
holds all pieces of a request while it pushes them, and waits a second for each piece that a site
is still sending. This module uses the HTTP grid's insides; on any other grid it does nothing.
"""

import contextlib
import ctypes
import io
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from flwr.app import Array, Error, Message
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import message_pb2, runtime_pb2
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid.http_grid import HttpGrid

ARRAYS = 3  # levels below a message: its records, an array record, the arrays; then their pieces
WORKERS = 2
FREED_AT_ONCE = 2**20  # bytes
M_MMAP_THRESHOLD = -3

Fetch = Callable[[str], bytes]
# What a site sends must not end the run.
UNREADABLE = (ObjectPullError, ValueError, LookupError, TypeError)


class LeanGrid(HttpGrid):
    """The grid that it is made of, connection and all."""

    def __init__(self, grid: HttpGrid) -> None:
        self.__dict__ = grid.__dict__

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield replies one by one; the next is fetched when it is asked for."""
        request = runtime_pb2.PullAppMessagesRequest(message_ids=message_ids)
        answer = self._runtime_client.PullMessages(request)
        for head, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            try:
                yield self._fetch(tree)
            except UNREADABLE:
                known = message_from_proto(head).metadata
                lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "the reply is incomplete or no message")
                yield make_message(metadata=known, error=lost)

    def _fetch(self, tree: message_pb2.ObjectTree) -> Message:
        one = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, self._run_id)
        levels = [[tree]]
        while len(levels) <= ARRAYS:
            levels.append([child for parent in levels[-1] for child in parent.children])
        names = list(dict.fromkeys(t.object_id for level in levels for t in level))
        pull = partial(
            pull_objects, pull_object_fn=one, initial_backoff=0.01, backoff_cap=0.5
        )  # a piece may still be on its way from the site
        contents = pull(names)
        arrays: dict[str, InflatableObject] = {
            t.object_id: _array(contents.pop(t.object_id), lambda name: pull([name])[name])
            for t in {t.object_id: t for t in levels[ARRAYS]}.values()
        }
        self._runtime_client.ConfirmMessageReceived(
            message_pb2.ConfirmMessageReceivedRequest(
                node=self.node, run_id=self._run_id, message_object_id=tree.object_id
            )
        )
        message = inflate_object_from_contents(tree.object_id, contents, objects=arrays)
        if not isinstance(message, Message):
            raise ValueError(f"a reply is a {type(message).__name__}")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        objects = {k: v for message in sent for k, v in get_all_nested_objects(message).items()}
        answer = self._runtime_client.PushMessages(
            runtime_pb2.PushAppMessagesRequest(
                messages_list=[message_to_proto(remove_content_from_message(m)) for m in sent],
                message_object_trees=[get_object_tree(m) for m in sent],
            )
        )
        push = make_push_object_fn_protobuf(
            self._runtime_client.PushObject, self.node, run_id, answer.session_id
        )
        wanted = set(answer.objects_to_push)
        with ThreadPoolExecutor(WORKERS) as workers:  # a piece is written out when its turn comes
            each = [k for k in objects if k in wanted]
            list(workers.map(lambda name: push(name, objects[name].deflate()), each))
        return list(answer.message_ids)

    @property
    def _run_id(self) -> int:
        assert self._run is not None
        return self._run.run_id


def _array(content: bytes, fetch: Fetch) -> Array:
    """An array, joined from its pieces as they come."""
    about = json.loads(get_object_body(content, Array))
    children = get_object_children_ids_from_object_content(content)
    joined = io.BytesIO()  # hands its memory over as bytes; joining pieces would copy them

    def take(piece: bytes) -> None:
        joined.write(memoryview(piece)[piece.index(b"\0") + 1 :])

    ahead: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(WORKERS) as workers:
        for place in about["arraychunk_ids"]:
            ahead.append(workers.submit(fetch, children[place]))
            if len(ahead) == WORKERS:
                take(ahead.popleft().result())
        while ahead:
            take(ahead.popleft().result())
    array = Array(about["dtype"], tuple(about["shape"]), about["stype"], b"")
    array.data = joined.getvalue()
    return array


def lean(grid: Grid) -> Grid:
    """The same grid, lean if it is the one that a SuperLink's ServerApp gets."""
    if not isinstance(grid, HttpGrid):
        return grid
    # glibc would keep freed pieces of a few MB for later, and with them most of a model's size.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, FREED_AT_ONCE)
    return LeanGrid(grid)
