"""The wire contract: what may leave and enter a process, and how it is laid out.

    Kind       model, atoms or gradient: the only arrays there are
    Manifest   what lies in a packed array: kind, and per entry its name, dtype and shape
    Packed     one flat array of bytes with its manifest
    Rule       the arrays and numbers one direction may carry; everything else is refused
    Part       what a site does in one hop of a round: the rules of its request and its reply

Each array of a Flower message is stored and fetched apart, so a model travels as one flat array:
45 MB take seconds as one array and most of a minute as three hundred.
"""

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedda.errors import NotFiniteError, WireError

Role = Literal["source", "target"]
Arrays = dict[str, NDArray[Any]]

ALIGN = 8  # bytes; entries start at multiples of this, so that they can be read in place
MAX_ENTRIES = 100_000
MAX_SIZE = 2**40  # values in one entry; sides of 0 count as 1, so that numpy can make the shape
PIECE = 2**18  # values worked on at a time, so that no temporary is as large as a model
DTYPES = {"float16", "float32", "float64", "int64", "int32", "uint8", "bool"}


class Kind(StrEnum):
    """What an array is; nothing else crosses the wire."""

    MODEL = "model"
    ATOMS = "atoms"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Entry:
    """One array inside a packed one: `dtype` is what the receiver gets."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """The layout of a packed array; `floats` is the dtype floating-point values travel in."""

    kind: Kind
    floats: str
    entries: tuple[Entry, ...]

    def travels(self, entry: Entry) -> np.dtype[Any]:
        return np.dtype(self.floats if entry.dtype.startswith("float") else entry.dtype)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each entry starts, and last where the whole ends, in bytes."""
        ends = [0]
        for entry in self.entries:
            size = entry.size * self.travels(entry).itemsize
            ends.append(ends[-1] + -(-size // ALIGN) * ALIGN)
        return tuple(ends)

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    @cached_property
    def text(self) -> str:
        """JSON, the form that travels."""
        entries = [[e.name, e.dtype, list(e.shape)] for e in self.entries]
        return json.dumps([str(self.kind), self.floats, entries], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Read what `text` wrote, trusting nothing.

        Raises:
            WireError: the text is not a manifest.
        """
        try:
            kind, floats, entries = json.loads(text)
            if len(entries) > MAX_ENTRIES or floats not in DTYPES or floats[:5] != "float":
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
    """A manifest and its bytes; messages to many sites share the one buffer."""

    manifest: Manifest
    buffer: bytes | memoryview

    def __post_init__(self) -> None:
        if len(self.buffer) != self.manifest.nbytes:
            raise WireError(
                f"A packed {self.manifest.kind} holds {len(self.buffer)} bytes, "
                f"but its manifest describes {self.manifest.nbytes}."
            )

    def raw(self) -> Arrays:
        """The entries in the dtype they travelled in, as views of the bytes."""
        starts = self.manifest.offsets
        out: Arrays = {}
        for entry, start in zip(self.manifest.entries, starts[:-1], strict=True):
            values = np.frombuffer(self.buffer, self.manifest.travels(entry), entry.size, start)
            out[entry.name] = values.reshape(entry.shape)
        return out

    def unpack(self) -> Arrays:
        """The entries as the receiver uses them; views of the bytes where no cast is needed."""
        raw = self.raw()
        return {e.name: raw[e.name].astype(e.dtype, copy=False) for e in self.manifest.entries}

    def check_finite(self, who: str) -> None:
        """Refuse NaN and infinity.

        Raises:
            NotFiniteError: naming the first entry that has one.
        """
        for entry, values in zip(self.manifest.entries, self.raw().values(), strict=True):
            if values.dtype.kind != "f":
                continue
            with np.errstate(over="ignore"):  # what travels in float64 may overflow on arrival
                used = (part.astype(entry.dtype, copy=False) for (part,) in pieces(values))
                if not all(np.isfinite(part).all() for part in used):
                    raise NotFiniteError(
                        f"{entry.name} from {who} holds values that are not finite."
                    )


def pack(arrays: Mapping[str, NDArray[Any]], kind: Kind, floats: str = "float32") -> Packed:
    """Lay arrays out one after the other; floating-point values are cast to `floats`.

    Raises:
        WireError: an array has a dtype that does not travel.
    """
    for name, array in arrays.items():
        if str(array.dtype) not in DTYPES:
            raise WireError(f"{name} is of type {array.dtype}, which does not travel.")
    entries = tuple(Entry(n, str(a.dtype), tuple(a.shape)) for n, a in arrays.items())
    manifest = Manifest(kind, floats, entries)
    buffer = io.BytesIO()  # hands its memory over as bytes, where a bytearray would be copied
    with np.errstate(over="ignore"):  # an overflow to infinity is caught by check_finite
        for entry, end in zip(entries, manifest.offsets[1:], strict=True):
            for (part,) in pieces(arrays[entry.name]):
                buffer.write(part.astype(manifest.travels(entry), copy=False).tobytes())
            buffer.write(bytes(end - buffer.tell()))
    return Packed(manifest, buffer.getvalue())


def pieces(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """Arrays of the same size side by side, flat, a piece at a time."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, PIECE):
        yield tuple(values[start : start + PIECE] for values in flat)


@dataclass(frozen=True)
class Rule:
    """What one direction of one role may carry; names are patterns such as `teacher/*`.

    A number whose pattern has a `*` may come once per site, so never more often than there are
    sites in the run: per-image numbers do not fit.
    """

    arrays: Mapping[str, Kind] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    optional: Mapping[str, Kind] = field(default_factory=dict)  # arrays that may be left out

    def check(
        self,
        arrays: Mapping[str, Packed],
        numbers: Mapping[str, Any],
        *,
        model: Manifest | None,
        sites: int,
        where: str,
        layouts: Mapping[str, Manifest] | None = None,
    ) -> None:
        """Refuse whatever is not listed.

        Args:
            arrays: packed arrays by record name.
            numbers: scalars by name.
            model: the run's model; every array of kind model must have exactly its entries.
            sites: how many sites take part, the most a per-site pattern may match.
            where: who sends or receives, for the message.
            layouts: of the arrays that are no such model, by name; `NAME/SITE` has that of `NAME`.

        Raises:
            WireError: naming the array or number.
        """
        layouts, listed = layouts or {}, {**self.arrays, **self.optional}
        for name, packed in arrays.items():
            kind = next((k for p, k in listed.items() if fnmatchcase(name, p)), None)
            if kind is None:
                raise WireError(f"{where}: the contract has no array '{name}'.")
            if packed.manifest.kind != kind:
                raise WireError(
                    f"{where}: '{name}' is of kind {packed.manifest.kind}, the contract has {kind}."
                )
            layout = layouts.get(name.split("/")[0])
            if layout is not None:
                _same_entries(packed.manifest, layout, f"{where}: '{name}'")
            elif kind is Kind.MODEL and model is not None:
                _same_entries(packed.manifest, model, f"{where}: '{name}'")
        for name, value in numbers.items():
            if not any(fnmatchcase(name, p) for p in self.numbers):
                raise WireError(f"{where}: the contract has no number '{name}'.")
            if type(value) not in (int, float):
                raise WireError(f"{where}: '{name}' must be a single number.")
        for pattern in (*listed, *self.numbers):
            found = sum(fnmatchcase(n, pattern) for n in (*arrays, *numbers))
            if "*" in pattern and found > sites:
                raise WireError(
                    f"{where}: {found} times '{pattern}', but the run has {sites} sites."
                )


def _same_entries(found: Manifest, needed: Manifest, where: str) -> None:
    if found.entries == needed.entries:
        return
    have, want = set(found.entries), set(needed.entries)
    odd = sorted(e.name for e in have ^ want)
    what = f"differs at {', '.join(odd[:3])}" if odd else "has its entries in another order"
    raise WireError(f"{where} is not this run's {needed.kind}: it {what}.")


@dataclass(frozen=True)
class Part:
    """What a site does in one hop of a round: what it may be sent, and what it may send back.

    That every request says its round, phase, hop and part goes without saying.

    Attributes:
        enters: arrays and numbers of the request.
        leaves: arrays and numbers of the reply.
        gradients: groups of the exchange in which the site may sum flat gradients, as patterns.
        labels: whether the part takes a site that has labels.
    """

    enters: Rule = field(default_factory=Rule)
    leaves: Rule = field(default_factory=Rule)
    gradients: frozenset[str] = frozenset()
    labels: bool = False

    def check_groups(self, groups: Mapping[str, int], layouts: Mapping[str, Manifest]) -> None:
        """See that gradients of these sizes may leave a site.

        Args:
            groups: number of values by the group's name, as the site is asked for them.
            layouts: of what the gradients are of, by name; a group is named after one, with
                `/SITE` behind it if there are several.

        Raises:
            WireError: naming the group.
        """
        for name, size in groups.items():
            if not any(fnmatchcase(name, p) for p in self.gradients):
                raise WireError(f"The contract has no gradient '{name}' that leaves this part.")
            wanted = sum(entry.size for entry in layouts[name.split("/")[0]].entries)
            if size != wanted:
                raise WireError(f"'{name}' has {wanted} values, but {size} are asked for.")


MODEL = {"model": Kind.MODEL}

# Every method's model is tested the same way, by the target alone.
TEST = Part(
    enters=Rule(MODEL),
    leaves=Rule(numbers=frozenset({"accuracy", "loss", "tested", "infomax", "seconds"})),
)
