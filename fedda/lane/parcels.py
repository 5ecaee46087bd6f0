"""Messages of Flower as frames, and back.

    H  hello: what this end has of the other's messages, as JSON
    B  a message begins, or goes on: how many bytes of its arrays came before, and its head
    P  a piece of its arrays, which follow each other
    A  the message of this name has come whole
    N  a piece of a note (`posts`)
    E  the end: a sentence, as JSON

The first byte of a frame is its kind. The head is a JSON text: the message's metadata, its tables,
and type, shape and size of each array. So it says how much will come before any of it does.

A request of a run and what came as its reply are an `Asked`.
"""

import base64
import io
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)

from fedda import flower
from fedda.errors import WireError
from fedda.flower import ErrorCode

log = logging.getLogger("fedda.server")

PIECE = 2**22  # bytes
MOST_HEAD = 2**23  # bytes of a head: tables, no arrays
MOST_FRAME = MOST_HEAD + 2**16
OFFSET = 8  # bytes of the number at which a message goes on
MOST_ARRAYS = 10_000
MOST_ARRAY = 2**40  # bytes
NAME = 255  # characters of a name or a type
# With which the server itself answers that a site is gone, or that the deadline has passed.
OWN = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE)

HELLO, BEGIN, PART, WHOLE, NOTE, END = b"HBPANE"
UNREADABLE = "a message of the lane cannot be read"
Frame = bytes
KINDS: dict[str, type[ConfigRecord] | type[MetricRecord]] = {"c": ConfigRecord, "m": MetricRecord}


def control(kind: int, told: Any) -> Frame:
    """A frame of JSON."""
    return bytes([kind]) + json.dumps(told, separators=(",", ":")).encode()


def told(frame: Frame) -> Any:
    """What a frame of JSON tells.

    Raises:
        WireError: it is none.
    """
    try:
        return json.loads(frame[1:])
    except (ValueError, RecursionError):
        raise WireError(UNREADABLE) from None


@dataclass
class Outgoing:
    """A message on its way out; `sent` are the bytes of its arrays that went in this connection."""

    name: str
    head: bytes
    arrays: list[bytes]
    sent: int = 0
    begun: bool = False

    @classmethod
    def of(cls, message: Message, name: str) -> "Outgoing":
        """Write a message's head; its arrays are not copied.

        Raises:
            WireError: its tables are too large.
        """
        meta, arrays = message.metadata, list[bytes]()
        about = {
            "id": name,
            "kind": meta.message_type,
            "run": meta.run_id,
            "from": meta.src_node_id,
            "node": meta.dst_node_id,
            "group": meta.group_id,
            "created": meta.created_at,
            "ttl": meta.ttl,
            "to": meta.reply_to_message_id,
        }
        if message.has_error():
            about["error"] = [message.error.code, message.error.reason]
        else:
            about["records"] = [
                [name, *_written(record, arrays)] for name, record in message.content.items()
            ]
        head = json.dumps(about, separators=(",", ":"), default=_as_text).encode()
        if len(head) > MOST_HEAD:
            raise WireError(
                f"A message has {len(head):,} bytes besides its arrays, more than {MOST_HEAD:,}."
            )
        return cls(name, head, arrays)

    @property
    def size(self) -> int:
        """Bytes of its arrays."""
        return sum(map(len, self.arrays))

    def go_on(self, at: int) -> None:
        """Begin, or go on where the other end has so many bytes."""
        self.sent, self.begun = at, False

    def next(self) -> Frame | None:
        """The next frame; None if all of it is sent."""
        if not self.begun:
            self.begun = True
            return bytes([BEGIN]) + self.sent.to_bytes(OFFSET) + self.head
        start = self.sent
        for array in self.arrays:
            if start < len(array):
                piece = memoryview(array)[start : start + PIECE]
                self.sent += len(piece)
                return b"".join((bytes([PART]), piece))
            start -= len(array)
        return None


def _written(record: Any, arrays: list[bytes]) -> tuple[str, Any]:
    """A record as it stands in a head; its arrays are added to the list."""
    if not isinstance(record, ArrayRecord):
        return "m" if isinstance(record, MetricRecord) else "c", dict(record)
    arrays += [array.data for array in record.values()]
    return "a", [[n, a.dtype, a.shape, a.stype, len(a.data)] for n, a in record.items()]


def _as_text(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"a {type(value).__name__} cannot travel in a table")
    return {"b": base64.b64encode(value).decode()}


def _as_bytes(value: Any) -> Any:
    """A value of a table as it was; bytes travel as a table of one entry."""
    if isinstance(value, list):
        return [_as_bytes(each) for each in value]
    if isinstance(value, dict):
        return base64.b64decode(value["b"], validate=True)
    return value


@dataclass
class Incoming:
    """A message on its way in, whose arrays are joined as their pieces come.

    Attributes:
        name: the sender's for it.
        head: the message without content.
        sizes: bytes of each array.
        got: bytes of the arrays that have come.
        keeps: whether they are kept; None: not decided yet.
        whole: whether all of it has come.
    """

    name: str
    head: Message
    sizes: list[int]
    _records: list[Any] = field(repr=False)
    got: int = 0
    keeps: bool | None = None
    whole: bool = False
    _joined: list[io.BytesIO] = field(default_factory=list, repr=False)

    @classmethod
    def parse(cls, text: bytes) -> "Incoming":
        """Read a head, trusting nothing.

        Raises:
            WireError: it is none.
        """
        try:
            about = json.loads(text)
            numbers = [float(about[name]) for name in ("created", "ttl")]
            if not all(math.isfinite(number) and number >= 0 for number in numbers):
                raise ValueError
            meta = Metadata(
                run_id=int(about["run"]),
                message_id=_name(about["id"]),
                src_node_id=int(about["from"]),
                dst_node_id=int(about["node"]),
                reply_to_message_id=_name(about["to"]),
                group_id=_name(about["group"]),
                created_at=numbers[0],
                ttl=numbers[1],
                message_type=_name(about["kind"]),
            )
            error = about.get("error")
            error = None if error is None else Error(int(error[0]), str(error[1]))
            records = [] if error else about["records"]
            sizes = [s for _, kind, r in records if kind == "a" for *_, s in r]
            right = all(type(size) is int and 0 <= size <= MOST_ARRAY for size in sizes)
            if not right or len(sizes) > MOST_ARRAYS:
                raise ValueError
            content = RecordDict() if error is None else None
            head = flower.make_message(metadata=meta, content=content, error=error)
            made = cls(meta.message_id, head, sizes, records)
            made.message(empty=True)  # so that what cannot be read is refused at once
            return made
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise WireError(UNREADABLE) from None

    @property
    def size(self) -> int:
        """Bytes of its arrays."""
        return sum(self.sizes)

    @property
    def answers(self) -> str:
        """The name of the request that it is the reply to; "" if it is none."""
        return self.head.metadata.reply_to_message_id

    def take(self, piece: memoryview) -> None:
        """Take the next bytes of the arrays.

        Raises:
            WireError: there are more than the head says.
        """
        if self.got + len(piece) > self.size:
            raise WireError("a message of the lane is longer than it says")
        start = self.got
        self.got += len(piece)
        if not self.keeps:
            return
        for number, size in enumerate(self.sizes):
            if start < size and piece:
                if number == len(self._joined):
                    self._joined.append(io.BytesIO())
                some = piece[: size - start]
                self._joined[number].write(some)
                piece, start = piece[len(some) :], start + len(some)
            elif number == len(self._joined):
                self._joined.append(io.BytesIO())
            start -= size
            if start < 0 or not piece:
                return

    def forget(self) -> None:
        """Free what has come; it would have to come again from its first byte."""
        self._joined, self.got = [], 0

    def message(self, empty: bool = False) -> Message:
        """The message; with `empty`, its arrays hold nothing yet.

        Raises:
            ValueError: it is none that Flower could have made.
        """
        if self.head.has_error():
            return self.head
        data: Iterator[bytes] = iter(())
        if not empty:
            self._joined += [io.BytesIO() for _ in self.sizes[len(self._joined) :]]
            data = (joined.getvalue() for joined in self._joined)
        content = RecordDict()
        for name, kind, told in self._records:
            if kind == "a":
                record = content[_name(name)] = ArrayRecord()
                for key, dtype, shape, stype, _ in told:
                    about = _name(dtype), tuple(map(int, shape)), _name(stype)
                    record[_name(key)] = Array(*about, next(data, b""))
            else:
                table: Mapping[str, Any] = {_name(k): _as_bytes(v) for k, v in told.items()}
                content[_name(name)] = KINDS[kind](dict(table))
        if not empty:
            self._joined = []  # the arrays are the message's alone
        return flower.make_message(metadata=self.head.metadata, content=content)


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > NAME:
        raise ValueError
    return value


@dataclass
class Asked:
    """An open request.

    Attributes:
        node: where it went.
        head: it, without its content.
        ends: until when, on the monotonic clock, its reply counts.
        taken: whether the site has all of it.
        came: when its reply came.
        reply: what came, or why nothing will.
        part: whether only a part of the reply came.
        refused: why its reply is not taken.
    """

    node: int
    head: Message
    ends: float
    taken: bool = False
    came: float = 0.0
    reply: Incoming | Error | None = None
    part: bool = False
    refused: str = ""

    @classmethod
    def of(cls, message: Message, name: str) -> "Asked":
        """A request that is about to be sent under a name."""
        meta = message.metadata
        about = Metadata(
            run_id=meta.run_id,
            message_id=name,
            src_node_id=meta.src_node_id,
            dst_node_id=meta.dst_node_id,
            reply_to_message_id="",
            group_id=meta.group_id,
            created_at=meta.created_at,
            ttl=meta.ttl,
            message_type=meta.message_type,
        )
        head = flower.make_message(metadata=about, content=RecordDict())
        return cls(
            meta.dst_node_id, head, time.monotonic() + meta.created_at + meta.ttl - time.time()
        )

    def answer(self) -> Message:
        """The reply, given away; what Flower's server would say itself is said in its name."""
        reply, self.reply = self.reply, None
        if isinstance(reply, Incoming):
            try:
                said = reply.message()
            except Exception:  # nothing that a site sends may end the run
                log.exception("a reply cannot be read")
                return Message(Error(ErrorCode.UNKNOWN, "it cannot be read"), reply_to=self.head)
            if not said.has_error():
                return Message(said.content, reply_to=self.head)
            return Message(said.error, reply_to=self.head)
        assert isinstance(reply, Error)
        if reply.code not in OWN or self.part:
            return Message(reply, reply_to=self.head)
        meta, own = self.head.metadata, flower.SUPERLINK_NODE_ID
        about = Metadata(
            *(meta.run_id, "", own, own, meta.message_id),
            *(meta.group_id, time.time(), 0.0, meta.message_type),
        )
        return flower.make_message(metadata=about, error=reply)
