"""Doubts: signs without labels that a training may have gone wrong, and where they are shown."""

from typing import Any

import pytest

from fedda.results.diagnostics import doubts
from tests.local_grid import FAST, Node, run


def history(**columns: list[Any]) -> list[dict[str, Any]]:
    """The entries of rounds 1, 2, ... from columns of values; None leaves one out."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    return [{"round": number, **row} for number, row in enumerate(rows, start=1)]


def seen(rounds: int, **columns: list[Any]) -> list[tuple[str, int]]:
    return [(d.what, d.round) for d in doubts(history(**columns), rounds, 4)]


@pytest.mark.parametrize(
    ("rounds", "columns", "expected"),
    [
        (9, {"kept": [0.0, 0.04, 0.049, 0.3]}, [("kept", 3)]),
        (9, {"kept": [0.3, 0.04, 0.04]}, []),  # two rounds of nine may be noise
        (3, {"kept": [0.3, 0.04, 0.04]}, [("kept", 3)]),  # unless the last one is among them
        (9, {"kept": [0.0, 0.0, None, 0.0]}, [("kept", 4)]),  # not told: nothing was seen
        (9, {"kept": [0.05, 0.05, 0.05]}, []),
        (4, {"kept": [0.2, 0.65, 0.4, 0.16]}, [("kept", 4)]),
        (4, {"kept": [0.2, 0.65, 0.4, 0.33]}, []),
        (7, {"kept": [0.0, 0.04, 0.049, 0.3, 0.3, 0.3]}, [("kept", 3)]),  # it has not ended
        (6, {"kept": [0.0, 0.04, 0.049, 0.3, 0.3, 0.3]}, []),  # it has, and this was over
        (5, {"kept": [0.0, 0.04, 0.049, 0.3, 0.3]}, [("kept", 3)]),
        (6, {"kept": [0.0, 0.04, 0.049, None, None, 0.3]}, [("kept", 3)]),
        # Signs that named as many good trainings as bad ones.
        (2, {"predicted": [4, 1], "largest": [0.9, 1.0], "weights": [{"a": 1.0}] * 2}, []),
        (3, {"discriminator-accuracy": [0.3] * 3, "clipped": [0.9] * 3}, []),
    ],
)
def test_doubts_by_hand(
    rounds: int, columns: dict[str, list[Any]], expected: list[tuple[str, int]]
) -> None:
    assert seen(rounds, **columns) == expected


def test_a_loss_as_of_guessing_is_judged_after_twenty_steps_and_says_what_to_change() -> None:
    def said(losses: list[float], steps: float) -> list[tuple[int, str]]:
        every = range(1, len(losses) + 1)
        found = doubts(history(loss=losses), 9, 4, every, rate=0.03, steps=steps)
        return [(d.round, d.text.partition("classes: ")[2]) for d in found]

    assert said([1.5, 1.45, 1.42], 6) == []
    photos = ", and for photographs take a pretrained network (--preset photos)"
    slow = f"next to nothing is learnt; raise train.lr to 0.09{photos}"
    assert said([1.5, 1.45, 1.42], 7) == [(3, slow)]
    assert said([1.38, 1.38], 10) == [(2, f"nothing is learnt; lower train.lr to 0.01{photos}")]
    assert said([1.38], 199) == [] and said([1.38], 200)
    assert said([3.0], 1) == [(1, "training diverges; lower train.lr to 0.01")]
    assert said([0.9, 1.2], 1) == [(2, "training diverges; lower train.lr to 0.01")]
    # The demo's own losses, and those of a network that begins with few steps (60 images a site).
    for healthy, steps in (([1.77, 0.614, 0.248, 0.085], 12), ([2.5, 2.4, 2.1, 1.7], 2)):
        assert doubts(history(loss=healthy), 8, 10, range(1, 9), steps=steps) == []


def test_a_run_reports_its_doubts(domains: list[Node], runs: dict[str, str]) -> None:
    """No teacher passes a gate of .9999, so nothing is kept in any round."""
    kd3a = {"method": "kd3a", "kd3a.gate.low": 0.9999, "rounds": 3}
    results, events = run(domains, FAST | runs | kd3a)
    (training,) = results["trainings"]["kd3a"]
    kept = [d for d in training["doubts"] if d["what"] == "kept"]
    assert [d["round"] for d in kept] == [3] and "0.0 %" in kept[0]["text"]
    written = [e for e in events if e["event"] == "doubt" and e["what"] == "kept"]
    assert [(e["method"], e["seed"], e["round"]) for e in written] == [("kd3a", 0, 3)]
    assert all(1 <= entry["predicted"] <= 4 for entry in training["rounds"])
