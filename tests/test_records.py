"""Packed arrays and numbers as Flower's records, and back."""

from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedda import records
from fedda.errors import WireError
from fedda.flower import make_message
from fedda.wire.packing import Kind, pack

MODEL = pack({"w": np.arange(6, dtype=np.float32), "n": np.array(3)}, Kind.MODEL)
ATOMS = pack({"x": np.ones((4, 5), np.float32)}, Kind.ATOMS)


@given(
    st.dictionaries(st.text(min_size=1), st.sampled_from([MODEL, ATOMS]), max_size=4),
    st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False) | st.integers(-9, 9)),
)
def test_what_is_written_is_read_back(arrays: dict, numbers: dict) -> None:
    content = records.write(arrays, metrics=numbers, step={"round": 2}, task={"method": "kd3a"})
    read_arrays, tables = records.read(content)
    assert read_arrays == arrays
    assert tables == {"metrics": numbers, "step": {"round": 2}, "task": {"method": "kd3a"}}


def test_messages_to_many_sites_share_one_buffer() -> None:
    contents = [records.write({"model": MODEL}) for _ in range(3)]
    assert len({id(c) for c in contents}) == 3  # records are not aliased
    for content in contents:
        assert content["arrays"]["model"].data is MODEL.buffer  # type: ignore[index]
        assert records.read(content)[0]["model"].buffer is MODEL.buffer


def test_what_messages_share_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(data: bytes) -> Any:
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr("fedda.records.hashlib", SimpleNamespace(sha256=counted))
    same = pack({"w": np.arange(6, dtype=np.float32), "n": np.array(3)}, Kind.MODEL)
    assert same.buffer == MODEL.buffer and same.buffer is not MODEL.buffer
    contents = [records.write({"model": p}) for p in (MODEL, MODEL, same)]
    one, two, other = (content.array_records["arrays"]["model"] for content in contents)
    assert one is two is not other
    digests = {records.digest(_message(content)) for content in contents}
    assert len(digests) == 1 and hashed.count(len(MODEL.buffer)) == 2
    one.data = b"x" * len(MODEL.buffer)  # what an array held before counts no more
    assert records.digest(_message(contents[1])) not in digests


def _message(content: RecordDict) -> Message:
    about = Metadata(7, "", 3, 1, "q", "1", 0.0, 60.0, "train")
    return make_message(metadata=about, content=content)


def test_size_is_what_travels() -> None:
    content = records.write({"model": MODEL, "teacher/a": MODEL, "atoms": ATOMS}, metrics={"l": 1})
    sizes = records.size(content)
    assert sizes["model"] == 2 * len(MODEL.buffer)
    assert sizes["atoms"] == len(ATOMS.buffer)
    rest = [r for name, r in content.items() if name != "arrays"]
    assert sizes["scalars"] == sum(len(r.deflate()) for r in rest) > 0
    assert set(sizes) == {"model", "atoms", "scalars"}


@pytest.mark.parametrize("name", ["features", "fitins.parameters", "Arrays", ""])
def test_an_unknown_record_is_refused_by_name(name: str) -> None:
    with pytest.raises(WireError, match=f"record '{name}'"):
        records.read(RecordDict({name: ConfigRecord({"x": 1})}))


def test_a_record_of_the_wrong_kind_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="'metrics' is not a MetricRecord"):
        records.read(RecordDict({"metrics": ConfigRecord({"loss": "secret"})}))
    with pytest.raises(WireError, match="'arrays' is not a ArrayRecord"):
        records.read(RecordDict({"arrays": MetricRecord({"loss": 1})}))
    with pytest.raises(WireError, match="'manifests' is not a ConfigRecord"):
        records.read(RecordDict({"manifests": MetricRecord({"loss": 1})}))


def broken() -> dict[str, RecordDict]:
    plain = Array(np.zeros(3, np.float32))  # as any NumPy client would send it
    text = ConfigRecord({"model": MODEL.manifest.text})
    short = Array("uint8", (3,), records.STYPE, b"abc")
    return {
        "Arrays and manifests do not match at model": RecordDict(
            {"arrays": records.to_arrays({"model": MODEL})}
        ),
        "do not match at features": RecordDict(
            {"arrays": records.to_arrays({"model": MODEL, "features": ATOMS}), "manifests": text}
        ),
        "'model' is serialised as 'numpy.ndarray'": RecordDict(
            {"arrays": ArrayRecord({"model": plain}), "manifests": text}
        ),
        "holds 3 bytes": RecordDict({"arrays": ArrayRecord({"model": short}), "manifests": text}),
        "manifest that cannot be read": RecordDict(
            {"arrays": records.to_arrays({"model": MODEL}), "manifests": ConfigRecord({"model": 7})}
        ),
    }


@pytest.mark.parametrize("message", list(broken()))
def test_arrays_that_do_not_fit_their_manifests_are_refused(message: str) -> None:
    content = broken()[message]
    with pytest.raises(WireError, match=message):
        records.read(content)
    assert records.size(content)["unreadable"] > 0  # counted all the same, never an exception


def test_unknown_records_are_counted() -> None:
    strange = RecordDict({"arrays": ConfigRecord({"x": "y" * 100}), "more": MetricRecord({"a": 1})})
    assert sum(records.size(strange).values()) > 100
    alone = RecordDict({"features": ArrayRecord({"z": Array(np.zeros(500, np.float32))})})
    assert records.size(alone)["unreadable"] >= 2000
    assert records.size(RecordDict()) == {"scalars": 0}
