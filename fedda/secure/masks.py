"""Sums of models of which nobody sees a single one: pairwise masks in fixed point.

Bonawitz et al., Practical Secure Aggregation, CCS 2017, https://doi.org/10.1145/3133956.3133982,
the protocol without recovery: the round is repeated if a member of the group drops out.

    x_k    (D,)  model of site k, in float32
    n_k    int   its weight, at most `most`
    R      int   2^64; with a `wire.dtype` of less than float32, 2^32 for arrays of two axes or more
    q_k    (D,)  round(n_k x_k 2^b) mod R; b is chosen per entry so that no sum overflows
    m_kj   (D,)  the mask of the pair (k, j), uniform in [0, R): AES-256 in counter mode
    y_k    (D,)  what site k sends: q_k + sum_{j > k} m_kj - sum_{j < k} m_kj mod R

    sum_k y_k = sum_k q_k, and theta = 2^-b sum_k q_k / sum_k n_k

The weight and the training's loss travel as two more masked numbers, mod 2^64. Integer buffers,
BatchNorm's counters of steps, are not masked: their mean is the largest, as in
`fedda.maths.average`.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedda.errors import NotFiniteError, SecureError
from fedda.wire.packing import KEY, PIECE, Arrays, Entry, Kind, Manifest, Packed, lay_out

WEIGHT, LOSS = "sum:weight", "sum:loss"  # no network's entry has a colon in its name

Values = NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Ring:
    """The whole numbers modulo a power of two, in which sums wrap around."""

    dtype: str  # of its numbers, as they travel
    bits: int  # of a sum's magnitude; one of the other two is the sign, and one a reserve
    growth: int  # bits by which an entry may exceed the largest value of the model that was sent
    number: int  # tells its masks from those of the other ring, under the same seeds

    def of(self, values: NDArray[np.float64]) -> Values:
        """Round values to numbers of the ring."""
        return np.rint(values).astype(np.int64).astype(f"u{self.dtype}")


WIDE, NARROW = Ring("int64", 62, 16, 0), Ring("int32", 30, 6, 1)


def narrow(model: Manifest) -> frozenset[str]:
    """The entries of a model that are added up modulo 2^32, by the type in which it is sent."""
    if model.floats in ("float32", "float64"):
        return frozenset()
    floats = (e for e in model.entries if e.dtype.startswith("float"))
    return frozenset(e.name for e in floats if len(e.shape) > 1)


def layouts(options: Any, model: Manifest) -> Mapping[str, Manifest]:
    """Return the layouts of a site's signed key and of its masked model."""
    short = narrow(model)
    rings = {e.name: NARROW if e.name in short else WIDE for e in model.entries}
    masked = [Entry(e.name, rings[e.name].dtype, e.shape) for e in model.entries]
    masked += [Entry(name, WIDE.dtype, (1,)) for name in (WEIGHT, LOSS)]
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
        narrow: the entries that are added up modulo 2^32; all others are modulo 2^64.
    """

    def __init__(
        self, sent: Arrays, members: int, most: int, narrow: Collection[str] = frozenset()
    ) -> None:
        taken = (members - 1).bit_length() + (most - 1).bit_length()
        largest = {n: float(np.abs(a).max(initial=1.0)) for n, a in sent.items() if _is_float(a)}
        largest[LOSS] = 1.0
        self.rings = {n: NARROW if n in narrow else WIDE for n in largest}
        self._largest = {n: _power(v) + self.rings[n].growth for n, v in largest.items()}
        self.bits = {n: self.rings[n].bits - taken - top for n, top in self._largest.items()}
        self.members, self.most = members, most

    def encode(self, name: str, values: NDArray[Any], weight: int) -> Values:
        """Q = round(n x 2^b) mod R -> (D,).

        Raises:
            NotFiniteError: a value is NaN or infinite.
            SecureError: a value is too large, so that the sum could overflow.
        """
        wide = values.reshape(-1).astype(np.float64)
        if not np.isfinite(wide).all():
            raise NotFiniteError(f"{name} of this site holds values that are not finite.")
        bound = 2.0 ** self._largest[name]
        if np.abs(wide).max(initial=0.0) > bound:
            whole = "" if self.rings[name] is WIDE else "set wire.dtype to float32, "
            raise SecureError(
                f"{name} holds a value beyond {bound:g}, the most that a secure sum adds without "
                f"overflow; lower train.lr, {whole}or set secure to none."
            )
        return self.rings[name].of(np.ldexp(wide * weight, self.bits[name]))

    def decode(self, name: str, total: Values, weight: int) -> NDArray[np.float64]:
        """2^-b sum_k q_k / sum_k n_k -> (D,)."""
        signed = total.view(self.rings[name].dtype)
        return np.ldexp(signed.astype(np.float64), -self.bits[name]) / weight


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
    values = {n: point.encode(n, a, weight) for n, a in model.items() if _is_float(a)}
    values |= {WEIGHT: WIDE.of(np.array([float(weight)]))}
    values |= {LOSS: point.encode(LOSS, np.array([loss]), weight)}
    out: dict[str, NDArray[Any]] = dict(model)
    for ring in (WIDE, NARROW):
        names = [n for n in values if point.rings.get(n, WIDE) is ring]
        if not names:
            continue
        whole = np.concatenate([values.pop(n) for n in names])
        for seed, add in seeds.items():
            add_mask(whole, seed, add, ring.number)
        start = 0
        for name in names:
            shape = model[name].shape if name in model else (1,)
            size = math.prod(shape)
            out[name] = whole[start : start + size].view(ring.dtype).reshape(shape)
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
        """Add one site's masked values modulo R; of its integer buffers the largest is kept."""
        self.count += 1
        for name, values in packed.raw().items():
            if name not in self._total:
                self._total[name] = values.copy()
            elif name in self._masked:
                bits = f"u{values.dtype}"
                total = self._total[name].view(bits)
                np.add(total, values.view(bits), out=total)
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
        loss = self._point.decode(LOSS, self._total[LOSS], weight)
        model = {n: self._mean(n, dtype, weight) for n, dtype in self._dtypes.items()}
        return model, float(loss[0])

    def _mean(self, name: str, dtype: np.dtype[Any], weight: int) -> NDArray[Any]:
        """One array of the mean, in the memory of its sums if it fits."""
        total = self._total[name]
        if name not in self._masked:
            return total.astype(dtype)
        flat = total.reshape(-1)
        fits = dtype.itemsize <= flat.itemsize
        mean = flat.view(dtype)[: flat.size] if fits else np.empty(flat.size, dtype)
        for start in range(0, flat.size, PIECE):
            part = flat[start : start + PIECE]
            mean[start : start + PIECE] = self._point.decode(name, part, weight)
        return mean.reshape(total.shape)


def _power(value: float) -> int:
    """The smallest e with value <= 2^e, the same on every machine."""
    fraction, exponent = math.frexp(value)
    return exponent - (fraction == 0.5)


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f"
