"""`run.patience`: a training ends when its evidence without labels rises no more.

Over which rounds it counts is checked by hand; whole runs show that it ends, resumes and says so,
that it ends with a proper last round, and that no label of the target has a part in it.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from clients import fedavg
from clients.site.request import Request
from fedda import plugins
from fedda.errors import ConfigError, QuorumError, WireError
from fedda.results import diagnostics, sofar, terminal
from fedda.results.diagnostics import collapse, last_round, sentence
from fedda.results.read import summary
from fedda.results.story import tell
from fedda.settings import RunConfig, Task
from fedda.wire import Part, Rule
from tests.local_grid import Node, ScriptedGrid, run, stop_after
from tests.test_run import Untestable

STILL = {"train.lr": 1e-9, "rounds": 8, "run.patience": 2}  # no round changes any answer


class LastLost(Untestable):
    """A grid whose target answers three requests to test, and then is away."""

    def __init__(self, domains: list[Node]) -> None:
        super().__init__(domains, 0, away=True)
        self.left = 3

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            target = reply.metadata.src_node_id == self.id_of("town")
            if reply.metadata.message_type == "evaluate" and target:
                self.left -= 1
                self.lost = int(self.left == 0)  # the next one
            yield reply


def task(schedule: str = "train 9", method: str = "fedavg") -> Task:
    """A training of nine rounds."""
    about = {"method": method, "rounds": 9, "schedule": schedule}
    return Task(**about, options=plugins.method(method).config())


def entries(*values: float | None, first: int = 1) -> list[dict[str, Any]]:
    """Rounds with an infomax each; None: no test came back."""
    return [
        {"round": r} | ({} if value is None else {"infomax": value})
        for r, value in enumerate(values, first)
    ]


@pytest.mark.parametrize(
    ("values", "patience", "last"),
    [
        ((0.1, 0.2, 0.2, 0.2), 0, 9),  # off
        ((0.1, 0.2, 0.2), 2, 9),  # one test without a rise so far
        ((0.1, 0.2, 0.2, 0.1), 2, 5),  # equal is no rise; one round more is the last
        ((0.1, 0.2, 0.2, 0.3, 0.3), 2, 9),  # a rise begins the count anew
        ((0.2, None, 0.1, None, None, 0.1), 2, 7),  # rounds without a test do not count
        ((None, None, None), 1, 9),  # nor does it end where nothing is known
        ((0.2, 0.1, 0.3, 0.4), 1, 3),  # what came after the end changes nothing
        ((0.1,) * 9, 8, 9),  # runs out in the last planned round
        ((0.1, math.nan, 0.2, math.nan, math.nan), 2, 6),  # what is no number is no rise
        ((math.nan, math.nan), 2, 3),
    ],
)
def test_the_last_round_follows_from_the_rounds_so_far(
    values: tuple[float | None, ...], patience: int, last: int
) -> None:
    assert last_round(task(), patience, entries(*values)) == last
    assert bool(sentence(task(), patience, last)) == (last < 9)


def test_only_the_last_phase_counts() -> None:
    chained = task("pretrain 5, select 1, adapt 3", "fruda")
    assert last_round(chained, 1, entries(0.9, 0.1, 0.1, 0.1, 0.1, 0.1)) == 9
    assert last_round(chained, 1, entries(0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2)) == 9
    assert last_round(chained, 1, entries(*(0.9,) * 6, 0.2, 0.2)) == 9


@pytest.mark.parametrize(
    ("classes", "infomax", "collapsed"),
    [
        ((10, 9, 2, 2, 1), (0.9, 1.0, 0.3, 0.3, 0.1), True),
        ((10, 9, 2, 2, 3), (0.9, 1.0, 0.3, 0.3, 0.1), False),  # three of ten are no collapse
        ((10, 9, 9, 2, 1), (0.9, 1.0, 0.9, 0.3, 0.1), False),  # two tests in a row are too few
        ((10, 9, 2, 2, 2), (0.9, 1.0, 0.6, 0.6, 0.6), False),  # few classes, but sure answers
        ((1, 1, 1, 1, 1), (0.9, 0.1, 0.1, 0.1, 0.1), False),  # it never knew more than one
        ((2, 2, 1, 1, 1), (0.6, 0.5, 0.1, 0.1, 0.1), True),
        ((10, 1, 1, 1), (0.9, 0.1, 0.1, 0.1), True),
        ((1, 1, 1, 10), (0.1, 0.1, 0.1, 0.9), False),
    ],
)
def test_a_collapse_is_seen_in_the_target_s_answers(
    classes: tuple[int, ...], infomax: tuple[float, ...], collapsed: bool
) -> None:
    seen = [e | {"predicted": c} for e, c in zip(entries(*infomax), classes, strict=True)]
    text = collapse(task(), seen)
    assert bool(text) == collapsed
    assert not collapsed or f"{classes[-1]} of the {max(classes)} classes" in text
    untested = [{"round": r} for r in range(len(seen) + 1, len(seen) + 3)]
    assert collapse(task(), seen + untested) == text  # rounds without a test say nothing


# ---- whole runs --------------------------------------------------------------------------------


def rounds(results: dict[str, Any], method: str) -> list[int]:
    """The rounds of the first training of a method."""
    return [entry["round"] for entry in results["trainings"][method][0]["rounds"]]


def test_a_run_without_progress_ends_with_a_last_round_and_says_why(
    domains: list[Node], runs: dict[str, str]
) -> None:
    results, events = run(domains, runs | STILL | {"method": "fedavg"})
    (training,) = results["trainings"]["fedavg"]
    assert rounds(results, "fedavg") == [1, 2, 3, 4]
    assert training["refined"] is not None  # a whole last round
    assert training["stopped"].startswith("it ends after round 4 of 8, as the target's infomax")
    (said,) = (e for e in events if e["event"] == "ending")
    assert (said["round"], said["last"], said["text"]) == (3, 4, training["stopped"])
    assert training["stopped"] in "".join(map(str, terminal._notes(summary(results), results)))
    story = tell(events, {"method": "fedavg", "run.seeds": "0", "rounds": 8})
    assert (story.round, story.rounds) == (4, 4)
    so_far = sofar.results(story, "run", {"method": "fedavg"}, {}, {})
    assert so_far["trainings"]["fedavg"][0]["stopped"] == training["stopped"]


@pytest.mark.parametrize("stopped", [2, 3])  # while it counts, and between count and last round
def test_a_resumed_run_counts_on(domains: list[Node], runs: dict[str, str], stopped: int) -> None:
    settings = runs | STILL | {"method": "fedavg"}
    whole, _ = run(domains, settings | {"run.name": "whole"})
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, stop_after(stopped))
    resumed, events = run(domains, settings | {"run.resume": True})
    assert [e["round"] for e in events if e["event"] == "round"] == [*range(stopped + 1, 5)]
    assert rounds(resumed, "fedavg") == rounds(whole, "fedavg")
    assert resumed["final_accuracy"] == whole["final_accuracy"]
    again, events = run(domains, settings | {"run.resume": True})
    assert not [e for e in events if e["event"] == "round"]  # it has ended
    assert again["trainings"]["fedavg"][0]["stopped"] == whole["trainings"]["fedavg"][0]["stopped"]


def test_a_lost_test_of_an_early_last_round_is_made_up_for(
    domains: list[Node], runs: dict[str, str]
) -> None:
    settings = runs | STILL | {"method": "fedavg"}
    lost, _ = run(domains, settings, grid=LastLost(domains))
    assert rounds(lost, "fedavg") == [1, 2, 3, 4] and lost["final_accuracy"] is None
    made_up, _ = run(domains, settings | {"run.resume": True})
    whole, _ = run(domains, settings | {"run.name": "whole"})
    (training,) = made_up["trainings"]["fedavg"]
    assert training["refined"] == whole["trainings"]["fedavg"][0]["refined"]
    assert made_up["final_accuracy"] == whole["final_accuracy"] and made_up["untested"] == []


def test_the_targets_labels_have_no_part_in_it(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    """With wrong labels, and with none, it ends in the same round with the same evidence."""
    found = []
    for name in ("right", "wrong", "none"):
        nodes = [dict(node) for node in domains]
        (town,) = (node for node in nodes if node["name"] == "town")
        with np.load(town["data"]) as file:
            arrays = dict(file)
        if name == "wrong":
            arrays["y_test"] = (arrays["y_test"] + 1) % 4
        if name == "none":
            del arrays["x_test"], arrays["y_test"]
        town["data"] = str(tmp_path / f"{name}.npz")
        np.savez(town["data"], **arrays)
        quick = {"method": "fedavg", "rounds": 25, "train.lr": 0.3, "run.patience": 2}
        settings = runs | quick | {"run.name": name}
        results, _ = run(nodes, settings)
        history = results["trainings"]["fedavg"][0]["rounds"]
        found.append([entry["infomax"] for entry in history])
        if name != "right":
            assert ("accuracy" in history[-1]) == (name == "wrong")
    assert found[0] == found[1] == found[2]
    assert 4 < len(found[0]) < 25


@pytest.mark.slow
def test_fruda_measures_in_an_early_last_round(domains: list[Node], runs: dict[str, str]) -> None:
    settings = runs | STILL | {"method": "fruda", "fruda.pretrain": 3, "rounds": 10}
    results, events = run(domains, settings)
    assert rounds(results, "fruda") == [*range(1, 9)]  # of the last phase, which begins with 5
    assert "after" in results["trainings"]["fruda"][0]["selection"]
    assert [e["event"] for e in events].count("adapted") == 1


def test_only_the_last_round_of_such_a_training_is_named_final(
    domains: list[Node], runs: dict[str, str]
) -> None:
    grid = ScriptedGrid(domains)
    run(domains, runs | STILL | {"method": "fedavg"}, grid=grid)
    steps = [dict(m.content["step"]) for m in grid.requests if "step" in m.content]
    assert {int(str(s["round"])) for s in steps if "final" in s} == {4}
    assert all(s.get("final") is True for s in steps if s["round"] == 4)


@pytest.mark.parametrize("claim", [False, 1, "yes"])
def test_a_site_refuses_another_claim(domains: list[Node], claim: Any) -> None:
    step = {"round": 1, "phase": "train", "hop": "train", "part": "source", "final": claim}
    with pytest.raises(WireError, match="final by true"):
        Request.make(task().flat(), step, {})


def test_only_a_round_of_the_last_phase_can_be_final() -> None:
    chained = task("pretrain 5, select 1, adapt 3", "fruda").flat()
    step = {"hop": "test", "part": "target", "final": True}
    assert Request.make(chained, step | {"round": 7, "phase": "adapt"}, {}).is_last
    with pytest.raises(WireError, match="Round 1 is final, but not of the training's last phase"):
        Request.make(chained, step | {"round": 1, "phase": "pretrain"}, {})


# ---- settings ----------------------------------------------------------------------------------


def test_patience_without_evidence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"set run\.evaluate to true"):
        RunConfig.parse({"run.patience": 3, "run.evaluate": False})
    for method in plugins.own_methods():
        RunConfig.parse({"run.patience": 3, "method": method})
    usual = plugins.method("kd3a")
    untold = replace(usual.phases[-1], test=Part(leaves=Rule(numbers=frozenset({"loss"}))))
    blind = replace(usual, phases=(untold,))
    known = {name: plugins.method(name) for name in plugins.own_methods()} | {"kd3a": blind}
    monkeypatch.setattr(plugins, "method", known.__getitem__)
    with pytest.raises(ConfigError, match="kd3a's tests say no infomax"):
        RunConfig.parse({"run.patience": 3, "method": "kd3a"})


# ---- going back --------------------------------------------------------------------------------


def test_a_collapsed_training_goes_back_to_its_best_round(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = lambda task, history: "it has collapsed" * (len(history) == 4)  # noqa: E731
    monkeypatch.setattr(diagnostics, "collapse", ending)
    results, events = run(domains, runs | {"method": "kd3a", "rounds": 6})
    (training,) = results["trainings"]["kd3a"]
    assert rounds(results, "kd3a") == [1, 2, 3, 4]
    best, last = training["selected_round"], training["rounds"][-1]
    assert last["returned"] == best
    assert training["final_accuracy"] == training["rounds"][best - 1]["accuracy"]
    assert "changed" in (training["refined"] or {})  # a whole last round, with its last step
    assert f"went back to round {best}'s model" in training["stopped"]
    (said,) = (e for e in events if e["event"] == "ending")
    assert said["text"] == f"it has collapsed; it ends, with the model of round {best}"
    again, events = run(domains, runs | {"method": "kd3a", "rounds": 6, "run.resume": True})
    assert not [e for e in events if e["event"] == "round"]  # it has ended
    assert again["final_accuracy"] == training["final_accuracy"]


def test_a_diverged_training_goes_back_too(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = fedavg.Source.train

    def diverging(source: fedavg.Source) -> Any:
        return train(source) | ({"loss": math.nan} if source.request.round > 2 else {})

    monkeypatch.setattr(fedavg.Source, "train", diverging)
    settings = runs | {"method": "fedavg", "rounds": 5, "wait.tries": 1, "wait.sites": 1.0}
    results, events = run(domains, settings)
    (training,) = results["trainings"]["fedavg"]
    assert training["rounds"][-1]["returned"] == training["selected_round"]
    (said,) = (e for e in events if e["event"] == "ending")
    assert said["text"].startswith("the training has diverged: the site's training gave values")


def test_without_an_earlier_round_a_divergence_is_an_error(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedavg.Source, "train", lambda source: {"loss": math.nan, "steps": 1})
    with pytest.raises(QuorumError, match="not finite"):
        run(domains, runs | {"method": "fedavg", "wait.tries": 1, "wait.sites": 1.0})


def test_without_a_best_round_of_its_phase_a_training_goes_on(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best round of an earlier phase is no way back, and its file is not there any more."""
    select = diagnostics.selected
    first = lambda best, tested, number: select(best, tested, number) if number == 1 else {}  # noqa: E731
    monkeypatch.setattr(diagnostics, "selected", first)
    after = lambda task, history: "it has collapsed" * (len(history) > 1)  # noqa: E731
    monkeypatch.setattr(diagnostics, "collapse", after)
    results, events = run(domains, runs | {"method": "fedavg", "rounds": 3, "run.refine": "none"})
    assert rounds(results, "fedavg") == [1, 2, 3]
    assert not [e for e in events if e["event"] == "ending"]
