"""Inputs drawn by chance, over all kinds: each is read right, or refused in a sentence."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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


def test_what_is_read_otherwise_is_wrong(tmp_path: Path, fuzz: Any) -> None:
    """The judge can fail: over labels, pixels, order, and what should be refused."""
    drawn = (fuzz.tables(np.random.default_rng(n), tmp_path / str(n)) for n in range(40))
    sources = (case for case in drawn if case.role == "source" and case.right)
    case = next(case for case in sources if fuzz.judged(case)[0] == fuzz.RIGHT)
    other = {name: "another" for name, _ in case.right}
    labels = [(other[name], x) for name, x in case.right]
    assert fuzz.judged(replace(case, right=labels))[0] == fuzz.WRONG
    pixels = [(name, 255 - x) for name, x in case.right]
    assert fuzz.judged(replace(case, right=pixels))[0] == fuzz.WRONG
    assert fuzz.judged(replace(case, rows=case.rows[::-1]))[0] == fuzz.WRONG
    assert fuzz.judged(replace(case, right=case.right[:-1]))[0] == fuzz.WRONG
    assert fuzz.judged(replace(case, right=None))[0] == fuzz.WRONG


@pytest.mark.parametrize(
    "text, meant",
    (
        ("hub.example.org:8443", ("hub.example.org", 8443)),
        ("[::1]:80", ("::1", 80)),
        ("::1:8443", None),
        (" localhost:1", ("localhost", 1)),
        ("10.0.0.300:80", None),
        ("[127.0.0.1]:80", None),
        ("hub:65536", None),
        ("https://hub:80", ("hub", 80)),
        ("hub", ("hub", 8443)),
        ("[::1]", ("::1", 8443)),
        ("hub example:80", None),
    ),
)
def test_what_an_address_means(monkeypatch: pytest.MonkeyPatch, text: str, meant: Any) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    assert importlib.import_module("fuzzed_addresses").meant(text) == meant
