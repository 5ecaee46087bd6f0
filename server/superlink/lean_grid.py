"""Flower's grid, with one copy of a reply in memory instead of three, and without long pauses.

flwr holds a reply three times while it fetches it (as pieces, joined, and joined again as bytes),
holds all pieces of a request while it pushes them, and waits a second for each piece that a site
is still sending. This module uses internals of the HTTP grid; any other grid stays as it is.

A SuperLink hands out whatever a site addressed to the server. Here only a reply to an open request
is fetched, if it comes from the node that was asked. A reply whose pieces are not all there yet is
set aside, so that it delays no other, and is given up once its pieces stop coming.
"""

import atexit
import gc
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, TypeVar

import httpx
from flwr.app import Array, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedda import flower
from fedda.flower.batches import CALLS, SMALL
from fedda.flower.batches import MOST as TOGETHER
from fedda.flower.freed import freeing
from fedda.flower.pieces import HalfSent, Piece, arrays_of, cut
from fedda.ops import spawn

from .allocator import one_pool
from .near import Near, as_httpx

log = logging.getLogger("fedda.server")

ARRAYS = 3  # the level of arrays below a message: records, array records, arrays, then pieces
WORKERS = 2
OUTSIDE = 2**22  # bytes of an array that is outside of malloc's pool

P = TypeVar("P", bytes, BinaryIO)
R = TypeVar("R")

KEPT_SIZE, KEPT_COUNT = 2**16, 256  # the largest piece that is kept, in bytes; how many are kept
# A look at a reply whose pieces are still coming ends after so many seconds without a new one, or
# after so many since it first had to wait.
IDLE, STAY = 1.0, 15.0
BACK = (0.25, 10.0)  # seconds until the next look, at first and at most, while others are awaited
RETRY = (0.01, 0.5)  # seconds between two attempts to get a piece, at first and at most
MOST = 2  # how many times as large as the largest request's arrays those of a reply may be


class Aside(Exception):
    """The next piece of a reply is not there yet; look at other replies in the meantime."""


@dataclass
class Asked:
    """An open request: the node that it went to, and until when (monotonic) its reply counts."""

    node: int
    ends: float


@dataclass
class Arrival:
    """A reply of which some pieces may still be on their way.

    Attributes:
        head: the reply without its content.
        tree: the names of its pieces.
        ends: when the request expires, in seconds of the monotonic clock.
        look: when to look again, and after what pause, while other replies are awaited.
        came: the names of the pieces that have come, whether or not they are still kept.
        since: when the last of them came for the first time.
        contents: the pieces above the arrays' own, by name.
        arrays: the arrays that are complete.
        half: the array that is being joined.
    """

    head: flower.message_pb2.Message
    tree: flower.message_pb2.ObjectTree
    ends: float
    look: tuple[float, float] = (0.0, BACK[0])
    came: set[str] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)
    contents: dict[str, bytes] = field(default_factory=dict)
    arrays: dict[str, flower.InflatableObject] = field(default_factory=dict)
    half: HalfSent | None = None

    def forget(self) -> None:
        """Free the pieces; the next look fetches them again."""
        self.contents, self.arrays, self.half = {}, {}, None

    def postpone(self) -> None:
        """Look again after a pause that grows."""
        _, pause = self.look
        self.look = (time.monotonic() + pause, min(2 * pause, BACK[1]))


class LeanGrid(flower.HttpGrid):
    """Takes over another grid, with its connection."""

    def __init__(self, grid: flower.HttpGrid) -> None:
        assert grid._runtime_client is not None  # asking for it connects
        for name, value in vars(grid).items():
            setattr(self, name, value)
        self._near: Near | None = None
        if path := os.environ.get(spawn.NEAR_AT):
            client, far = self._runtime_client, self._runtime_client._client
            client._client = httpx.Client(
                transport=httpx.HTTPTransport(uds=path),
                timeout=far.timeout,
                headers={"prefer": f"wait={IDLE:.0f}"},  # for a piece, or for replies
            )
            client._base_url = f"http://{self._addr}"
            far.close()
            self._near = Near(path, self._addr, self._token, IDLE)
        freeing(self._runtime_client._client)
        self._seen: dict[str, bytes] = {}
        self._asked: dict[str, Asked] = {}  # by request
        self._arriving: dict[str, Arrival] = {}  # by request
        self._held: Arrival | None = None  # the only one whose pieces are kept between two looks
        # Bytes of the largest request's arrays so far, or as many as `expect` was called with.
        self.sent = 0

    def expect(self, size: int) -> None:
        """Accept replies with `size` bytes of arrays, even if no request was as large."""
        self.sent = max(self.sent, size)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        for message in sent:
            cut(message)
        return super().push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield complete replies one by one; each is fetched only when the caller asks for it.

        Args:
            message_ids: the requests. A reply that is not complete yet comes with a later call that
                names its request.
        """
        wanted = dict.fromkeys(message_ids)
        # Once it has handed out a reply's head, the SuperLink forgets the request. Asked again, it
        # would answer that there is none, and a reply that is still arriving would be lost.
        asked_for = [request_id for request_id in wanted if request_id not in self._arriving]
        request = flower.runtime_pb2.PullAppMessagesRequest(message_ids=asked_for)
        answer = self._runtime_client.PullMessages(request)
        for head, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            request_id = head.metadata.reply_to_message_id
            asked = self._asked.get(request_id)
            # The SuperLink itself says that no reply will come. Replies of sites bear their node.
            by = head.metadata.src_node_id
            if request_id not in wanted or (
                by != flower.SUPERLINK_NODE_ID and (asked is None or by != asked.node)
            ):
                log.warning("node %d sent a message that nobody asked for; it stays unread", by)
                continue
            ends = asked.ends if asked else time.monotonic() + STAY
            self._arriving[request_id] = Arrival(head, tree, ends)
        for request_id in wanted:
            arrival = self._arriving.get(request_id)
            if arrival is None or (len(wanted) > 1 and time.monotonic() < arrival.look[0]):
                continue
            try:
                message = self._fetch(arrival)
                # The head is checked, but in the reply itself a site can name any other site.
                message.metadata.__dict__["_reply_to_message_id"] = request_id
                message.metadata.__dict__["_src_node_id"] = arrival.head.metadata.src_node_id
            except Aside:
                arrival.postpone()
                continue
            except httpx.HTTPError:
                raise  # the server failed, not a site
            except flower.ObjectPullError as error:
                message = _failed(arrival.head, flower.ErrorCode.MESSAGE_UNAVAILABLE, str(error))
            except Exception:  # nothing that a site sends may end the run
                log.exception("a reply cannot be read")
                message = _failed(
                    arrival.head, flower.ErrorCode.UNKNOWN, "the reply cannot be read"
                )
            self._close(request_id)
            del arrival
            yield message
            del message  # so that it is freed before the next one is fetched

    def _close(self, request_id: str) -> None:
        """Forget a request, and what has arrived of its reply."""
        self._asked.pop(request_id, None)
        if self._arriving.pop(request_id, None) is self._held:
            self._held = None

    def _fetch(self, arrival: Arrival) -> Message:
        """Fetch what is still missing of a reply -> the reply.

        Raises:
            Aside: a piece is not there yet.
            ObjectPullError: a piece will not come.
        """
        if self._held is not arrival:
            if self._held is not None:
                self._held.forget()
            self._held = arrival
        pull, large = self._patient(self._small, arrival), self._patient(self._large, arrival)
        tree, contents, arrays = arrival.tree, arrival.contents, arrival.arrays
        levels = [[tree]]
        while len(levels) <= ARRAYS:
            levels.append([child for parent in levels[-1] for child in parent.children])
        if not contents:
            names = list(dict.fromkeys(t.object_id for level in levels for t in level))
            found = {name: self._seen[name] for name in names if name in self._seen}
            missing = [name for name in names if name not in found]
            if (near := self._near) is not None:
                # Of an array in several pieces, none is small.
                single = [t.children[0] for t in levels[ARRAYS] if len(t.children) == 1]
                few = [*missing, *(piece.object_id for piece in single)][:CALLS]
                found |= self._surely(lambda: near.pieces(few))
                missing = [name for name in missing if name not in found]
            with ThreadPoolExecutor(WORKERS) as workers:
                found |= zip(missing, workers.map(pull, missing), strict=True)
            if len(self._seen) > KEPT_COUNT:
                self._seen.clear()
            # A piece is named by the hash of its content; every reply has the same model layout.
            self._seen |= {n: c for n in names if len(c := found[n]) <= KEPT_SIZE}
            contents |= found
        for name in dict.fromkeys(t.object_id for t in levels[ARRAYS]):
            if name in arrays:
                continue
            if arrival.half is None:
                arrival.half = HalfSent(contents[name])

            def piece(name: str) -> BinaryIO:
                return io.BytesIO(contents[name]) if name in contents else large(name)

            left = MOST * self.sent - sum(len(_data(array)) for array in arrays.values())
            join = partial(arrival.half.join, piece, left)
            arrays[name] = self._surely(join)
            arrival.half = None
        for name in arrays:
            del contents[name]
        self._runtime_client.ConfirmMessageReceived(
            flower.message_pb2.ConfirmMessageReceivedRequest(
                node=self.node, run_id=self._run_id, message_object_id=tree.object_id
            )
        )
        message = flower.inflate_object_from_contents(tree.object_id, contents, objects=arrays)
        if not isinstance(message, Message):
            raise ValueError(f"a reply is a {type(message).__name__}")
        if message.has_content() and not isinstance(message.content, RecordDict):
            raise ValueError(f"a reply's content is a {type(message.content).__name__}")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def _small(self, name: str) -> bytes:
        """Fetch a piece; several threads may do so at a time."""
        return flower.make_pull_object_fn_protobuf(
            self._runtime_client.PullObject, self.node, self._run_id
        )(name)

    def _large(self, name: str) -> BinaryIO:
        """Ask for a piece, to be read at once."""
        if self._near is not None:
            return self._near.piece(name)
        return io.BytesIO(self._small(name))

    def _surely(self, do: Callable[[], R]) -> R:
        """Do what talks to the SuperLink, and again if that is too busy to answer."""

        def once() -> R:
            with as_httpx():
                return do()

        return self._retry_invoker.invoke(once)

    def _bring_all(self, pieces: Mapping[str, flower.InflatableObject], session: str) -> None:
        """Bring pieces of requests, the small ones together if the SuperLink is beside."""
        near, some, size = self._near, dict[str, bytes](), 0
        wanted: dict[str, bool] = {}

        def flush(near: Near) -> None:
            nonlocal some, size
            wanted.update(self._surely(lambda: near.put_together(some, session)))
            some, size = {}, 0

        for name, what in pieces.items():
            if near is None or (isinstance(what, Piece) and len(what.data) > SMALL):
                wanted[name] = self._bring(name, what, session)
                continue
            some[name] = what.deflate()
            size += len(some[name])
            if size > TOGETHER or len(some) == CALLS:
                flush(near)
        if near is not None:
            flush(near)
        # A site has pieces of earlier messages, so it may confirm a message before all of them were
        # pushed; the SuperLink then drops the rest. If it drops a message that was not confirmed,
        # the site counts as silent.
        if unwanted := [name for name, each in wanted.items() if not each]:
            log.debug("the pieces %s are not wanted any more", ", ".join(unwanted))

    def _bring(self, name: str, what: flower.InflatableObject, session: str) -> bool:
        """Bring a piece of a request -> whether the SuperLink took it."""
        if (near := self._near) is not None:
            parts = what.parts if isinstance(what, Piece) else (what.deflate(),)
            return self._surely(lambda: near.put(name, parts, session))
        request = flower.message_pb2.PushObjectRequest(
            node=self.node,
            run_id=self._run_id,
            object_id=name,
            object_content=what.deflate(),
            session_id=session,
        )
        return self._runtime_client.PushObject(request).stored

    def _patient(self, one: Callable[[str], P], arrival: Arrival) -> Callable[[str], P]:
        """Let a function that fetches a piece of a reply wait for it, for one look at the reply.

        It raises `Aside` once the look has waited for long enough, and ObjectPullError when the
        request has expired, or its site has begun anew and brings no more pieces.
        """
        lock, began, waits = threading.Lock(), time.monotonic(), [float("inf")]

        def pull(name: str) -> P:
            pause, longest = RETRY
            while True:
                try:
                    piece = one(name)
                except flower.ObjectUnavailableError:
                    now = time.monotonic()
                    if now > arrival.ends:
                        raise flower.ObjectPullError(name, "its pieces stopped coming") from None
                    with lock:
                        waits[0] = min(waits[0], now)
                    if now - max(began, arrival.since) > IDLE or now - waits[0] > STAY:
                        raise Aside from None
                    time.sleep(pause)
                    pause = min(2 * pause, longest)
                else:
                    if name not in arrival.came:
                        arrival.came.add(name)
                        arrival.since = time.monotonic()
                    return piece

        return pull

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        self.sent = max([self.sent, *map(_size, sent)])
        objects = {
            k: v for message in sent for k, v in flower.get_all_nested_objects(message).items()
        }
        answer = self._runtime_client.PushMessages(
            flower.runtime_pb2.PushAppMessagesRequest(
                messages_list=[
                    flower.message_to_proto(flower.remove_content_from_message(m)) for m in sent
                ],
                message_object_trees=[flower.get_object_tree(m) for m in sent],
            )
        )
        wanted = set(answer.objects_to_push)
        self._bring_all({n: what for n, what in objects.items() if n in wanted}, answer.session_id)
        now = time.monotonic()
        for old in [i for i, asked in self._asked.items() if asked.ends < now]:
            self._close(old)
        for message_id, message in zip(answer.message_ids, sent, strict=True):
            if message_id:
                about = message.metadata
                self._asked[message_id] = Asked(about.dst_node_id, now + about.ttl)
        return list(answer.message_ids)

    @property
    def _run_id(self) -> int:
        assert self._run is not None
        return self._run.run_id


def _failed(head: flower.message_pb2.Message, code: int, reason: str) -> Message:
    return flower.make_message(
        metadata=flower.message_from_proto(head).metadata, error=Error(code, reason)
    )


def _size(message: Message) -> int:
    return sum(len(array.data) for array in arrays_of(message.content))


def _data(array: flower.InflatableObject) -> bytes:
    assert isinstance(array, Array)
    return array.data


def lean(grid: Grid) -> Grid:
    """A `LeanGrid` of the grid that a SuperLink's ServerApp gets; any other grid as it is."""
    if not isinstance(grid, flower.HttpGrid):
        return grid
    gc.freeze()  # so that no sweep looks through the modules imported so far
    atexit.register(gc.unfreeze)
    one_pool(OUTSIDE, OUTSIDE)  # else freed pieces stay: the memory of several models
    return LeanGrid(grid)
