"""The request that a node works on, kept in a file, so that no request is lost with its process.

A server hands out each request once. If a node's process ends before it has answered, the next one
finds the request's head here and tells the server so, which then waits no longer. The request is
not done again: the server may have deleted its content once the node had it.
"""

import logging
from contextlib import suppress
from pathlib import Path

from flwr.app import Message
from google.protobuf.message import DecodeError

from fedda import flower
from fedda.files import replacing

log = logging.getLogger("fedda.client")


class Unfinished:
    """Remembers at most one request.

    Args:
        file: where its head is kept; None: nowhere.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file

    def begin(self, head: Message) -> None:
        """Remember a request before any work on it."""
        if self._file is None:
            return
        bare = flower.remove_content_from_message(head) if head.has_content() else head
        try:
            with replacing(self._file) as part:
                part.write_bytes(flower.message_to_proto(bare).SerializeToString())
        except OSError as error:  # a full disk need not keep the site from working
            log.warning("%s cannot be written (%s)", self._file, error)

    def end(self) -> None:
        """Forget the request: it is answered, or nobody waits for the answer."""
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()

    def head(self) -> Message | None:
        """The request that was not answered, without its content; None if there is none."""
        if self._file is None:
            return None
        try:
            return flower.message_from_proto(
                flower.message_pb2.Message.FromString(self._file.read_bytes())
            )
        except (OSError, DecodeError, ValueError):
            return None
