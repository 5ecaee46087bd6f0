"""Frames as bytes: writing and reading the messages of exchange.proto.

A frame that cannot be read is refused in our own words. protobuf would copy a gradient four times
on its way. Here its values, the last field of a frame, are appended to the rest, and are read in
place.
"""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from fedda.errors import ExchangeError
from fedda.exchange.exchange_pb2 import Down, Gradient, Leave, Sum, Up
from fedda.exchange.groups import Group
from fedda.exchange.sums import Vector

T = TypeVar("T", bound=Message)
Note = bytes | memoryview

FLOAT = np.dtype("<f4")
ROOM = 64 * 1024  # bytes of a frame besides its values: names of groups, counts, a sentence
LENGTH = 2  # protobuf's wire type of fields that begin with their length
VALUES = Up.VALUES_FIELD_NUMBER << 3 | LENGTH  # how the last field begins
LEAVE = Up(leave=Leave()).SerializeToString()
EMPTY = np.zeros(0, np.float32)


def most(groups: Iterable[Group]) -> int:
    """Bytes that a frame with a gradient or a sum of these groups may have."""
    return max(group.size for group in groups) * FLOAT.itemsize + ROOM


def gradient(group: str, index: int, examples: int, values: Vector) -> bytes:
    """A site's gradient for one sync."""
    return _frame(Up(gradient=Gradient(group=group, index=index, examples=examples)), values)


def total(group: str, index: int, values: Vector) -> bytes:
    """The sum of one sync, the same bytes for every member."""
    return _frame(Down(sum=Sum(group=group, index=index)), values)


def up(data: Note) -> tuple[Up, Vector]:
    """Read what a site sent -> the frame without its values, and a view of these.

    Raises:
        ExchangeError: the bytes are no frame.
    """
    return _read(Up(), data)


def down(data: Note) -> tuple[Down, Vector]:
    """Read what the server sent -> the frame without its values, and a view of these.

    Raises:
        ExchangeError: the bytes are no frame.
    """
    return _read(Down(), data)


def _frame(head: Message, values: Vector) -> bytes:
    raw = np.ascontiguousarray(values, FLOAT)
    length = _varint(raw.nbytes)
    return b"".join([head.SerializeToString(), bytes([VALUES]), length, raw.view(np.uint8).data])


def _read(message: T, data: Note) -> tuple[T, Vector]:
    try:
        at, start = _split(data)
        message.ParseFromString(bytes(data[:at]))
        return message, np.frombuffer(data, FLOAT, offset=start) if start < len(data) else EMPTY
    except (DecodeError, IndexError, ValueError):
        raise ExchangeError("A frame of the exchange cannot be read.") from None


def _split(data: Note) -> tuple[int, int]:
    """Where the field of the values begins, and where the values do; without it, twice the end."""
    at = 0
    while at < len(data):
        field, (size, start) = data[at], _read_varint(data, at + 1)
        if field & 7 != LENGTH or start + size > len(data):
            raise ValueError
        if field == VALUES:
            if start + size != len(data):
                raise ValueError
            return at, start
        at = start + size
    return at, at


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _read_varint(data: Note, at: int) -> tuple[int, int]:
    """The number that begins here, and where it ends."""
    number = 0
    for place in range(5):
        byte = data[at + place]
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, at + place + 1
    raise ValueError
