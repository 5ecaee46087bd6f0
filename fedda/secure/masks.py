"""Sums of models of which nobody sees a single one: pairwise masks in fixed point.

Bonawitz et al., Practical Secure Aggregation, CCS 2017, https://doi.org/10.1145/3133956.3133982,
the protocol without recovery: the round is repeated if a member of the group drops out.

    x_k    (D,)  model of site k, in float32
    n_k    int   its weight, at most `most`
    q_k    (D,)  round(n_k x_k 2^b), int64; b is chosen per entry so that no sum overflows
    m_kj   (D,)  the mask of the pair (k, j), uniform in [0, 2^64): AES-256 in counter mode
    y_k    (D,)  what site k sends: q_k + sum_{j > k} m_kj - sum_{j < k} m_kj mod 2^64

    sum_k y_k = sum_k q_k, and theta = 2^-b sum_k q_k / sum_k n_k

The weight and the training's loss travel as two more masked numbers. Integer buffers, BatchNorm's
counters of steps, are not masked: their mean is the largest, as in `fedda.maths.average`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedda.errors import NotFiniteError, SecureError
from fedda.wire import KEY, PIECE, Arrays, Entry, Kind, Manifest, Packed, lay_out

WEIGHT, LOSS = "sum:weight", "sum:loss"  # no network's entry has a colon in its name
BITS = 62  # of the sum's magnitude; one of the other two is the sign, and one a reserve
GROWTH = 16  # bits by which an entry may exceed the largest value of the model that was sent

Values = NDArray[np.uint64]


def layouts(options: Any, model: Manifest) -> Mapping[str, Manifest]:
    """Return the layouts of a site's signed key and of its masked model."""
    masked = [Entry(e.name, "int64", e.shape) for e in model.entries]
    masked += [Entry(name, "int64", (1,)) for name in (WEIGHT, LOSS)]
    return {
        "key": Manifest(Kind.KEY, model.floats, KEY),
        "masked": Manifest(Kind.MASKED, model.floats, tuple(masked)),
    }


class FixedPoint:
    """The fixed point of one sum; its sites and the server make the same one.

    Args:
        sent: the model that the sites were sent.
        members: how many sites add up, at most.
        most: the largest weight of a site.
    """

    def __init__(self, sent: Arrays, members: int, most: int) -> None:
        room = BITS - (members - 1).bit_length() - (most - 1).bit_length()
        largest = {n: float(np.abs(a).max(initial=1.0)) for n, a in sent.items() if _is_float(a)}
        self._largest = {n: _power(v) + GROWTH for n, v in largest.items()}
        self._largest[LOSS] = GROWTH
        self.bits = {n: room - largest for n, largest in self._largest.items()}
        self.members, self.most = members, most

    def encode(self, name: str, values: NDArray[Any], weight: int) -> Values:
        """Q = round(n x 2^b) -> (D,), modulo 2^64.

        Raises:
            NotFiniteError: a value is NaN or infinite.
            SecureError: a value is too large, so that the sum could overflow.
        """
        wide = values.reshape(-1).astype(np.float64)
        if not np.isfinite(wide).all():
            raise NotFiniteError(f"{name} of this site holds values that are not finite.")
        bound = 2.0 ** self._largest[name]
        if np.abs(wide).max(initial=0.0) > bound:
            raise SecureError(
                f"{name} holds a value beyond {bound:g}, the most that a secure sum adds without "
                "overflow; lower train.lr, or set secure to none."
            )
        return np.rint(np.ldexp(wide * weight, self.bits[name])).astype(np.int64).view(np.uint64)

    def decode(self, name: str, total: Values, weight: int) -> NDArray[np.float64]:
        """2^-b sum_k q_k / sum_k n_k -> (D,)."""
        return np.ldexp(total.view(np.int64).astype(np.float64), -self.bits[name]) / weight

    def step(self, name: str, weight: int) -> float:
        """The most by which rounding moves an entry of the mean: half a step per site."""
        return self.members / 2 * 2.0 ** -self.bits[name] / weight


def add_mask(values: NDArray[Any], seed: bytes, add: bool, number: int = 0) -> None:
    """Add or subtract the mask that a seed of 32 bytes gives, in place.

    Args:
        values: all masked values, (D,), unsigned; they wrap around.
        seed: of one pair; two sums under the same seed and number would reveal differences.
        add: whether to add it; the pair's other site subtracts it.
        number: of the sum, if there are several under this seed.
    """
    counter = number.to_bytes(8, "big") + bytes(8)
    stream = Cipher(algorithms.AES256(seed), modes.CTR(counter)).encryptor()
    width = values.itemsize
    zeros = bytes(width * min(PIECE, values.size))
    for start in range(0, values.size, PIECE):
        part = values[start : start + PIECE]
        mask = np.frombuffer(stream.update(zeros[: width * part.size]), f"<u{width}")
        (np.add if add else np.subtract)(part, mask, out=part)


def hide(
    model: Arrays,
    loss: float,
    weight: int,
    point: FixedPoint,
    seeds: Mapping[bytes, bool],
    layout: Manifest,
) -> Packed:
    """Mask a site's model, loss and weight -> y.

    Args:
        model: the trained model.
        loss: of its training.
        weight: n, at most `point.most`.
        point: the sum's fixed point.
        seeds: a seed per other site, and whether its mask is added.
        layout: of `masked`, from `layouts`.
    """
    masked = [n for n, a in model.items() if _is_float(a)]
    parts = [point.encode(n, model[n], weight) for n in masked]
    parts += [np.array([weight], np.uint64), point.encode(LOSS, np.array([loss]), weight)]
    values = np.concatenate(parts)
    for seed, add in seeds.items():
        add_mask(values, seed, add)
    out: dict[str, NDArray[Any]] = dict(model)
    start = 0
    for name in (*masked, WEIGHT, LOSS):
        shape = model[name].shape if name in model else (1,)
        size = int(np.prod(shape))
        out[name] = values[start : start + size].view(np.int64).reshape(shape)
        start += size
    return lay_out(layout, out)


class MaskedSum:
    """Adds up what the sites of a group send; only the sum over all of them means anything.

    Args:
        sent: the model that the sites were sent.
        point: the sum's fixed point.
    """

    def __init__(self, sent: Arrays, point: FixedPoint) -> None:
        self._dtypes = {n: a.dtype for n, a in sent.items()}
        self._masked = [*(n for n, a in sent.items() if _is_float(a)), WEIGHT, LOSS]
        self._point = point
        self._total: dict[str, NDArray[Any]] = {}
        self.count = 0

    def add(self, packed: Packed) -> None:
        """Add one site's masked values modulo 2^64; of its integer buffers the largest is kept."""
        self.count += 1
        for name, values in packed.raw().items():
            if name not in self._total:
                self._total[name] = values.copy()
            elif name in self._masked:
                total = self._total[name].view(np.uint64)
                np.add(total, values.view(np.uint64), out=total)
            else:
                np.maximum(self._total[name], values, out=self._total[name])

    def result(self, weight: int) -> tuple[Arrays, float]:
        """The mean -> model, loss; call it once and last, as the model overwrites the sums.

        Args:
            weight: what the sites' weights must add up to.

        Raises:
            SecureError: the masks did not vanish, or a site took another weight than it offered.
        """
        if self.count != self._point.members or int(self._total[WEIGHT][0]) != weight:
            raise SecureError(
                f"The masked models of {self.count} sites do not add up to the sum of "
                f"{self._point.members}; the round has to be repeated."
            )
        loss = self._point.decode(LOSS, self._total[LOSS].view(np.uint64), weight)
        model = {n: self._mean(n, dtype, weight) for n, dtype in self._dtypes.items()}
        return model, float(loss[0])

    def _mean(self, name: str, dtype: np.dtype[Any], weight: int) -> NDArray[Any]:
        """One array of the mean, of at most 8 bytes a value, in the memory of its sums."""
        total = self._total[name]
        if name not in self._masked:
            return total.astype(dtype)
        flat = total.reshape(-1)
        mean = flat.view(dtype)[: flat.size]
        for start in range(0, flat.size, PIECE):
            part = flat[start : start + PIECE].view(np.uint64)
            mean[start : start + PIECE] = self._point.decode(name, part, weight)
        return mean.reshape(total.shape)


def _power(value: float) -> int:
    """The smallest e with value <= 2^e, the same on every machine."""
    fraction, exponent = math.frexp(value)
    return exponent - (fraction == 0.5)


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f"
