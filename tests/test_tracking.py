"""Curves: the results' numbers, one point per round after any stops, and no harm to a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clients.site.memory import resident
from fedda.settings import RunConfig
from server import journal as tracked
from server import run as server_run
from server.journal import Event, Journal, Listener
from tests.local_grid import FAST, Node, ScriptedGrid, stop_after

Curves = dict[str, list[tuple[int, float]]]


def curves(folder: Path) -> Curves:
    """Return what TensorBoard shows: each curve's steps and values."""
    shown = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(point.step, point.value) for point in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


def expected(training: dict[str, Any]) -> Curves:
    """Return the same curves, made from results.json without the code under test."""
    points: Curves = {}
    for entry in training["rounds"]:
        for key, value in entry.items():
            if key in ("round", "answers"):
                continue
            inner = value.items() if isinstance(value, dict) else [("", value)]
            for name, number in inner:
                tag = f"{key}/{name.replace(' ', '-')}".rstrip("/")
                points.setdefault(tag, []).append((entry["round"], number))
    last = training["rounds"][-1]["round"]
    points["final/accuracy"] = [(last, training["final_accuracy"])]
    points["final/selected-accuracy"] = [(last, training["selected_accuracy"])]
    points["final/selected-round"] = [(last, training["selected_round"])]
    points["final/seconds"] = [(last, training["seconds"])]
    points["final/bytes"] = [(last, sum(training["bytes"].values()))]
    points["final/refined-accuracy"] = [(last, training["refined"]["accuracy"])]
    return points


def same(found: Curves, wanted: Curves) -> None:
    assert set(found) == set(wanted)
    # A checkpoint cannot hold its own writing time: only the journal has that of every round.
    checkpoints = [step for step, _ in found.pop("phases/checkpoint")]
    assert checkpoints == [step for step, _ in wanted["loss"]]
    wanted.pop("phases/checkpoint")
    for tag, points in wanted.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        values = [value for _, value in points]
        assert [value for _, value in found[tag]] == pytest.approx(values, rel=1e-6), tag


def run(
    domains: list[Node], settings: dict[str, Any], *listeners: Listener
) -> tuple[dict[str, Any], list[Event]]:
    """Perform a whole run with a journal on disk, as real runs do."""
    resident.cache_clear()
    events: list[Event] = []
    config = RunConfig.parse(FAST | settings)
    path = Path(config.run.dir) / config.run.name / "journal.jsonl"
    journal = Journal(path, events.append, *listeners)
    return server_run.execute(config, ScriptedGrid(domains), journal), events


def stopped(domains: list[Node], settings: dict[str, Any], server_round: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, stop_after(server_round))


def test_every_number_of_a_round_has_a_name() -> None:
    entry = {"event": "round", "time": 1.5, "method": "kd3a", "seed": 3, "round": 2}
    entry |= {"loss": 0.5, "kept": 1, "sure": True, "note": "text", "gate": [0.1, 0.2]}
    entry |= {"weights": {"anna": 0.25}, "bytes": {"to source model": 8}}
    entry |= {"phases": {"train": 2.0, "deep": {"er": 3}}}
    wanted = {"loss": 0.5, "kept": 1.0, "gate/0": 0.1, "gate/1": 0.2, "weights/anna": 0.25}
    wanted |= {"bytes/to-source-model": 8.0, "phases/train": 2.0, "phases/deep/er": 3.0}
    assert dict(tracked.numbers(entry)) == wanted


def test_tensorboard_shows_what_the_results_say(domains: list[Node], runs: dict[str, str]) -> None:
    results, events = run(domains, runs | {"run.baseline": "fedavg", "kd3a.mixup": 0.125})
    folder = Path(runs["run.dir"]) / "run"
    for method in ("fedavg", "kd3a"):
        same(curves(folder / f"{method}-0"), expected(results["trainings"][method][0]))
    shown = EventAccumulator(str(folder / "kd3a-0")).Reload()
    times = [e["time"] for e in events if e["event"] == "round" and e["method"] == "kd3a"]
    assert [point.wall_time for point in shown.Scalars("loss")] == times
    (settings,) = shown.Tensors("settings/text_summary")
    text = settings.tensor_proto.string_val[0].decode()
    assert "| kd3a.mixup | 0.125 |" in text and "| seed | 0 |" in text
    assert "fedprox" not in text and "run.dir" not in text and "wait." not in text


def test_a_resumed_run_goes_on_with_its_curves(domains: list[Node], runs: dict[str, str]) -> None:
    """The run stops twice, each time before its trackers get the last round."""
    settings = {**runs, "rounds": 4}
    stopped(domains, settings, 1)
    folder = Path(runs["run.dir"]) / "run" / "kd3a-0"
    assert "loss" not in curves(folder)
    stopped(domains, settings | {"run.resume": True}, 3)
    assert [step for step, _ in curves(folder)["loss"]] == [1, 2]
    results, _ = run(domains, settings | {"run.resume": True})
    same(curves(folder), expected(results["trainings"]["kd3a"][0]))
    times = [p.wall_time for p in EventAccumulator(str(folder)).Reload().Scalars("loss")]
    lines = (folder.parent / "journal.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
    assert times == [event["time"] for event in rounds] and len(times) == 4


@pytest.mark.parametrize("what", ["_begin", "_add", "_end"])
def test_curves_that_fail_are_reported_in_one_line_and_the_run_goes_on(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space\nleft on device")

    monkeypatch.setattr(tracked.Curves, what, fails)
    results, events = run(domains, runs | {"run.baseline": "fedavg"})
    assert [len(t["rounds"]) for ts in results["trainings"].values() for t in ts] == [2, 2]
    (text,) = [e["text"] for e in events if e["event"] == "trouble"]
    assert len(results["events"]) == 1 and "\n" not in text
    assert "No space left on device" in text and "training goes on" in text
