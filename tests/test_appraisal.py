"""What a model is worth without labels, in whole runs: what is asked, reported and shown."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.site.request import Request
from fedda.errors import Code, WireError
from fedda.page.noted import Noted
from fedda.page.page import page
from fedda.results.worth import remarks, rows, worths
from fedda.wire import CALIBRATE
from server import appraised
from tests.local_grid import SOURCES, TESTED, Bench, Node, ScriptedGrid, run, stop_after
from tests.test_report import printed

LEARNS: dict[str, Any] = {"method": "fedavg", "rounds": 6, "train.lr": 0.05}


def only(results: dict[str, Any], method: str = "fedavg") -> dict[str, Any]:
    (training,) = results["trainings"][method]
    return training


def rewritten(node: Node, folder: Path, **arrays: Any) -> Node:
    """The site with arrays of its file replaced; None leaves one out."""
    with np.load(node["data"]) as file:
        kept = {n: a for n, a in {**file, **arrays}.items() if a is not None}
    path = folder / f"{node['name']}.npz"
    np.savez(path, **kept)
    return node | {"data": str(path)}


def calibrations(grid: ScriptedGrid) -> list[str]:
    return [c.site for c in grid.crossed if (c.way, c.hop) == ("to", "calibrate")]


@pytest.fixture
def results(domains: list[Node], runs: dict[str, str]) -> dict[str, Any]:
    return run(domains, runs | LEARNS)[0]


def test_a_training_says_what_its_model_is_worth(results: dict[str, Any]) -> None:
    training = only(results)
    assert training["final_accuracy"] == 1  # an easy target
    assert set(training["validators"]) == {"infomax", *appraised.VALIDATORS}
    assert training["validators"]["largest"] == 0.25  # four classes, equally many images
    assert training["validators"]["ami"] == 1
    estimate = training["estimate"]
    assert estimate["low"] <= estimate["accuracy"] <= estimate["high"] == 1
    assert estimate["accuracy"] > 0.9
    assert set(estimate["parts"]) == {"atc-confidence", "atc-entropy", "doc"}
    changed = training["refined"]["changed"]
    assert estimate["changed"] == changed
    assert estimate["accuracy"] == pytest.approx(estimate["parts"]["doc"] - changed)
    assert estimate["held_out"] and estimate["same_model"]
    assert {s: n["tested"] for s, n in estimate["sources"].items()} == dict.fromkeys(
        SOURCES, TESTED
    )
    assert 0 < training["calibration_error"] < 1
    assert not {"worth", "bnm", "ece", "estimate"} & set(training["rounds"][-1])


def test_only_the_last_round_calibrates_and_each_source_once(
    domains: list[Node], runs: dict[str, str]
) -> None:
    grid = ScriptedGrid(domains)
    results, _ = run(domains, runs | {"method": "fedavg", "rounds": 3}, grid=grid)
    assert calibrations(grid) == SOURCES
    training = only(results)
    model = training["rounds"][0]["bytes"]["to source model"]
    # The calibration is no part of a round, but its bytes are counted.
    assert [r["bytes"]["to source model"] for r in training["rounds"]] == [model] * 3
    assert training["bytes"]["to source model"] == 4 * model
    in_rounds = sum(sum(r["bytes"].values()) for r in training["rounds"])
    assert training["calibration_bytes"] == sum(training["bytes"].values()) - in_rounds > model
    text = printed(results)
    assert f"{training['calibration_bytes']:,}" in text and f"{round(in_rounds / 3):,}" in text
    shown = page(results, Noted())
    assert f"{training['calibration_bytes']:,}" in shown and f"{round(in_rounds / 3):,}" in shown


@pytest.mark.parametrize(("server_round", "part"), [(1, "source"), (2, "target")])
def test_a_source_calibrates_in_the_last_round_alone_and_a_target_never(
    domains: list[Node], server_round: int, part: str
) -> None:
    task = Bench(domains, "fedavg").task.flat()
    step = {"phase": "train", "hop": "calibrate"}
    allowed = Request.make(task, step | {"round": 2, "part": "source"}, {})
    assert allowed.contract is CALIBRATE and allowed.is_test
    with pytest.raises(WireError, match=f"asks no {part} for 'calibrate'"):
        Request.make(task, step | {"round": server_round, "part": part}, {})


def test_a_calibration_counts_as_a_test_in_a_sources_budget(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    policy = json.dumps({"budget": {"tests": 1}})
    own = {"policy": policy, "audited": True, "state-dir": str(tmp_path)}
    nodes = [n | own if n["name"] == "anna" else n for n in domains]
    results, _ = run(nodes, runs | LEARNS | {"run.seeds": "0,1"})
    first, second = (set(t["estimate"]["sources"]) for t in results["trainings"]["fedavg"])
    assert first == {"anna", "bert", "carl"} and second == {"bert", "carl"}
    assert {(e["site"], e["text"]) for e in results["events"]} == {("anna", Code.BUDGET.public)}


def test_a_target_without_labels_has_an_estimate_and_no_calibration_error(
    domains: list[Node], runs: dict[str, str], tmp_path: Path, results: dict[str, Any]
) -> None:
    blind = rewritten(domains[3], tmp_path, x_test=None, y_test=None)
    without, _ = run([*domains[:3], blind], runs | LEARNS | {"run.name": "blind"})
    ours, labelled = only(without), only(results)
    assert ours["final_accuracy"] is ours["calibration_error"] is None
    assert (ours["estimate"], ours["validators"]) == (labelled["estimate"], labelled["validators"])


def test_a_source_without_test_files_calibrates_on_what_it_trains_on_and_that_is_said(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    bare = rewritten(domains[0], tmp_path, x_test=None, y_test=None) | {"hold-out": 0}
    results, _ = run([bare, *domains[1:]], runs | LEARNS)
    estimate = only(results)["estimate"]
    assert [estimate["sources"][s]["held"] for s in SOURCES] == [0, 1, 1]
    assert estimate["sources"]["anna"]["tested"] == 40
    assert not estimate["held_out"]
    assert any(text.startswith("anna calibrated on images") for text in remarks(results))


def test_tests_that_are_the_training_images_are_not_held_out(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    with np.load(domains[0]["data"]) as file:
        same = rewritten(domains[0], tmp_path, x_test=file["x_train"], y_test=file["y_train"])
    results, _ = run([same, *domains[1:]], runs | LEARNS)
    assert only(results)["estimate"]["sources"]["anna"]["held"] == 0


def test_a_source_whose_policy_lets_no_tests_leave_is_left_out(
    domains: list[Node], runs: dict[str, str]
) -> None:
    policy = json.dumps({"leaving": {"tests": False}})
    nodes = [n | {"policy": policy} if n["name"] == "anna" else n for n in domains]
    results, _ = run(nodes, runs | LEARNS)
    assert set(only(results)["estimate"]["sources"]) == {"bert", "carl"}
    assert {(e["site"], e["text"]) for e in results["events"]} == {("anna", Code.POLICY.public)}


def test_without_any_source_there_are_validators_and_no_estimate(
    domains: list[Node], runs: dict[str, str]
) -> None:
    policy = json.dumps({"leaving": {"tests": False}})
    nodes = [n | {"policy": policy} if n["role"] == "source" else n for n in domains]
    training = only(run(nodes, runs | LEARNS)[0])
    assert training["estimate"] is None
    assert training["validators"]["bnm"] > 0


def test_where_the_adapted_model_stays_at_the_target_the_estimate_says_so(
    domains: list[Node], runs: dict[str, str]
) -> None:
    stays, _ = run(domains, runs | {"method": "dils", "dils.share": False})
    rough = only(stays, "dils")["estimate"]
    assert not rough["same_model"] and rough["changed"] is None
    assert rough["accuracy"] == pytest.approx(sum(rough["parts"].values()) / 3)
    assert set(only(stays, "dils")["estimate"]["sources"]) == {"anna"}  # the collaborator
    assert any(text.startswith("DILS: the target predicts") for text in remarks(stays))
    shares, _ = run(domains, runs | {"method": "dils", "run.name": "shares"})
    assert only(shares, "dils")["estimate"]["same_model"]


def test_a_source_cannot_claim_more_than_a_number_can_be() -> None:
    claims = {"accuracy": 7.0, "confidence": -1.0, "threshold-entropy": 1e30, "tested": 24}
    assert appraised.plausible({"anna": claims}) == {
        "anna": {"accuracy": 1, "confidence": 0, "threshold-entropy": 16, "tested": 24}
    }


def test_a_run_without_tests_asks_no_source(domains: list[Node], runs: dict[str, str]) -> None:
    grid = ScriptedGrid(domains)
    results, _ = run(domains, runs | LEARNS | {"run.evaluate": False}, grid=grid)
    assert calibrations(grid) == []
    assert only(results)["validators"] == {} and only(results)["estimate"] is None
    assert rows(results)[1] == [] and remarks(results) == []
    assert 'id="worth"' not in page(results, Noted())


def test_a_resumed_run_says_the_same(
    domains: list[Node], runs: dict[str, str], results: dict[str, Any]
) -> None:
    flat = runs | LEARNS | {"run.name": "cut"}
    with pytest.raises(KeyboardInterrupt):
        run(domains, flat, stop_after(6))
    grid = ScriptedGrid(domains)
    resumed, _ = run(domains, flat | {"run.resume": True}, grid=grid)
    assert calibrations(grid) == []  # the checkpoint has what was said
    for key in ("validators", "estimate", "calibration_error"):
        assert only(resumed)[key] == only(results)[key]


def test_numbers_leave_coarse_and_with_noise_if_a_site_wants_it(
    domains: list[Node], runs: dict[str, str], results: dict[str, Any]
) -> None:
    nodes = [n | {"test-noise": 0.2} for n in domains]
    noised, _ = run(nodes, runs | LEARNS | {"run.name": "noised"})
    for of_run in (results, noised):
        training = only(of_run)
        said = [*training["validators"].values()]
        said += [
            value
            for numbers in training["estimate"]["sources"].values()
            for name, value in numbers.items()
            if name not in ("tested", "held", "accuracy")
        ]
        assert all(value == round(value, 2) for value in said)
    assert only(noised)["estimate"]["sources"] != only(results)["estimate"]["sources"]


# ---- how it is shown ---------------------------------------------------------------------------


def test_terminal_and_page_show_estimate_validators_and_accuracy(results: dict[str, Any]) -> None:
    (known,) = worths(results)
    head, (row,) = rows(results)
    shown = dict(zip(head, row, strict=True))
    estimate = only(results)["estimate"]
    low, high = (f"{100 * estimate[key]:.0f}" for key in ("low", "high"))
    assert known.estimated() == f"{100 * estimate['accuracy']:.1f} [{low}, {high}]"
    assert shown["estimate in %"] == known.estimated()
    assert shown["accuracy in %"] == "100.0"
    assert shown["ClassAMI"] == "1.00" and shown["largest class"] == "25 %"
    assert "what the models are worth, without labels" in printed(results)
    text = page(results, Noted())
    assert 'id="worth"' in text and known.estimated() in text


def test_worth_is_a_mean_over_seeds_by_target(results: dict[str, Any]) -> None:
    first = only(results)
    other = {
        **first,
        "seed": 1,
        "final_accuracy": None,
        "calibration_error": None,
        "validators": {**first["validators"], "bnm": first["validators"]["bnm"] + 0.2},
        "estimate": {**first["estimate"], "accuracy": first["estimate"]["accuracy"] - 0.2},
    }
    (known,) = worths(results | {"trainings": {"fedavg": [first, other]}})
    assert known.accuracy == 1  # of the one that was tested
    assert known.estimate == pytest.approx(first["estimate"]["accuracy"] - 0.1)
    assert known.validators["bnm"] == pytest.approx(first["validators"]["bnm"] + 0.1)


def test_results_of_an_earlier_version_show_nothing(results: dict[str, Any]) -> None:
    old = {k: v for k, v in only(results).items() if k not in appraised.NOTHING}
    assert rows(results | {"trainings": {"fedavg": [old]}})[1] == []
