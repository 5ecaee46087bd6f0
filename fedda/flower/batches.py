"""Several small calls in one request: what a site fetches or brings of a message in small pieces.

A message of Flower's is at least five pieces, each named by its hash and sent by a request of its
own. Of a small model, and on a long way, nearly all time goes into these requests. A server of
fedda takes several of one kind in one body, and so answers them: each message after its length.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

LENGTH = 4  # bytes
SMALL = 2**16  # bytes of a piece that may travel with others
MOST, CALLS = 2**19, 2**10  # bytes that travel together, and calls


def joined(bodies: Iterable[bytes]) -> bytes:
    """One body of several."""
    return b"".join(part for body in bodies for part in (len(body).to_bytes(LENGTH), body))


def parted(body: bytes) -> Iterator[bytes]:
    """The bodies that one was joined of.

    Raises:
        DecodeError: it was not.
    """
    left = memoryview(body)
    while left:
        size = int.from_bytes(left[:LENGTH])
        left = left[LENGTH:]
        if size > len(left):
            raise DecodeError("a batch ends in the middle of a message")
        yield bytes(left[:size])
        left = left[size:]


class CallBatch:
    """Messages of one kind of protobuf, with as much of its interface as a call needs."""

    def __init__(self, kind: Any, messages: Iterable[Any] = ()) -> None:
        self.kind = kind
        self.messages = list(messages)

    def SerializeToString(self, deterministic: bool = False) -> bytes:
        return joined(each.SerializeToString(deterministic=deterministic) for each in self.messages)

    def ParseFromString(self, body: bytes) -> None:
        self.messages = [self.kind.FromString(part) for part in parted(body)]
