"""Inputs drawn by chance, over all kinds: each is read right, or refused in a sentence."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.small_benchmarks import FOLDER


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("fuzz_inputs")


def test_a_hundred_inputs_are_read_right_or_refused(tmp_path: Path, fuzz: Any) -> None:
    judged = [fuzz.drawn(number, 0, tmp_path) for number in range(118)]
    assert not [each for each in judged if each[1] == fuzz.WRONG]
    kinds = {what.partition(":")[0] for what, *_ in judged if not what.startswith(fuzz.ADDRESSES)}
    assert kinds == {*fuzz.KINDS}
    verdicts = [verdict for _, verdict, _ in judged]
    assert verdicts.count(fuzz.RIGHT) > 80
