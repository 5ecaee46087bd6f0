"""The wire contract: what may enter and leave a process, and its layout in bytes.

    Kind       model, atoms, statistics, gradient, masked, sealed or key: nothing else is sent
    Manifest   the layout of a packed array: its kind, and each entry's name, dtype and shape
    Packed     one flat array of bytes with its manifest
    Rule       the arrays and numbers that one direction may carry; all others are refused
    Part       what a site does in one hop of a round: the rules for its request and its reply

Flower stores and fetches each array of a message separately. So a model is sent as one flat array:
45 MB take seconds as one array, and most of a minute as three hundred.

With `wire.dtype=int8` a model's arrays of two axes or more travel as whole numbers with a scale per
row (`fedda.maths.coarse`), its other values in float32. A site sends back only the change of the
model that it got. Whoever sent it adds the change to the model as it was before it was rounded: so
no update is lost that is smaller than a rounding step, and nobody has to remember what it rounded
away.
"""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedda.config import is_site_name
from fedda.errors import NotFiniteError, WireError
from fedda.maths.coarse import (
    fill_rows,
    from_bfloat16,
    read_rows,
    row_bytes,
    scales_of,
    to_bfloat16,
)

Role = Literal["source", "target"]
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


WHOLE = 1.0  # the step of a whole number
EXACT = math.inf  # that of a number that follows from the settings, and from no image
DIGITS = 0.0  # no step: a server's weights decide how large the number is
Bound = float | Callable[[int, int], float]  # for C classes and K sites


class Number(str):
    """A number that may leave a site: its name, as a pattern, and how much it may tell.

    All numbers are rounded, so that none says exactly what single images make of it.

    Attributes:
        step: what it is rounded to, or WHOLE, EXACT or DIGITS.
        is_share: whether it is a share of images, which says nothing of few: then it is none or
            all.
        is_accuracy: whether it is over the labelled tests; if these are so few that one of them
            changes it by a step, it is not rounded.
    """

    step: float
    is_share: bool
    is_accuracy: bool
    _low: Bound
    _high: Bound

    def __new__(
        cls,
        name: str,
        step: float = DIGITS,
        *,
        low: Bound = 0.0,
        high: Bound = 1.0,
        is_share: bool = False,
        is_accuracy: bool = False,
    ) -> "Number":
        """Declare it.

        Args:
            name: its name; with a `*` one for each site.
            step: as above.
            low: the smallest value that a model made for the purpose can give it.
            high: the largest one.
            is_share: as above.
            is_accuracy: as above.
        """
        made = super().__new__(cls, name)
        made.step, made._low, made._high = step, low, high
        made.is_share, made.is_accuracy = is_share, is_accuracy
        return made

    def bounds(self, classes: int, sites: int) -> tuple[float, float]:
        """The smallest and the largest value."""
        low, high = (b(classes, sites) if callable(b) else b for b in (self._low, self._high))
        return low, high


@dataclass(frozen=True)
class Rule:
    """The arrays and numbers that a message may carry; names are patterns such as `teacher/*`.

    An array or number whose pattern has a `*` may come once per site of the run, and not more
    often. So numbers per image are refused.
    """

    arrays: Mapping[str, Kind] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()  # what leaves a site is a `Number` each
    optional: Mapping[str, Kind] = field(default_factory=dict)  # arrays that may be left out
    counts: frozenset[str] = frozenset()  # tables of answers by class, which may be left out

    def number(self, name: str) -> Number:
        """The declaration of a number that leaves.

        Raises:
            WireError: there is none.
        """
        found = next((p for p in self.numbers if _fits(name, p)), None)
        if not isinstance(found, Number):
            raise WireError(
                f"The method does not say how much the number '{shown(name)}' may tell; declare it "
                "in its contract as a fedda.wire.Number."
            )
        return found

    def check(
        self,
        arrays: Mapping[str, Packed],
        numbers: Mapping[str, Any],
        *,
        model: Manifest,
        sites: int,
        where: str,
        layouts: Mapping[str, Manifest] | None = None,
        classes: int = 0,
    ) -> None:
        """Refuse every array and number that is not listed or has another layout.

        Args:
            arrays: packed arrays by record name.
            numbers: scalars by name.
            model: layout of the run's model. Every array of kind model must have exactly its
                entries, unless `layouts` names it.
            sites: how many sites take part; a pattern with `*` may match at most so many names.
            where: who sends or receives, for the error message.
            layouts: layouts of other arrays, by name; `NAME/SITE` has the layout of `NAME`.
            classes: of the run, which say how long a table of answers by class is.

        Raises:
            WireError: an array or number is not in the rule, or has another form; the error names
                it.
        """
        layouts, listed = layouts or {}, {**self.arrays, **self.optional}
        for name, packed in arrays.items():
            kind = next((k for p, k in listed.items() if _fits(name, p)), None)
            if kind is None:
                raise WireError(f"{where}: the contract has no array '{shown(name)}'.")
            if packed.manifest.kind != kind:
                raise WireError(
                    f"{where}: '{name}' is of kind {packed.manifest.kind}, the contract has {kind}."
                )
            layout = layouts.get(name.split("/")[0], model if kind is Kind.MODEL else None)
            if layout is None:
                raise WireError(f"{where}: the contract has no layout for '{name}'.")
            _same_entries(packed.manifest, layout, f"{where}: '{name}'")
        for name, value in numbers.items():
            if name in self.counts:
                _check_counts(value, classes, f"{where}: '{name}'")
                continue
            if not any(_fits(name, p) for p in self.numbers):
                raise WireError(f"{where}: the contract has no number '{shown(name)}'.")
            if type(value) not in (int, float):
                raise WireError(f"{where}: '{name}' must be a single number.")
        for pattern in (*listed, *self.numbers):
            matches = sum(_fits(n, pattern) for n in (*arrays, *numbers))
            if "*" in pattern and matches > sites:
                raise WireError(
                    f"{where}: {matches} times '{pattern}', but the run has {sites} sites."
                )


def _check_counts(value: Any, classes: int, where: str) -> None:
    """Refuse what is no table of answers by class: per class its answers, and how many it has."""
    long = classes * (classes + 1) if classes <= MOST_TOLD else 0
    whole = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    if not whole or not 0 < len(value) == long:
        raise WireError(
            f"{where} must be {classes} x {classes + 1} whole numbers, of {MOST_TOLD} classes at "
            "most."
        )


def shown(name: str) -> str:
    """A name from outside as it may stand in a message: not long, and in one line."""
    return "".join(c if c.isprintable() else "?" for c in name[:80])


def _fits(name: str, pattern: str) -> bool:
    """Whether a name is a rule's, which may have the name of a site in place of `*`."""
    before, star, _ = pattern.partition("*")
    if not star:
        return name == pattern
    return name.startswith(before) and is_site_name(name.removeprefix(before))


def _same_entries(given: Manifest, needed: Manifest, where: str) -> None:
    if given.entries == needed.entries:
        return
    have, want = set(given.entries), set(needed.entries)
    odd = sorted(shown(e.name) for e in have ^ want)
    what = f"differs at {', '.join(odd[:3])}" if odd else "has its entries in another order"
    raise WireError(f"{where} is not this run's {needed.kind}: it {what}.")


@dataclass(frozen=True)
class Part:
    """What a site does in one hop of a round: what it may be sent, and what it may send back.

    In addition every request names its round, phase, hop and part, and whether the round is the
    last though more were planned.

    Attributes:
        enters: arrays and numbers of the request.
        leaves: arrays and numbers of the reply.
        gradients: patterns of the groups of the exchange in which the site may sum gradients.
        labels: whether the part needs a site that has labels.
        private: whether the part trains by DP-SGD, and on nothing else, where the run asks for it.
        needed: what the server needs of a source's model: each one, their mean alone, or nothing,
            as it relays them to the target. Then they can be hidden (`fedda.secure.hiding`).
        judges: whether the reply's numbers say how good each received model is. Each model counts
            as a test then, in the site's policy and budget.
    """

    enters: Rule = field(default_factory=Rule)
    leaves: Rule = field(default_factory=Rule)
    gradients: frozenset[str] = frozenset()
    labels: bool = False
    judges: bool = False
    private: bool = False
    needed: Literal["each", "mean", "relay"] = "each"

    @property
    def signs(self) -> bool:
        """Whether the site only makes a key, for a later hop."""
        return set(self.leaves.arrays.values()) == {Kind.KEY}

    def check_groups(self, groups: Mapping[str, int], layouts: Mapping[str, Manifest]) -> None:
        """Refuse gradients that may not leave this part, or that have another size.

        Args:
            groups: how many values the site is asked for, by name of the group.
            layouts: layouts of the parameters that the gradients belong to, by name. A group is
                named after its layout, or `LAYOUT/SITE` if several groups have the same layout.

        Raises:
            WireError: a group is not in the part, or has another number of values; the error names
                it.
        """
        for name, size in groups.items():
            if not any(fnmatchcase(name, p) for p in self.gradients):
                raise WireError(f"The contract has no gradient '{name}' that leaves this part.")
            wanted = sum(entry.size for entry in layouts[name.split("/")[0]].entries)
            if size != wanted:
                raise WireError(f"'{name}' has {wanted} values, but {size} are asked for.")


MODEL = {"model": Kind.MODEL}

STEPS = Number("steps", WHOLE)
SECONDS = Number("seconds", 0.01)
REFUSED = Number("refused/*", WHOLE)
LOSS_MOST = 10.0  # nats
LOSS = Number("loss", 0.01, high=LOSS_MOST)
EPSILON = Number("epsilon", EXACT)
ACCURACY = Number("accuracy", 0.001, is_accuracy=True)
INFOMAX = Number("infomax", 0.01, high=lambda classes, sites: math.log(classes))
PREDICTED = Number("predicted", WHOLE, high=lambda classes, sites: classes)
CHANGED = Number("changed", 0.01, is_share=True)
AGREED = Number("agreed", 0.01, is_share=True)


def accuracy_of(what: str) -> Number:
    """The accuracy of another predictor."""
    return Number(f"{ACCURACY}-{what}", ACCURACY.step, is_accuracy=True)


# What the target says of its own last step (`fedda.refining`), which sends nothing else.
REFINED = frozenset({accuracy_of("refined"), CHANGED, AGREED})

# How the last model, and the refined one, answer the tests of each class, in tens.
ANSWERS = frozenset({"answers", "answers-refined"})
MOST_TOLD = 100  # classes of such a table

# The usual test: the target alone tests the model and reports these numbers.
TEST = Part(
    enters=Rule(MODEL),
    leaves=Rule(
        numbers=REFINED | {ACCURACY, LOSS, Number("tested", WHOLE), INFOMAX, PREDICTED, SECONDS},
        counts=ANSWERS,
    ),
)

# What a site tells of its data before any training (`fedda look`); small ones tell no array.
LOOK = Part(leaves=Rule(optional={"look": Kind.STATISTICS}))
# Beside it:
LOOK_TABLE = ("role", "name", "kind", "shape", "columns", "examples", "classes", "counts")
