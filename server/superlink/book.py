"""What each site was handed, and so what it may fetch, confirm and send back.

flwr stores whatever a registered site pushes: also a message that claims to come from the server,
and as many bytes as it likes. Here a site answers only requests that it was handed, each once, with
an answer that is not much larger than what the run sends around. The book is kept in memory only:
a SuperLink that is started again ends its runs, so there is nothing left to answer.
"""

import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256

from fedda.flower import SUPERLINK_NODE_ID
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import message_pb2 as proto
from fedda.ops.refusal import Refusal

NAME = re.compile(r"[0-9a-f]{64}")  # of a piece: the SHA-256 of its content
MESSAGES_KEPT = 64  # of one site; it works on one at a time
RUNS_KEPT = 64
# An answer may be larger than any request: a site can send a model that it was never sent.
TIMES, MORE_BYTES = 4, 64 * 2**20
MORE_PIECES = 1024
RETRIES = 32
TIMES_HANDED = 5


class RefusedCall(Exception):
    """A request that a site may not make, with its HTTP status, a sentence and maybe a reason."""

    def __init__(self, status: int, text: str, why: Refusal | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.why = why


@dataclass
class BookedRun:
    """The largest request of one run that any site fetched, so far."""

    size: int = 0
    pieces: int = 0


@dataclass
class Handed:
    """A request that a site was handed, and its answer."""

    head: proto.Message
    tree: proto.ObjectTree
    run: BookedRun
    pieces: set[str]
    fetched: set[str] = field(default_factory=set)
    size: int = 0  # bytes that were fetched of it
    times: int = 1  # how often it was handed out
    answer: bytes = b""  # a digest of the answer's head
    taken: bool = False  # whether the server took it
    sessions: set[str] = field(default_factory=set)  # in which the answer's pieces come
    wanted: set[str] = field(default_factory=set)  # pieces of the answer that the server lacks
    brought: set[str] = field(default_factory=set)
    room: int = 0  # bytes that the answer may still have

    @property
    def run_id(self) -> int:
        return self.head.metadata.run_id

    @property
    def is_whole(self) -> bool:
        """Whether all of it can still be fetched, and the server waits for the answer."""
        meta = self.head.metadata
        waits = time.time() < meta.created_at + meta.ttl
        return waits and bool(self.pieces) and not self.answer


class Book:
    """The requests that were handed to each site, most recent last."""

    def __init__(self) -> None:
        self._handed: dict[int, OrderedDict[str, Handed]] = {}
        self._runs: OrderedDict[int, BookedRun] = OrderedDict()
        self._lost: dict[int, set[str]] = {}  # requests that a site of a new session may have lost

    def handed(self, node_id: int, answer: fleet.PullMessagesResponse) -> None:
        """Note the request that a site gets."""
        mine = self._handed.setdefault(node_id, OrderedDict())
        for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            meta = message.metadata
            run = self._runs.setdefault(meta.run_id, BookedRun())
            pieces = set(children(tree))
            run.pieces = max(run.pieces, len(pieces))
            mine[meta.message_id] = Handed(message, tree, run, pieces)
        while len(mine) > MESSAGES_KEPT:
            mine.popitem(last=False)
        while len(self._runs) > RUNS_KEPT:
            self._runs.popitem(last=False)

    def joined(self, node_id: int) -> None:
        """Note that a site begins a new session: it may have lost what it was handed before."""
        mine = self._handed.get(node_id, {})
        self._lost[node_id] = {name for name, handed in mine.items() if handed.is_whole}

    def again(self, node_id: int, one_by_one: bool) -> fleet.PullMessagesResponse | None:
        """The request to hand to a site once more; None if there is none.

        The server hands out each request once. If the answer is lost on its way, or the site's
        process is killed before it has all of it and left no note, the run would wait in vain.

        Args:
            node_id: a site that asks for a request.
            one_by_one: whether it asks for another only when it is done with the last one. Of other
                sites, only one that has just begun a new session is known to have lost a request.
        """
        lost = self._lost.get(node_id, set())
        for name, handed in self._handed.get(node_id, {}).items():
            known = not one_by_one and name not in lost
            if not known and handed.is_whole and handed.times < TIMES_HANDED:
                lost.discard(name)
                handed.times += 1
                return fleet.PullMessagesResponse(
                    messages_list=[handed.head], message_object_trees=[handed.tree]
                )
        return None

    def check_run(self, node_id: int, run_id: int) -> None:
        """Refuse to tell about a run of which the site was handed no request."""
        if all(handed.run_id != run_id for handed in self._handed.get(node_id, {}).values()):
            raise RefusedCall(403, "this site was handed no request of this run")

    def check_fetch(self, node_id: int, request: proto.PullObjectRequest) -> None:
        """Refuse pieces that belong to no request of the site."""
        if self._with_piece(node_id, request) is None:
            raise RefusedCall(403, "this piece belongs to no request to this site")

    def fetched(self, node_id: int, request: proto.PullObjectRequest, size: int) -> None:
        """Note the size of a piece that a site got; each counts once."""
        found = self._with_piece(node_id, request)
        if found is not None and request.object_id not in found.fetched:
            found.fetched.add(request.object_id)
            found.size += size
            found.run.size = max(found.run.size, found.size)

    def confirm(self, node_id: int, request: proto.ConfirmMessageReceivedRequest) -> None:
        """Note that a site has all of a request; refuse to delete anything else."""
        found = self._handed.get(node_id, {}).get(request.message_object_id)
        if found is None or found.run_id != request.run_id:
            raise RefusedCall(403, "this is no request to this site")
        found.pieces.clear()
        found.fetched.clear()

    def check_answer(self, node_id: int, request: fleet.PushMessagesRequest) -> Handed:
        """Refuse everything but the one answer to a request that the site was handed.

        The same answer may come again, as the server's reply may have been lost.
        """
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise RefusedCall(403, "one answer at a time")
        message, tree = request.messages_list[0], request.message_object_trees[0]
        meta = message.metadata
        found = self._handed.get(node_id, {}).get(meta.reply_to_message_id)
        if meta.src_node_id != node_id or meta.dst_node_id != SUPERLINK_NODE_ID or found is None:
            raise RefusedCall(403, "this site may only answer requests that it was handed")
        times = (meta.created_at, meta.ttl, *request.clientapp_runtime_list)
        sound = (
            meta.run_id == found.run_id
            and meta.message_type == found.head.metadata.message_type
            and meta.message_id == tree.object_id
            and message.HasField("content") != message.HasField("error")
            and not message.content.ByteSize()  # it travels in pieces
            and len(request.clientapp_runtime_list) <= 1
            and all(0 <= t < float("inf") for t in times)
        )
        below = children(tree)
        if not sound or not all(map(NAME.fullmatch, below)):
            raise RefusedCall(403, "this answer does not fit its request")
        if len(below) > TIMES * found.run.pieces + MORE_PIECES:
            raise RefusedCall(413, "this answer has too many pieces")
        head = sha256(message.SerializeToString(deterministic=True))
        head.update(tree.SerializeToString(deterministic=True))
        if found.answer not in (b"", head.digest()) or len(found.sessions) > RETRIES:
            raise RefusedCall(403, "this request is answered already")
        if not found.answer:
            found.room = TIMES * found.run.size + MORE_BYTES
        found.answer = head.digest()
        return found

    def answered(self, found: Handed, answer: fleet.PushMessagesResponse | None) -> None:
        """Note the pieces that the server wants; None if it did not take the answer."""
        if answer is not None:
            found.taken = True
            found.wanted |= set(answer.objects_to_push)
            found.sessions.add(answer.session_id)
        elif not found.taken:
            found.answer = b""

    def take(self, node_id: int, request: proto.PushObjectRequest, size: int) -> None:
        """Count a piece of an answer; refuse what the server does not want, and too many bytes.

        Args:
            node_id: the site.
            request: brings the piece.
            size: bytes of the request.
        """
        mine = reversed(self._handed.get(node_id, {}).values())
        found = next((h for h in mine if request.session_id in h.sessions), None)
        if found is None or found.run_id != request.run_id or request.object_id not in found.wanted:
            raise RefusedCall(403, "this piece belongs to no answer of this site")
        if request.object_id in found.brought:
            return
        if size > found.room:
            raise RefusedCall(413, "this answer is much larger than what this run sends around")
        found.room -= size
        found.brought.add(request.object_id)
        if len(found.brought) == len(found.wanted):
            found.brought.clear()
            found.wanted.clear()

    def _with_piece(self, node_id: int, request: proto.PullObjectRequest) -> Handed | None:
        for handed in reversed(self._handed.get(node_id, {}).values()):
            if handed.run_id == request.run_id and request.object_id in handed.pieces:
                return handed
        return None


def children(tree: proto.ObjectTree) -> dict[str, tuple[str, ...]]:
    """The pieces of a tree, each with those that it consists of.

    Raises:
        Refused: a piece appears twice, with other parts; it could even be a part of itself.
    """
    found: dict[str, tuple[str, ...]] = {}
    left = [tree]
    while left:
        piece = left.pop()
        below = tuple(child.object_id for child in piece.children)
        if found.setdefault(piece.object_id, below) != below:
            raise RefusedCall(403, "a piece of this answer appears twice, with other parts")
        left.extend(piece.children)
    return found
