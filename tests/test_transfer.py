"""Negative transfer, seen without labels: by hand, and in whole runs with `run.keep`."""

from pathlib import Path
from typing import Any

import pytest

from fedda.errors import ConfigError
from fedda.results import transfer
from fedda.settings import RunConfig
from server import run as server_run
from tests.local_grid import Node, run
from tests.test_report import printed

USUAL = {"infomax": 1.0, "bnm": 0.6, "snd": 0.5, "ami": 0.4, "largest": 0.3}
LEARNS: dict[str, Any] = {"rounds": 4, "train.lr": 0.05, "run.baseline": "fedavg"}


def training(estimate: float | None = 0.7, same: bool = True, **validators: float) -> dict:
    """A training's entry, with a few validators other than usual."""
    given = None if estimate is None else {"accuracy": estimate, "same_model": same}
    return {
        "seed": 0,
        "target": "town",
        "estimate": given,
        "validators": USUAL | validators,
        "rounds": [{"round": 4}],
    }


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (training(), False),
        (training(0.6), True),  # lower, and nothing speaks for it
        (training(0.69), False),  # a point is what rounding does
        (training(0.6, bnm=0.7), False),  # one rose, none fell
        (training(0.6, bnm=0.7, ami=0.3), True),  # one rose, one fell
        (training(0.6, snd=0.9), True),  # SND has no vote
        (training(0.8, infomax=0.5, bnm=0.5, snd=0.4, ami=0.3), False),  # all but the estimate
        (training(None, infomax=0.5, bnm=0.5), True),
        (training(None, infomax=0.5, snd=0.3), False),
        (training(None, infomax=0.5, bnm=0.5, ami=0.5), False),
        (training(0.1, same=False), False),  # an estimate of another model says nothing
        (training(0.9, largest=0.95), True),
    ],
)
def test_negative_transfer_by_hand(ours: dict[str, Any], expected: bool) -> None:
    assert transfer.negative(ours, training()) is expected
    assert (transfer.doubt(ours, training(), "FedAvg") is not None) is expected


def test_estimates_by_two_rules_are_not_compared() -> None:
    """One training took the last step, the other could not."""
    ours = training(0.6)
    ours["estimate"]["changed"] = 0.1
    assert not transfer.negative(ours, training())
    theirs = training()
    theirs["estimate"]["changed"] = 0.0
    assert transfer.negative(ours, theirs)


def test_a_source_only_model_that_has_collapsed_too_is_no_better() -> None:
    assert not transfer.negative(training(largest=0.95), training(largest=0.99))


def test_results_without_validators_are_never_worse() -> None:
    old = {"seed": 0, "target": "town", "rounds": [{"round": 4}]}
    assert not transfer.negative(old, training()) and not transfer.negative(training(0.1), old)


def test_the_doubt_names_its_evidence() -> None:
    found = transfer.doubt(training(0.6, infomax=0.5, largest=0.95), training(), "FedAvg")
    assert found is not None and (found.what, found.round) == ("transfer", 4)
    assert found.text.startswith("negative transfer: ")
    for piece in ("60.0 % against 70.0 %", "0.50 against 1.00", "95 % of the predictions"):
        assert piece in found.text
    assert "FedAvg's" in found.text and "BNM" not in found.text


# ---- runs --------------------------------------------------------------------------------------


def models(results: dict[str, Any], folder: Path) -> tuple[bytes, dict[str, bytes]]:
    """The run's own model, and those of its trainings by method."""
    own = (folder / results["name"] / "model.safetensors").read_bytes()
    return own, {m: Path(t[0]["model"]).read_bytes() for m, t in results["trainings"].items()}


@pytest.mark.parametrize("keep", ["last", "better"])
@pytest.mark.parametrize("worse", [False, True])
def test_a_run_keeps_the_model_that_looks_better(
    domains: list[Node],
    runs: dict[str, str],
    keep: str,
    worse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "negative", lambda ours, theirs: worse)
    settings = runs | LEARNS | {"method": "kd3a", "run.keep": keep, "run.name": "kept"}
    results, events = run(domains, settings)
    own, by_method = models(results, Path(runs["run.dir"]))
    taken = "fedavg" if worse and keep == "better" else "kd3a"
    assert own == by_method[taken] and by_method["kd3a"] != by_method["fedavg"]
    (ours,) = results["trainings"]["kd3a"]
    assert ours.get("kept") == (taken if keep == "better" else None)
    assert ("transfer" in {d["what"] for d in ours["doubts"]}) is worse
    assert ("transfer" in {e.get("what") for e in events}) is worse
    assert "kept" not in results["trainings"]["fedavg"][0]
    assert ("kept: FedAvg's model in place of" in printed(results)) is (taken == "fedavg")


def test_a_diverged_method_is_seen_and_its_model_is_not_kept(
    domains: list[Node], runs: dict[str, str]
) -> None:
    """DILS at a learning rate that ruins the target's encoder; nothing is faked here."""
    ruin = {"method": "dils", "dils.loss": "adda", "dils.lr": 0.3, "dils.pretrain": 3}
    ruin |= {"dils.share": False}
    settings = runs | LEARNS | ruin | {"rounds": 6, "run.keep": "better", "run.name": "ruined"}
    results, _ = run(domains, settings)
    (ours,), (base,) = (results["trainings"][m] for m in ("dils", "fedavg"))
    assert ours["final_accuracy"] < base["final_accuracy"]
    assert ours["kept"] == "fedavg"
    own, by_method = models(results, Path(runs["run.dir"]))
    assert own == by_method["fedavg"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "set it to fedavg"),
        ({"run.baseline": "adabn"}, "set it to fedavg"),
        ({"run.baseline": "fedavg", "run.evaluate": False}, "run.evaluate"),
    ],
)
def test_keeping_the_better_model_needs_one_to_compare_with(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.parse({"method": "kd3a", "run.keep": "better", **settings})


def test_an_adapting_baseline_is_not_source_only() -> None:
    for baseline, expected in (("fedavg", "fedavg"), ("adabn", ""), ("", "")):
        config = RunConfig.parse({"method": "kd3a", "run.baseline": baseline})
        assert server_run.source_only(config) == expected
