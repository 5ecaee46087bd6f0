"""Flower's arrays, joined from their pieces with one copy in memory; Flower's way makes four."""

import io
import json
import math
from collections.abc import Callable
from typing import BinaryIO

from flwr.app import Array

from fedda import flower

HEAD, PART = 64, 2**18  # bytes that are read of a piece at first, and then at once


class HalfSent:
    """An array that is joined from its pieces as they arrive, possibly in several goes."""

    def __init__(self, content: bytes) -> None:
        self._header = json.loads(flower.get_object_body(content, Array))
        self._children = flower.get_object_children_ids_from_object_content(content)
        self._places = self._header["arraychunk_ids"]
        self._next = 0
        self._joined = io.BytesIO()  # gives its memory away as bytes; joining pieces would copy

    def join(self, fetch: Callable[[str], BinaryIO], most: float = math.inf) -> Array:
        """Join the pieces that are still missing -> the array, of at most `most` bytes."""
        for place in self._places[self._next :]:
            self._take(fetch(self._children[place]), most)
            self._next += 1
        header = self._header
        array = Array(header["dtype"], tuple(header["shape"]), header["stype"], b"")
        array.data = self._joined.getvalue()
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
                    raise ValueError("a message is much larger than it may be")
        except BaseException:
            self._joined.seek(start)
            self._joined.truncate()
            raise
