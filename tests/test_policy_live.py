"""Sites with a policy and an audit log, over real processes, TLS and node keys."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedda.cli import app
from fedda.errors import Code
from fedda.ops import chain
from tests.federation import Federation, Run
from tests.local_grid import SMALL_SUMS
from tests.patience import PATIENCE
from tests.processes import leaving_nothing

pytestmark = pytest.mark.slow

SITES = ("anna", "bert", "carl", "town")
POLICY = """
[allow]
methods = ["fedavg", "fdann"]
[protect]
min-images = 2
[budget]
tests = 1
"""
SUMMED = {
    "method": "fdann",
    "rounds": 1,
    "train.batch-size": 16,
    "exchange.rejoin": 1.0,
    "run.evaluate": False,
} | SMALL_SUMS


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("policy")
    (folder / "policy.toml").write_text(POLICY)
    options = ["--min-examples", "1", "--policy", str(folder / "policy.toml")]
    hub = Federation(folder / "hub", client_options=dict.fromkeys(SITES, options))
    with leaving_nothing(hub) as made:
        yield made


@pytest.fixture(scope="module")
def averaged(hub: Federation) -> Run:
    """A run that averages models, in which the target's budget of tests gets spent."""
    run = hub.begin(
        "averaged", {"method": "fedavg", "rounds": 2, "wait.settle": 0.0, "wait.tries": 1}
    )
    run.finish()
    return run


@pytest.fixture(scope="module")
def summed(hub: Federation) -> Run:
    """A run that sums gradients."""
    run = hub.begin("summed", SUMMED | {"wait.settle": 0.0})
    run.finish()
    return run


def refused(hub: Federation, name: str, settings: Mapping[str, Any]) -> tuple[Run, str]:
    """Begin a run that sites refuse -> the run, and the sentence with which it ended."""
    run = hub.begin(name, {"wait.tries": 1, "wait.settle": 0.0} | dict(settings))
    state = hub.wait(run.id, PATIENCE)
    assert state.ending != "completed"
    (failed,) = run.find("failed")
    return run, failed["text"]


def log(state: Path, run: Path) -> Result:
    words = ["policy", "log", "--state-dir", str(state), "--verify", "--against", str(run)]
    return CliRunner().invoke(app, words)


def entries(hub: Federation, site: str, run: Run) -> list[chain.Entry]:
    found = chain.check(hub.directory / "state" / site / "audit.jsonl")
    assert not found.bad
    return [entry for entry in found.entries if entry.get("run") == run.folder.name]


def test_a_method_that_is_not_allowed_is_refused_and_the_run_says_why(hub: Federation) -> None:
    run, text = refused(hub, "other", {"method": "kd3a", "rounds": 1})
    assert Code.POLICY.public in text and "anna" in text
    assert "does not allow the method 'kd3a'" in hub.processes["anna"].text()
    assert "allow.methods" not in (run.folder / "journal.jsonl").read_text()
    events = [(entry["event"], entry.get("code")) for entry in entries(hub, "anna", run)]
    assert events == [("received", None), ("refused", "POLICY")]
    assert log(hub.directory / "state" / "anna", run.folder).exit_code == 0


def test_a_spent_budget_of_tests_stays_spent_after_a_restart(
    hub: Federation, averaged: Run
) -> None:
    failed = averaged.find("trouble", what="failed", site="town", text=Code.BUDGET.public)
    assert {event["round"] for event in failed} == {2}
    assert averaged.find("round", round=1)[0]["accuracy"] >= 0
    hub.processes["town"].stop()
    hub.start_site("town")
    hub.wait_for_sites()
    settings = {"method": "fedavg", "rounds": 1, "wait.settle": 0.0, "wait.tries": 1}
    again = hub.begin("again", settings)
    again.finish()
    assert again.find("trouble", what="failed", site="town", text=Code.BUDGET.public)
    assert "budget of 1 models to test is spent" in hub.processes["town"].text()


@pytest.mark.parametrize("which", ["averaged", "summed"])
def test_both_logs_hold_the_same_hashes(
    hub: Federation, which: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(which)
    server = chain.check(run.folder / "crossed.jsonl")
    assert not server.bad
    for site in SITES:
        mine = entries(hub, site, run)
        done = log(hub.directory / "state" / site, run.folder)
        assert done.exit_code == 0, done.output
        # Questions about what a site offers are in no run's record.
        sent = (e for e in mine if e["event"] != "joins" and e.get("kind") != "query")
        hashes = sorted(e["sha256"] for e in sent)
        assert hashes == sorted(e["sha256"] for e in server.entries if e["site"] == site)
        crossed = sum(e["event"] in ("received", "answered", "refused") for e in mine)
        assert f"{len(hashes)} payloads of {site} are in both" in done.output
        assert crossed >= 2
    (gradients,) = [e for e in entries(hub, "bert", run) if e["event"] == "summed"] or [{}]
    assert gradients.get("frames") == (4 if which == "summed" else None)
