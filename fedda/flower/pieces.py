"""Flower's arrays, cut into their pieces without a copy, and joined again with one.

Flower copies an array twice to name its pieces by their hashes, twice more to send them, and four
times to join them. What hashed the pieces to name or to check them need not hash the array again:
their names are its hash.
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import BinaryIO

from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedda import flower

HEAD, PART = 64, 2**18  # bytes that are read of a piece at first, and then at once


class Piece(flower.ArrayChunk):
    """A piece that keeps its name, as the bytes of an array do not change."""

    @cached_property
    def parts(self) -> tuple[bytes, memoryview]:
        """Its head, as Flower writes it, and its bytes of the array: what is sent."""
        values = (flower.ArrayChunk.__qualname__, "", str(len(self.data)))
        return flower.HEAD_VALUE_DIVIDER.join(values).encode() + flower.HEAD_BODY_DIVIDER, self.data

    @cached_property
    def object_id(self) -> str:  # type: ignore[override]
        name = hashlib.sha256()
        for part in self.parts:
            name.update(part)
        return name.hexdigest()

    def deflate(self) -> bytes:
        return b"".join(self.parts)


def arrays_of(content: RecordDict) -> Iterator[Array]:
    """All arrays of a message's content.

    Flower's `content.array_records` refers to itself, so that a message whose arrays were once
    asked for stays in memory until a garbage collection, which large arrays alone never begin.
    """
    records = (record for record in content.values() if isinstance(record, ArrayRecord))
    return (array for record in records for array in record.values())


def cut(message: Message) -> None:
    """Cut a message's arrays, before Flower does."""
    for array in arrays_of(message.content) if message.has_content() else ():
        names(array)


CUT = "_chunks"  # where Flower's arrays keep their pieces, until their data change


def names(array: Array) -> list[str]:
    """The names of an array's pieces, in order; they are hashed if they were not yet."""
    if CUT not in array.__dict__:
        array.__dict__[CUT] = [(piece.object_id, piece) for piece in _pieces(array)]
    return [name for name, _ in array.__dict__[CUT]]


def _pieces(array: Array) -> Iterator[Piece]:
    data, size = memoryview(array.data), flower.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    return (Piece(data[start : start + size]) for start in range(0, len(data), size))


class HalfSent:
    """An array that is joined from its pieces as they arrive, possibly in several goes."""

    def __init__(self, content: bytes) -> None:
        self._header = json.loads(flower.get_object_body(content, Array))
        self._children = flower.get_object_children_ids_from_object_content(content)
        self._places = self._header["arraychunk_ids"]
        self._starts: list[int] = []  # of the pieces that have been joined
        self._joined = io.BytesIO()  # gives its memory away as bytes; joining pieces would copy

    @property
    def pieces(self) -> list[str]:
        """The names of its pieces, in order; one may be there several times."""
        return [self._children[place] for place in self._places]

    def join(self, fetch: Callable[[str], BinaryIO], most: float = math.inf) -> Array:
        """Join the pieces that are still missing -> the array, of at most `most` bytes.

        Args:
            fetch: opens a piece by its name, of which it has to be sure.
            most: bytes.
        """
        pieces = self.pieces
        for name in pieces[len(self._starts) :]:
            start = self._joined.tell()
            self._take(fetch(name), most)
            self._starts.append(start)
        header = self._header
        array = Array(header["dtype"], tuple(header["shape"]), header["stype"], b"")
        array.data = self._joined.getvalue()
        data, bounds = memoryview(array.data), pairwise([*self._starts, None])
        array.__dict__[CUT] = [
            (name, Piece(data[start:end]))
            for name, (start, end) in zip(pieces, bounds, strict=True)
        ]
        return array

    def _take(self, piece: BinaryIO, most: float) -> None:
        """Add a piece without its head; by small parts, which stay in the processor's cache."""
        start = self._joined.tell()
        try:
            head = piece.read(HEAD)
            self._joined.write(memoryview(head)[head.index(b"\0") + 1 :])
            while part := piece.read(PART):
                self._joined.write(part)
                if self._joined.tell() > most:  # an array can name one piece a million times
                    raise ValueError(
                        "A message is much larger than it may be: an array has more than the "
                        f"{most:,} bytes that the run's model leaves for it; ask who sent it."
                    )
        except BaseException:
            self._joined.seek(start)
            self._joined.truncate()
            raise
