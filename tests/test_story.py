"""A run's story: what a journal says so far, read in pieces, and in the form of results."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedda.results import sofar
from fedda.results.progress import Display
from fedda.results.story import JournalReader, tell

SETTINGS = {"method": "kd3a", "run.baseline": "fedavg", "run.seeds": "0,1", "rounds": 4}


def events() -> list[dict[str, Any]]:
    """A run of FedAvg and KD3A with two seeds, in the first training's third round."""

    def a_round(number: int, seconds: float) -> dict[str, Any]:
        about = {"event": "round", "time": 20.0 + number, "method": "fedavg", "seed": 0}
        numbers = {"loss": 2.0 / number, "accuracy": 0.2 * number, "seconds": seconds}
        sent = {"to source model": 1000, "from source model": 900}
        return {**about, "round": number, **numbers, "weights": {"a": 1.0}, "bytes": sent}

    return [
        {"event": "started", "time": 10.0, "run": 7},
        {"event": "joined", "time": 11.0, "site": "a", "role": "source", "text": "a: source"},
        {"event": "waiting", "time": 11.5, "sources": 1, "targets": 0, "enough": False},
        {"event": "waiting-for", "time": 15.0, "sites": ["t"], "seconds": 4.0},
        {"event": "joined", "time": 16.0, "site": "t", "role": "target", "text": "t: target"},
        {"event": "roster", "time": 17.0, "sites": [], "shape": [1, 8, 8], "targets": ["t"]},
        {"event": "training", "time": 18.0, "method": "fedavg", "seed": 0, "round": 0, "rounds": 4},
        a_round(1, 3.0),
        {"event": "trouble", "time": 21.5, "what": "silent", "site": "a", "text": "x", "round": 2},
        {"event": "doubt", "time": 21.6, "method": "fedavg", "seed": 0, "round": 1, "text": "hm"},
        a_round(2, 5.0),
    ]


def test_a_story_tells_how_far_a_run_is() -> None:
    story = tell(events(), SETTINGS)
    assert story.state == "training" and not story.ended
    assert story.joined == {"a": "source", "t": "target"}
    assert (story.round, story.rounds, story.place) == (2, 4, (1, 4))
    assert story.bytes() == {"to source model": 2000, "from source model": 1800}
    assert story.newest["accuracy"] == 0.4
    # 2 rounds of this training and 4 of each of three others, at (3 + 5) / 2 seconds each
    assert story.left == (2 + 3 * 4) * 4.0
    assert story.per_round == 4.0
    assert [t["text"] for t in story.troubles] == ["x"]


def test_a_story_says_for_whom_the_run_waits() -> None:
    story = tell(events()[:4], SETTINGS)
    assert (story.state, story.awaited, story.since) == ("waiting", ["t"], 11.0)
    assert story.left is None and story.newest == {} and story.place == (0, 0)
    assert tell(events()[:6], SETTINGS).awaited == []


@pytest.mark.parametrize(
    ("event", "state", "stopped"),
    [
        ({"event": "done", "results": "r"}, "done", False),
        ({"event": "failed", "error": "QuorumError", "text": "too few"}, "failed", False),
        ({"event": "failed", "error": "KeyboardInterrupt", "text": "stopped"}, "failed", True),
    ],
)
def test_a_story_says_how_the_run_ended(event: dict[str, Any], state: str, stopped: bool) -> None:
    story = tell([*events(), event], SETTINGS)
    assert (story.state, story.stopped, story.ended, story.left) == (state, stopped, True, None)
    again = tell([*events(), event, {"event": "started", "time": 99.0}], SETTINGS)
    assert not again.ended and again.why == ""


def test_a_resumed_training_forgets_rounds_after_its_checkpoint() -> None:
    resumed = {"event": "training", "method": "fedavg", "seed": 0, "round": 1, "rounds": 4}
    story = tell([*events(), resumed], SETTINGS)
    assert list(story.trainings["fedavg", 0, ""]) == [1] and story.round == 1


def test_a_site_that_joins_again_after_each_of_its_refusals_is_said_once() -> None:
    out = StringIO()
    display, joined = Display(console=Console(file=out, width=80)), events()[1]
    about = {"event": "trouble", "method": "fedavg", "seed": 0, "site": "a", "text": "spent"}
    for event in [joined] + [e for r in (2, 3, 4) for e in (about | {"round": r}, joined)]:
        display(event)
    lines = ["joined: a: source", "round 2: a: spent", "joined: a: source"]
    assert out.getvalue().splitlines() == lines


def test_the_terminal_and_the_page_estimate_the_same() -> None:
    display, story = Display(), tell(events())
    for event in events():
        display(event)
    assert display._story == story and story.left == 2 * 4.0


def test_a_journal_read_in_any_pieces_tells_the_same(tmp_path: Path) -> None:
    whole = "".join(json.dumps(event) + "\n" for event in events()).encode()
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    journal = JournalReader(tmp_path)
    for cut in range(0, len(whole), 37):
        journal = JournalReader(tmp_path)
        for part in (whole[:cut], whole):
            (tmp_path / "journal.jsonl").write_bytes(part)
            journal.look()
        assert journal.story == tell(events(), SETTINGS)
    (tmp_path / "journal.jsonl").write_bytes(whole[:60])  # begun anew
    assert journal.look().trainings == {}
    assert JournalReader(tmp_path / "absent").look().state == "starting"


def test_what_there_is_has_the_form_of_results() -> None:
    found = sofar.results(tell(events(), SETTINGS), "r", SETTINGS, {}, {})
    assert found["method"] == "fedavg"  # KD3A has no round to show yet
    assert found["sites"] == [{"name": "a", "role": "source"}, {"name": "t", "role": "target"}]
    (training,) = found["trainings"]["fedavg"]
    assert training["target"] == "t" and training["seconds"] == 8.0
    assert training["bytes"] == {"to source model": 2000, "from source model": 1800}
    assert training["doubts"] == [{"round": 1, "text": "hm"}]
    assert sofar.results(tell(events()[:7], SETTINGS), "r", SETTINGS, {}, {})["trainings"] == {}
