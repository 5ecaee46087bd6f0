"""Packed arrays and numbers <-> Flower's records: the one core module that knows Flower.

A message holds at most these records, and any other is refused:

    arrays      packed arrays by name, one flat Flower array each
    manifests   their layouts, by the same names
    task        what the site is told of the run          (requests)
    step        numbers of this round                     (requests)
    exchange    a ticket to the exchange of gradients     (requests)
    metrics     numbers that the contract lists           (replies)
    offer       what a site brings                        (replies to a query)
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedda.errors import WireError
from fedda.wire import Manifest, Packed

Table = Literal["task", "step", "exchange", "metrics", "offer"]
Numbers = dict[str, Any]

STYPE = "fedda.packed"
RECORDS = ("arrays", "manifests", "task", "step", "exchange", "metrics", "offer")


def write(arrays: Mapping[str, Packed] | None = None, **tables: Mapping[str, Any]) -> RecordDict:
    """Records of one message; the packed buffers are shared, not copied."""
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
            raise WireError(f"The message holds a record '{name}', which is not in the contract.")
        wanted = {"arrays": ArrayRecord, "metrics": MetricRecord}.get(name, ConfigRecord)
        if not isinstance(record, wanted):
            raise WireError(f"The message's record '{name}' is not a {wanted.__name__}.")
        if name not in ("arrays", "manifests"):
            tables[name] = dict(record)
    manifests = content.get("manifests", ConfigRecord())
    packed = from_arrays(content.get("arrays", ArrayRecord()), manifests)  # type: ignore[arg-type]
    return packed, tables


def to_arrays(arrays: Mapping[str, Packed]) -> ArrayRecord:
    """Packed arrays as Flower arrays."""
    return ArrayRecord(
        {n: Array("uint8", (len(p.buffer),), STYPE, p.buffer) for n, p in arrays.items()}
    )


def from_arrays(arrays: ArrayRecord, manifests: Mapping[str, Any]) -> dict[str, Packed]:
    """Flower arrays with their layouts' texts -> packed arrays, without copying."""
    if set(arrays) != set(manifests):
        odd = sorted(set(arrays) ^ set(manifests))
        raise WireError(f"Arrays and manifests do not match at {', '.join(odd[:3])}.")
    packed = {}
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise WireError(f"Array '{name}' is serialised as '{array.stype}', not as {STYPE}.")
        packed[name] = Packed(Manifest.parse(str(manifests[name])), array.data)
    return packed


def size(content: RecordDict) -> dict[str, int]:
    """Bytes of a message as sent, by kind; what is not an array counts as `scalars`.

    Arrays of a message that `read` refuses count as `unreadable`.
    """
    found: Counter[str] = Counter()
    try:
        for packed in read(content)[0].values():
            found[str(packed.manifest.kind)] += len(packed.buffer)
    except WireError:
        arrays = (a for record in content.array_records.values() for a in record.values())
        found["unreadable"] = sum(len(a.data) for a in arrays)
    rest = (r for r in content.values() if not isinstance(r, ArrayRecord))
    found["scalars"] = sum(len(record.deflate()) for record in rest)
    return dict(found)
