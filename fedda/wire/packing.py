"""A model, atoms or statistics as one flat array of bytes with its layout.

Every array of a message travels by itself. So a model is sent as one flat array: 45 MB take seconds
as one array, and most of a minute as three hundred.

With `wire.dtype=int8` a model's arrays of two axes or more travel as whole numbers with a scale per
row (`fedda.maths.coarse`), its other values in float32. A site sends back only the change of the
model that it got. Whoever sent it adds the change to the model as it was before it was rounded: so
no update is lost that is smaller than a rounding step, and nobody has to remember what it rounded
away.
"""

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedda.errors import NotFiniteError, WireError
from fedda.maths.coarse import (
    fill_rows,
    from_bfloat16,
    read_rows,
    row_bytes,
    scales_of,
    to_bfloat16,
)

Arrays = dict[str, NDArray[Any]]

ALIGN = 8  # bytes; entries start at multiples of it, so that numpy can read them in place
MAX_ENTRIES = 100_000
MAX_TEXT = 100 * MAX_ENTRIES  # characters of a manifest
MAX_SIZE = 2**40  # values in one entry; a 0 in its shape counts as 1, so numpy accepts the shape
PIECE = 2**18  # values processed at a time, so that no temporary is as large as a model
DTYPES = {"float16", "float32", "float64", "int64", "int32", "uint8", "bool"}
CHANGE = "change"  # as int8, but of the difference to the model that the request held
ROWS = {"int8", CHANGE}  # whole numbers with a scale per row
FLOATS = ROWS | {"bfloat16", "float16", "float32", "float64"}  # in which such values are sent


class Kind(StrEnum):
    """The kinds of arrays; no other kind crosses the wire."""

    MODEL = "model"
    ATOMS = "atoms"
    STATISTICS = "statistics"  # means over many examples of a site
    GRADIENT = "gradient"
    MASKED = "masked"  # a model under masks that vanish only in the sum over a group of sites
    SEALED = "sealed"  # a model encrypted to the target's key, which the server only relays
    KEY = "key"  # a site's signed key for one such sum, or for one round's sealed models


SCALARS = "scalars"  # what is counted as such: all that is no array
COUNTED = (*map(str, Kind), SCALARS)  # by which bytes are counted


@dataclass(frozen=True)
class Entry:
    """One array inside a packed one; `dtype` is the type in which the receiver gets it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """The layout of a packed array; floating-point values are sent as dtype `floats`.

    numpy has no bfloat16, so its values are sent, and read by `raw`, as uint16 of the same bits.
    Arrays with a scale per row are sent, and read by `raw`, as flat bytes.
    """

    kind: Kind
    floats: str
    entries: tuple[Entry, ...]

    @property
    def is_change(self) -> bool:
        """Whether this is the layout of a change of another model."""
        return self.floats == CHANGE and self.kind is Kind.MODEL

    def rows(self, entry: Entry) -> int:
        """How many bytes an entry takes with a scale per row; 0 if it does not travel so."""
        coarse = self.floats in ROWS and self.kind is Kind.MODEL
        return row_bytes(entry.shape) if coarse and entry.dtype.startswith("float") else 0

    def travels(self, entry: Entry) -> np.dtype[Any]:
        if self.rows(entry):
            return np.dtype("uint8")
        floats = {"bfloat16": "uint16", **dict.fromkeys(ROWS, "float32")}
        sent = floats.get(self.floats, self.floats)
        return np.dtype(sent if entry.dtype.startswith("float") else entry.dtype)

    def size(self, entry: Entry) -> int:
        """How many values of that type an entry is sent as."""
        return self.rows(entry) or entry.size

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each entry starts, in bytes; the last offset is the end of all."""
        ends = [0]
        for entry in self.entries:
            size = self.size(entry) * self.travels(entry).itemsize
            ends.append(ends[-1] + -(-size // ALIGN) * ALIGN)
        return tuple(ends)

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    @cached_property
    def text(self) -> str:
        """The manifest as JSON, the form that is sent."""
        entries = [[e.name, e.dtype, list(e.shape)] for e in self.entries]
        return json.dumps([str(self.kind), self.floats, entries], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Read what `text` wrote, and check every part of it.

        Raises:
            WireError: the text is not a manifest.
        """
        try:
            if len(text) > MAX_TEXT:
                raise ValueError
            kind, floats, entries = json.loads(text)
            if len(entries) > MAX_ENTRIES or floats not in FLOATS:
                raise ValueError
            manifest = cls(Kind(kind), floats, tuple(_entry(*e) for e in entries))
            if len({e.name for e in manifest.entries}) != len(entries):
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise WireError("A packed array came with a manifest that cannot be read.") from None
        return manifest


def _entry(name: Any, dtype: Any, shape: Any) -> Entry:
    whole = type(shape) is list and all(type(n) is int and n >= 0 for n in shape)
    if type(name) is not str or dtype not in DTYPES or not whole or len(shape) > 8:
        raise ValueError
    if math.prod(n or 1 for n in shape) >= MAX_SIZE:
        raise ValueError
    return Entry(name, dtype, tuple(shape))


@dataclass(frozen=True)
class Packed:
    """A manifest and its bytes; messages to several sites share one buffer.

    Attributes:
        manifest: the layout.
        buffer: the bytes.
        whole: the model that a change is one of; of a model that was rounded to be sent as int8,
            the one before. It does not cross the wire.
    """

    manifest: Manifest
    buffer: bytes | memoryview
    whole: "Packed | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.buffer) != self.manifest.nbytes:
            raise WireError(
                f"A packed {self.manifest.kind} holds {len(self.buffer)} bytes, "
                f"but its manifest describes {self.manifest.nbytes}."
            )

    def of(self, sent: "Packed | None") -> "Packed":
        """This model, and if it came as a change, of which one; what else came stays as it is.

        Args:
            sent: the model that the request held, as it was sent or before it was rounded.

        Raises:
            WireError: it is a change of entries that were not sent.
        """
        if not self.manifest.is_change:
            return self
        if sent is None or not {*sent.manifest.entries}.issuperset(self.manifest.entries):
            raise WireError("A packed model is the change of one that nobody sent.")
        return replace(self, whole=sent.before)

    @property
    def before(self) -> "Packed":
        """This model before it was rounded to be sent."""
        return self.whole if self.whole and not self.manifest.is_change else self

    def raw(self) -> Arrays:
        """The entries in the dtype in which they were sent, as views of the bytes."""
        return {entry.name: self._raw(place) for place, entry in enumerate(self.manifest.entries)}

    def _raw(self, place: int) -> NDArray[Any]:
        entry, start = self.manifest.entries[place], self.manifest.offsets[place]
        size = self.manifest.size(entry)
        values = np.frombuffer(self.buffer, self.manifest.travels(entry), size, start)
        return values if self.manifest.rows(entry) else values.reshape(entry.shape)

    def unpack(self) -> Arrays:
        """The entries in the dtype of the receiver; views of the bytes where no cast is needed."""
        raw = self.raw()
        return {e.name: self._read(raw[e.name], e) for e in self.manifest.entries}

    @cached_property
    def _places(self) -> dict[str, int]:
        """Where each entry is in the manifest."""
        return {entry.name: place for place, entry in enumerate(self.manifest.entries)}

    def entry(self, name: str) -> NDArray[Any]:
        """One entry of `unpack`."""
        place = self._places[name]
        return self._read(self._raw(place), self.manifest.entries[place])

    def _read(self, values: NDArray[Any], entry: Entry) -> NDArray[Any]:
        if self.manifest.rows(entry):
            values = read_rows(values, entry.shape)
            if self.manifest.is_change:
                assert self.whole, "a change is read where the model is known"
                values += self.whole.entry(entry.name)
        elif self.manifest.floats == "bfloat16" and entry.dtype.startswith("float"):
            values = from_bfloat16(values)
        return values.astype(entry.dtype, copy=False)

    def check_finite(self, who: str) -> None:
        """Refuse NaN and infinity, and scales of rows that no rounding gives.

        Args:
            who: the sender, for the error message.

        Raises:
            NotFiniteError: an entry holds NaN or infinity; the error names the first one.
            WireError: a scale is negative, or this is a change of nothing known.
        """
        if self.manifest.is_change and self.whole is None:
            self.of(None)  # which says so
        for entry, values in zip(self.manifest.entries, self.raw().values(), strict=True):
            if not entry.dtype.startswith("float"):
                continue
            if self.manifest.rows(entry):
                finite = self._fits(entry, scales_of(values, entry.shape), who)
            else:
                with np.errstate(over="ignore"):  # float64 may overflow in the receiver's dtype
                    used = (self._read(part, entry) for (part,) in pieces(values))
                    finite = all(np.isfinite(part).all() for part in used)
            if not finite:
                raise NotFiniteError(f"{entry.name} from {who} holds values that are not finite.")

    def _fits(self, entry: Entry, scales: NDArray[np.float32], who: str) -> bool:
        """Whether all values of these scales are finite, without making the values."""
        if (scales < 0).any():
            raise WireError(
                f"{entry.name} from {who} has a scale below 0, which no rounding to int8 gives; "
                "server and site need the same version of fedda."
            )
        most = 128.0 * float(scales.max())
        if self.manifest.is_change and self.whole:
            base = self.whole.entry(entry.name)
            most += max(float(base.max()), -float(base.min()))
        return most <= min(float(np.finfo(t).max) for t in ("float32", entry.dtype))


def pack(arrays: Mapping[str, NDArray[Any]], kind: Kind, floats: str = "float32") -> Packed:
    """Lay arrays out one after the other; floating-point values are cast to `floats`.

    Raises:
        WireError: an array has a dtype that cannot be sent.
    """
    return lay_out(layout(arrays, kind, floats), arrays)


def change(arrays: Mapping[str, NDArray[Any]], sent: Packed) -> Packed:
    """Lay a model out as the change of another one; what has no scale per row is sent whole.

    Args:
        arrays: the model.
        sent: the model that the request held, with entries of the same names.
    """
    return replace(lay_out(layout(arrays, Kind.MODEL, CHANGE), arrays, sent), whole=sent)


def layout(arrays: Mapping[str, NDArray[Any]], kind: Kind, floats: str = "float32") -> Manifest:
    """The manifest that `pack` gives arrays, without reading their values.

    Raises:
        WireError: an array has a dtype that cannot be sent.
    """
    for name, array in arrays.items():
        if str(array.dtype) not in DTYPES:
            raise WireError(f"{name} is of type {array.dtype}, which cannot be sent.")
    entries = tuple(Entry(n, str(a.dtype), tuple(a.shape)) for n, a in arrays.items())
    return Manifest(kind, floats, entries)


# The layout of a signed key: X25519's 32 bytes, then r and s, 66 bytes each on the largest curve.
SIGNATURE = 132
KEY = (Entry("public", "uint8", (32,)), Entry("signature", "uint8", (SIGNATURE,)))


def lay_out(
    manifest: Manifest, arrays: Mapping[str, NDArray[Any]], minus: Packed | None = None
) -> Packed:
    """Lay arrays out as a manifest says.

    Args:
        manifest: the layout.
        arrays: in any dtype, which is cast, or as `Packed.raw` gives them.
        minus: subtracted from arrays with a scale per row.
    """
    buffer = io.BytesIO()  # gives bytes without the copy that a bytearray needs
    if manifest.nbytes:  # all at once: a buffer that grows copies what it holds
        buffer.seek(manifest.nbytes - 1)
        buffer.write(b"\0")
        _fill(np.frombuffer(buffer.getbuffer(), np.uint8), manifest, arrays, minus)
    return Packed(manifest, buffer.getvalue())


def _fill(
    whole: NDArray[np.uint8],
    manifest: Manifest,
    arrays: Mapping[str, NDArray[Any]],
    minus: Packed | None,
) -> None:
    """Write arrays into the bytes of a packed one."""
    with np.errstate(over="ignore", invalid="ignore"):  # check_finite refuses what became infinite
        for entry, start in zip(manifest.entries, manifest.offsets[:-1], strict=True):
            dtype, given = manifest.travels(entry), arrays[entry.name]
            into = whole[start : start + manifest.size(entry) * dtype.itemsize].view(dtype)
            if manifest.rows(entry) and given.dtype.kind == "f":
                fill_rows(given if minus is None else given - minus.entry(entry.name), into)
                continue
            for part, place in pieces(given, into):
                coarse = manifest.floats == "bfloat16" and part.dtype.kind == "f"
                place[...] = to_bfloat16(part) if coarse else part


def pieces(*arrays: NDArray[Any], size: int = PIECE) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield flat pieces of arrays of the same size, at the same positions in each array.

    Args:
        arrays: the arrays.
        size: values in a piece; the last one may be smaller.
    """
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, size):
        yield tuple(values[start : start + size] for values in flat)


def shown(name: str) -> str:
    """A name from outside as it may stand in a message: not long, and in one line."""
    return "".join(c if c.isprintable() else "?" for c in name[:80])
