"""Flower's grid, with one copy of a reply in memory instead of three, and without long pauses.

flwr holds a reply three times while it fetches it (as pieces, joined, and joined again as bytes),
holds all pieces of a request while it pushes them, and waits a second for each piece that a site
is still sending. This module uses internals of the HTTP grid; any other grid stays as it is.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
from flwr.app import Array, Error, Message, RecordDict
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
    ObjectPushError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid.http_grid import HttpGrid

log = logging.getLogger("fedda.server")

ARRAYS = 3  # the level of arrays below a message: records, array records, arrays, then pieces
WORKERS = 2
FREED_AT_ONCE = 2**18  # bytes
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc's malloc.h

Fetch = Callable[[str], bytes]
KEPT_SIZE, KEPT_COUNT = 2**16, 256  # the largest piece that is kept, in bytes; how many are kept
PATIENCE = 600.0  # seconds for a reply's pieces to arrive
MOST = 2  # how many times as large as the largest request's arrays those of a reply may be


class LeanGrid(HttpGrid):
    """Takes over another grid, with its connection."""

    def __init__(self, grid: HttpGrid) -> None:
        assert grid._runtime_client is not None  # asking for it connects
        for name, value in vars(grid).items():
            setattr(self, name, value)
        self._seen: dict[str, bytes] = {}
        # Bytes of the largest request's arrays so far, or as many as `expect` was called with.
        self.sent = 0

    def expect(self, size: int) -> None:
        """Accept replies with `size` bytes of arrays, even if no request was as large."""
        self.sent = max(self.sent, size)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield replies one by one; each is fetched only when the caller asks for it."""
        request = runtime_pb2.PullAppMessagesRequest(message_ids=message_ids)
        answer = self._runtime_client.PullMessages(request)
        for head, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            try:
                message = self._fetch(tree)
                # A site can name another site's request in its reply, but not in the checked head.
                asked = head.metadata.reply_to_message_id
                message.metadata.__dict__["_reply_to_message_id"] = asked
                yield message
                del message  # so that it is freed before the next one is fetched
            except httpx.HTTPError:
                raise  # the server failed, not a site
            except ObjectPullError as error:
                yield _failed(head, ErrorCode.MESSAGE_UNAVAILABLE, str(error))
            except Exception:  # nothing that a site sends may end the run
                log.exception("a reply cannot be read")
                yield _failed(head, ErrorCode.UNKNOWN, "the reply cannot be read")

    def _fetch(self, tree: message_pb2.ObjectTree) -> Message:
        one = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, self._run_id)
        levels = [[tree]]
        while len(levels) <= ARRAYS:
            levels.append([child for parent in levels[-1] for child in parent.children])
        names = list(dict.fromkeys(t.object_id for level in levels for t in level))
        ends = time.monotonic() + PATIENCE

        def pull(names: list[str]) -> dict[str, bytes]:
            # A piece may still be on its way from the site, but not for ever.
            left = max(0.0, ends - time.monotonic())
            return pull_objects(names, one, max_time=left, initial_backoff=0.01, backoff_cap=0.5)

        contents = {name: self._seen[name] for name in names if name in self._seen}
        contents |= pull([name for name in names if name not in contents])
        if len(self._seen) > KEPT_COUNT:
            self._seen.clear()
        # A piece is named by the hash of its content, and every reply has the same model layout.
        self._seen |= {n: c for n, c in contents.items() if len(c) <= KEPT_SIZE}
        arrays: dict[str, InflatableObject] = {}
        left = MOST * self.sent
        for name in dict.fromkeys(t.object_id for t in levels[ARRAYS]):
            array = _array(contents.pop(name), lambda piece: pull([piece])[piece], left)
            left -= len(array.data)
            arrays[name] = array
        self._runtime_client.ConfirmMessageReceived(
            message_pb2.ConfirmMessageReceivedRequest(
                node=self.node, run_id=self._run_id, message_object_id=tree.object_id
            )
        )
        message = inflate_object_from_contents(tree.object_id, contents, objects=arrays)
        if not isinstance(message, Message):
            raise ValueError(f"a reply is a {type(message).__name__}")
        if message.has_content() and not isinstance(message.content, RecordDict):
            raise ValueError(f"a reply's content is a {type(message.content).__name__}")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        self.sent = max([self.sent, *map(_size, sent)])
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

        def work(name: str) -> None:
            content = objects[name].deflate()  # only now, to hold few at a time
            try:
                push(name, content)
            except ObjectPushError:
                # A site has pieces of earlier messages, so it may confirm a message before all of
                # them were pushed; the SuperLink then drops the rest. If it drops a message that
                # was not confirmed, the site counts as silent.
                log.debug("piece %s is not wanted any more", name)
            _sweep(content)

        with ThreadPoolExecutor(WORKERS) as workers:
            list(workers.map(work, [name for name in objects if name in wanted]))
        return list(answer.message_ids)

    @property
    def _run_id(self) -> int:
        assert self._run is not None
        return self._run.run_id


def _failed(head: message_pb2.Message, code: int, reason: str) -> Message:
    return make_message(metadata=message_from_proto(head).metadata, error=Error(code, reason))


def _size(message: Message) -> int:
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def _array(content: bytes, fetch: Fetch, most: int) -> Array:
    """An array of at most `most` bytes, joined from its pieces as they arrive."""
    header = json.loads(get_object_body(content, Array))
    children = get_object_children_ids_from_object_content(content)
    joined = io.BytesIO()  # gives its memory away as bytes; joining pieces would copy them

    def take(piece: bytes) -> None:
        joined.write(memoryview(piece)[piece.index(b"\0") + 1 :])
        if joined.tell() > most:  # an array can name one piece a million times
            raise ValueError("a reply is much larger than what was sent")
        _sweep(piece)

    ahead: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(WORKERS) as workers:
        for place in header["arraychunk_ids"]:
            ahead.append(workers.submit(fetch, children[place]))
            if len(ahead) == WORKERS:
                take(ahead.popleft().result())
        while ahead:
            take(ahead.popleft().result())
    array = Array(header["dtype"], tuple(header["shape"]), header["stype"], b"")
    array.data = joined.getvalue()
    return array


def _sweep(piece: bytes) -> None:
    """Free a large piece: httpx holds bodies in cycles, which only the garbage collector frees."""
    if len(piece) >= FREED_AT_ONCE:
        gc.collect()


def lean(grid: Grid) -> Grid:
    """A `LeanGrid` of the grid that a SuperLink's ServerApp gets; any other grid as it is."""
    if not isinstance(grid, HttpGrid):
        return grid
    gc.freeze()  # so that no sweep looks through the modules imported so far
    atexit.register(gc.unfreeze)
    # Else glibc keeps freed pieces in a pool per thread: the memory of several models.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, FREED_AT_ONCE)
        libc.mallopt(M_ARENA_MAX, 1)
    return LeanGrid(grid)
