"""Sums of gradients of which the server sees no term: masks in fixed point, as for models.

The protocol is that of `fedda.secure.masks`. A masked value has the 4 bytes of the float that it
stands for, so nothing on the wire is longer.

    g_k   (P,)  gradient of site k as it would leave it: clipped to a length of C, with noise
    q_k   (P,)  round(g_k 2^b), modulo 2^32; b is chosen so that no sum overflows
    m_kj  (P,)  mask of the pair (k, j) in this sync: AES-256 in counter mode
    y_k   (P,)  what site k sends: q_k + sum_{j > k} m_kj - sum_{j < k} m_kj modulo 2^32

    sum_k y_k = sum_k q_k, and all members get 2^-b sum_k q_k

The members agree on the masks by one more sum, the first of the session: each adds its signed key
in a place of its own, where all others add zeros. The server needs to know nothing about that.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedda.errors import ExchangeError, NotFiniteError, SecureError
from fedda.exchange.groups import KEYS, Group
from fedda.exchange.stream import Stream
from fedda.exchange.sums import WHOLE, Vector
from fedda.secure.masks import add_mask
from fedda.wire.packing import SIGNATURE

PUBLIC = 32  # bytes of an X25519 key
WORDS = (PUBLIC + SIGNATURE) // 4  # of a member's place in the sum of keys
BITS = 30  # of the sum's magnitude; one of the other two is the sign, and one a reserve
TAIL = 8  # standard deviations of noise that fit beside the longest gradient

Whole = NDArray[np.uint32]


def agreement(groups: Sequence[Group]) -> Group:
    """The group in which all members of masked groups tell each other their keys."""
    members = tuple(dict.fromkeys(member for group in groups for member in group.members))
    return Group(KEYS, WORDS * len(members), 1, members, True)


def tell(stream: Stream, group: Group, signed: bytes) -> dict[str, tuple[bytes, bytes]]:
    """Tell all members this site's key -> public key and signature by member.

    Raises:
        ExchangeError: the session ended early.
        SecureError: this site's program was restarted in mid-session, or the sum does not have its
            key as it was told.
    """
    if stream.sent(KEYS):
        raise SecureError(
            "This site was restarted while gradients were summed, and its key for that is gone; "
            "the round has to be repeated."
        )
    if group.size != WORDS * len(group.members) or group.syncs != 1:
        raise SecureError("The request's sum of keys has no place for each member.")
    places = np.zeros((len(group.members), 4 * WORDS), np.uint8)
    own = group.members.index(stream.node)
    places[own] = np.frombuffer(signed, np.uint8)
    total = stream.swap(KEYS, places.reshape(-1).view(np.float32), 1)
    rows = total.view(np.uint8).reshape(places.shape)
    if not np.array_equal(rows[own], places[own]):
        raise SecureError("Somebody changed this site's key; the round has to be repeated.")
    every = (row.tobytes() for row in rows)
    return {m: (r[:PUBLIC], r[PUBLIC:]) for m, r in zip(group.members, every, strict=True)}


class GradientPoint:
    """The fixed point of a group's sums; all members make the same one.

    Args:
        clip: the run's greatest length of a gradient.
        noise: the run's, in units of the clip.
        members: how many sites add up.
    """

    def __init__(self, clip: float, noise: float, members: int) -> None:
        self.largest = clip * (1 + TAIL * noise)
        self.bits = BITS - math.ceil(math.log2(self.largest)) - math.ceil(math.log2(members))
        self.members = members

    def encode(self, gradient: Vector) -> Whole:
        """Q = round(g 2^b) -> (P,), modulo 2^32.

        Raises:
            NotFiniteError: a value is NaN or infinite.
            SecureError: a value is too large, so that the sum could overflow.
        """
        wide = gradient.astype(np.float64)
        if not np.isfinite(wide).all():
            raise NotFiniteError(
                "The gradient holds values that are not finite: lower the learning rate or the "
                "weight of the adversarial loss."
            )
        if np.abs(wide).max(initial=0.0) > self.largest:
            raise SecureError(
                f"A gradient with this site's noise holds a value above {self.largest:g}, the most "
                "that a masked sum adds without overflow; raise exchange.noise to this site's, or "
                "set exchange.masked to false."
            )
        return np.rint(np.ldexp(wide, self.bits)).astype(np.int64).astype(np.uint32)

    def decode(self, total: Whole) -> Vector:
        """2^-b sum_k q_k -> (P,)."""
        return np.ldexp(total.view(np.int32).astype(np.float64), -self.bits).astype(np.float32)


class MaskedGroup:
    """One site's connection to one masked group; takes and gives plain gradients.

    Args:
        stream: to the session.
        seeds: of the masks of this site's pairs, and whether it adds them (`fedda.secure.agree`).
        point: the group's fixed point.
    """

    def __init__(self, stream: Stream, seeds: Mapping[bytes, bool], point: GradientPoint) -> None:
        self._stream, self._seeds, self._point = stream, seeds, point

    def send(self, group: str, gradient: Vector, examples: int) -> None:
        """Mask a gradient with the masks of its sync, and send it; errors as of `Stream.send`."""
        values = self._point.encode(gradient)
        for seed, add in self._seeds.items():
            add_mask(values, seed, add, self._stream.sent(group))
        self._stream.send(group, values.astype(WHOLE, copy=False).view(np.float32), examples)

    def receive(self, group: str) -> Vector:
        """Wait for the sum, in which the masks cancel -> (P,).

        Raises:
            ExchangeError: the session ended early, or the masks did not cancel.
        """
        total = self._point.decode(self._stream.receive(group).view(WHOLE))
        if np.abs(total).max(initial=0.0) > self._point.members * self._point.largest:
            raise ExchangeError(
                f"The masks in the sum of group '{group}' did not cancel; the round has to be "
                "repeated."
            )
        return total
