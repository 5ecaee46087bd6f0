"""Each method computes the same as when its fingerprints were recorded, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import fingerprints

# What every method computes with.
SHARED = (
    *("fedda/train.py", "fedda/models", "fedda/maths"),
    *("clients/base.py", "clients/site/trainer.py"),
    *("strategies/base.py", "strategies/sites/correspondence.py"),
)
TAKEN: dict[str, Any] = json.loads(fingerprints.RECORDS.read_text())


def about(method: str) -> pytest.MarkDecorator:
    """The files of a method, and what it shares with all others."""
    own = [f"{top}/{method}.py" for top in ("fedda/algorithms", "clients", "strategies")]
    return pytest.mark.nightly(*SHARED, *own, f"fedda/contrib/methods/{method}")


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("kd3a", "fdann", "feddadil") else pytest.param(case, marks=about(method))
        for case, (method, _) in fingerprints.CASES.items()
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
