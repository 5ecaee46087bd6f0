"""Who calls: the check of a site's signature, before anything of its request's body is read.

A site signs the time of each request with its key, as Flower's SuperNodes do. The signature does
not cover the request, so each is accepted once only: whoever saw one cannot use it again.
"""

import datetime
import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from fedda.ops.refusal import Refusal

OLDEST, NEWEST = 305, 5  # seconds, as Flower's own server has it
HEADERS = b"flwr-public-key", b"flwr-signature", b"flwr-timestamp"
KNOWN_S = 1.0  # for how long a site counts as registered without asking again
KEPT = 2**16  # signatures of one site that are remembered at most
FEW = 2**8  # signatures of one site of which even old ones may stay
MARK = 2**60 - 1  # the part of a signature by which it is remembered: small, and never met twice


@dataclass(frozen=True)
class Caller:
    """A registered site."""

    node_id: int
    key: bytes  # its public key, as the SuperLink keeps it


@dataclass(frozen=True)
class Unwelcome:
    """Why a request is refused, and of which registered site it is, if of one."""

    why: Refusal
    node_id: int = 0


WRONG = Unwelcome(Refusal("signature"))


@dataclass
class Used:
    """The signatures of one site that were accepted, and may not be used again."""

    times: dict[int, float] = field(default_factory=dict)
    floor: float = 0.0  # no earlier signature is accepted any more
    room: int = FEW  # how many there may be before those are forgotten that are too old anyway

    def take(self, mark: int, signed: float, clock: float) -> bool:
        """Whether a signature comes for the first time; from now on it does not."""
        if signed <= self.floor or mark in self.times:
            return False
        if len(self.times) >= min(self.room, KEPT):
            left = {m: t for m, t in self.times.items() if t > clock - OLDEST}
            if len(left) > KEPT // 2:
                self.floor = sorted(left.values())[len(left) // 2]
                left = {m: t for m, t in left.items() if t > self.floor}
            self.times, self.room = left, max(FEW, len(left) + len(left) // 4)
        self.times[mark] = signed
        return signed > self.floor


class Guard:
    """Recognises registered sites by the headers of a request."""

    def __init__(
        self,
        node_of: Callable[[bytes], int | None],
        revoked: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        """Take what says which node a public key is registered for, if any, and if it ever was."""
        self._node_of = node_of
        self._revoked = revoked
        self._known: dict[bytes, tuple[int, float]] = {}
        self._used: dict[bytes, Used] = {}

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | Unwelcome:
        """Return who signed a request, or why that is nobody whom the server knows."""
        found = [(name, value) for name, value in headers if name in HEADERS]
        given = dict(found)
        if not len(given) == len(found) == len(HEADERS):
            return WRONG
        public, signature, stamp = (given[name] for name in HEADERS)
        try:
            key = b64decode(public, validate=True)
            signed = b64decode(signature, validate=True)
            at = datetime.datetime.fromisoformat(stamp.decode("ascii"))
            age = (datetime.datetime.now(datetime.UTC) - at).total_seconds()
            node_id = self._registered(key)
            if node_id is None:
                return Unwelcome(Refusal("revoked" if self._revoked(key) else "unknown"))
            _parsed(key).verify(signed, stamp, ec.ECDSA(hashes.SHA256()))
            if not -NEWEST < age < OLDEST:
                return Unwelcome(Refusal("clock", f"{age:.0f}"), node_id)
            # The same signature can be written in other ways, but not with another r.
            mark, _ = decode_dss_signature(signed)
        except (ValueError, TypeError, OverflowError, InvalidSignature):
            return WRONG
        used = self._used.setdefault(key, Used())
        if not used.take(mark & MARK, at.timestamp(), time.time()):
            return Unwelcome(Refusal("replay"), node_id)
        return Caller(node_id, key)

    def _registered(self, key: bytes) -> int | None:
        clock = time.monotonic()
        node_id, until = self._known.get(key, (0, 0.0))
        if clock < until:
            return node_id
        found = self._node_of(key)
        if found is None:
            self._known.pop(key, None)
            return None
        self._known[key] = (found, clock + KNOWN_S)
        return found


@lru_cache(maxsize=4096)
def _parsed(key: bytes) -> Any:
    """A registered site's public key."""
    return load_pem_public_key(key)
