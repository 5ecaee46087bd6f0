"""Count and hash of the frames with gradients that one site sent in one group.

The site and the server each keep one, over the bytes as they travel, so that both can be compared
afterwards.
"""

from hashlib import sha256
from typing import Any


class Tally:
    """What was sent so far."""

    def __init__(self) -> None:
        self.frames = 0
        self.bytes = 0
        self._hash = sha256()

    def add(self, frame: bytes | memoryview) -> None:
        """Add a frame after all before it."""
        self.frames += 1
        self.bytes += len(frame)
        self._hash.update(frame)

    def about(self) -> dict[str, Any]:
        """The entries of a log: frames, bytes, and the hash of all frames one after the other."""
        return {"frames": self.frames, "bytes": self.bytes, "sha256": self._hash.hexdigest()}
