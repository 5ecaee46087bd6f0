"""Each method computes the same as when its fingerprints were recorded, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import fingerprints

NIGHTLY = pytest.mark.nightly("fedda", "clients", "strategies", "server")  # in most gates, then
TAKEN: dict[str, Any] = json.loads(fingerprints.RECORDS.read_text())


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[NIGHTLY] * (case not in ("kd3a", "fdann", "feddadil")))
        for case in fingerprints.CASES
    ],
)
def test_a_method_computes_its_fingerprint(case: str, tmp_path: Path) -> None:
    taken, then = fingerprints.take(case, tmp_path), TAKEN[case]
    found, wanted = taken["seeds"], then["seeds"]
    assert set(found) == set(wanted) == set(fingerprints.SEEDS.split(","))
    for seed in wanted:
        # Compare numbers first: if they differ, they show what changed, which a hash does not.
        last, known = found[seed]["last"], wanted[seed]["last"]
        assert set(last) == set(known)
        for name, value in known.items():
            within = 0.15 if "accuracy" in name else 1e-2  # a few images; many roundings
            assert last[name] == pytest.approx(value, rel=within, abs=within), name
        if taken["machine"] == then["machine"]:
            assert last == known
            assert found[seed]["hash"] == wanted[seed]["hash"]


def test_fingerprints_differ_after_a_tiny_change(tmp_path: Path) -> None:
    case = "fedavg"
    method, settings = fingerprints.CASES[case]
    before = fingerprints.take(case, tmp_path / "before")
    try:
        fingerprints.CASES[case] = (method, settings | {"train.lr": 0.05 * (1 + 1e-6)})
        after = fingerprints.take(case, tmp_path / "after")
    finally:
        fingerprints.CASES[case] = (method, settings)
    zero, one = before["seeds"]["0"], before["seeds"]["1"]
    assert zero["hash"] != one["hash"]
    assert zero["hash"] != after["seeds"]["0"]["hash"]
