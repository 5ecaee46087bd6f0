"""Packed arrays and numbers <-> Flower's records: the only core module that uses Flower.

A message holds at most these records, and any other is refused:

    arrays      packed arrays by name, one flat Flower array each
    manifests   their layouts, by the same names
    task        the run's settings                        (requests, queries about weights)
    step        numbers of this round                     (requests)
    exchange    an invitation to the exchange             (requests)
    kept        SHA-256 of arrays, by name: those that the site is to keep if they come with it,
                and those that it has kept if they do not (requests)
    metrics     numbers that the contract lists           (replies)
    offer       name, role and data of a site             (replies to a query)
    look        the run; what a site's data look like     (queries of `fedda look`, their replies)
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedda.errors import WireError
from fedda.wire.packing import SCALARS, Manifest, Packed, shown

Table = Literal["task", "step", "exchange", "kept", "metrics", "offer", "look"]
Numbers = dict[str, Any]

STYPE = "fedda.packed"
HASHED = "_fedda_hash"  # where an array keeps its bytes and their hash
RECORDS = ("arrays", "manifests", *get_args(Table))


def write(arrays: Mapping[str, Packed] | None = None, **tables: Mapping[str, Any]) -> RecordDict:
    """The records of one message; they share the packed buffers and copy none."""
    content: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    if arrays:
        content["arrays"] = to_arrays(arrays)
        content["manifests"] = ConfigRecord({n: p.manifest.text for n, p in arrays.items()})
    for name, table in tables.items():
        record = MetricRecord if name == "metrics" else ConfigRecord
        content[name] = record(dict(table))
    return RecordDict(content)


def read(content: RecordDict) -> tuple[dict[str, Packed], dict[str, Numbers]]:
    """What `write` wrote -> packed arrays, tables by name.

    Raises:
        WireError: a record is unknown or of the wrong kind, or an array does not fit its manifest.
    """
    tables: dict[str, Numbers] = {}
    for name, record in content.items():
        if name not in RECORDS:
            raise WireError(
                f"The message holds a record '{shown(name)}', which is not in the contract."
            )
        needed = {"arrays": ArrayRecord, "metrics": MetricRecord}.get(name, ConfigRecord)
        if not isinstance(record, needed):
            raise WireError(f"The message's record '{name}' is not a {needed.__name__}.")
        if name not in ("arrays", "manifests"):
            tables[name] = dict(record)
    manifests = content.get("manifests", ConfigRecord())
    packed = from_arrays(content.get("arrays", ArrayRecord()), manifests)  # type: ignore[arg-type]
    return packed, tables


def to_arrays(arrays: Mapping[str, Packed]) -> ArrayRecord:
    """Packed arrays as Flower arrays; several messages share one for the same bytes."""
    record = ArrayRecord()  # which would copy the arrays that it is made of
    for name, packed in arrays.items():
        record[name] = _array(bytes(packed.buffer))
    return record


def _array(data: bytes) -> Array:
    """The array in use that holds these very bytes, so that they are hashed once; else a new one.

    Its hash is kept in the array.
    """
    array = _IN_USE.get(id(data))
    if array is None or array.data is not data:
        array = _IN_USE[id(data)] = Array("uint8", (len(data),), STYPE, data)
    return array


_IN_USE: WeakValueDictionary[int, Array] = WeakValueDictionary()


def from_arrays(arrays: ArrayRecord, manifests: Mapping[str, Any]) -> dict[str, Packed]:
    """Flower arrays with their layouts' texts -> packed arrays, without copying."""
    if set(arrays) != set(manifests):
        unmatched = sorted(set(arrays) ^ set(manifests))
        raise WireError(
            f"Arrays and manifests do not match at {', '.join(map(shown, unmatched[:3]))}."
        )
    packed = {}
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise WireError(
                f"Array '{shown(name)}' is serialised as '{shown(array.stype)}', not as {STYPE}."
            )
        packed[name] = Packed(Manifest.parse(str(manifests[name])), array.data)
    return packed


def arrays_of(content: RecordDict) -> Iterator[Array]:
    """All arrays of a message's content.

    Flower's `content.array_records` refers to itself, so that a message whose arrays were once
    asked for stays in memory until a garbage collection, which large arrays alone never begin.
    """
    records = (record for record in content.values() if isinstance(record, ArrayRecord))
    return (array for record in records for array in record.values())


def hashed(array: Array) -> str:
    """SHA-256 of an array's bytes; those of an array in use are hashed once."""
    data, (known, found) = array.data, vars(array).get(HASHED, (None, ""))
    if known is not data:
        found = hashlib.sha256(data).hexdigest()
        vars(array)[HASHED] = data, found
    return found


def digest(message: Message) -> str:
    """SHA-256 of what a message holds, in hexadecimal; the same at its sender and its receiver.

    It is that of a JSON text without spaces and with sorted keys: a table of the records by name,
    each a table of its entries. An array stands there as its dtype, its shape, its type of
    serialisation and the SHA-256 of its bytes. A message that holds an error is the table
    {"error": CODE}.
    """
    tables: dict[str, Any] = {}
    if message.has_error():
        tables["error"] = message.error.code
    for name, record in message.content.items() if message.has_content() else ():
        if isinstance(record, ArrayRecord):
            about = {n: [a.dtype, list(a.shape), a.stype, hashed(a)] for n, a in record.items()}
            tables[name] = about
        else:
            tables[name] = dict(record)
    text = json.dumps(tables, sort_keys=True, separators=(",", ":"), default=bytes.hex)
    return hashlib.sha256(text.encode()).hexdigest()


def size(content: RecordDict) -> dict[str, int]:
    """Bytes of a message as sent, by kind of array; all other records count as `scalars`.

    Arrays of a message that `read` refuses count as `unreadable`.
    """
    sizes: Counter[str] = Counter()
    try:
        for packed in read(content)[0].values():
            sizes[str(packed.manifest.kind)] += len(packed.buffer)
    except WireError:
        sizes["unreadable"] = sum(len(a.data) for a in arrays_of(content))
    rest = (r for r in content.values() if not isinstance(r, ArrayRecord))
    sizes[SCALARS] = sum(len(record.deflate()) for record in rest)
    return dict(sizes)
