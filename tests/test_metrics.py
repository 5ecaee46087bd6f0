"""The metrics: what Prometheus reads is what the journal says, under a bounded set of labels."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from fedda.results.snapshot import RunNow, SiteNow, Snapshot
from fedda.results.story import Story, tell
from fedda.wire.packing import Kind
from server.watching.live import METRICS
from server.watching.metrics import metrics
from tests.test_story import SETTINGS, events
from tests.watched import client_of, run, serving, sites

__all__ = ["run"]  # a fixture

ROOT = Path(__file__).resolve().parent.parent
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """Read metrics as Prometheus does: values by name and labels."""
    every = [sample for family in parse(text) for sample in family.samples]
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in every}
    assert len(found) == len(every)
    return found


def told(snapshot: Snapshot, story: Story) -> Samples:
    return samples(metrics(snapshot, story).decode())


def test_metrics_say_what_the_journal_says(run: RunNow) -> None:
    found = told(sites(run), tell(events(), SETTINGS))
    method = (("method", "fedavg"),)
    assert found == {
        ("fedda_sites_registered", ()): 2,
        ("fedda_sites_reachable", ()): 1,
        ("fedda_sites_working", ()): 1,
        ("fedda_runs_going_on", ()): 1,
        ("fedda_run_info", (("method", "kd3a"), ("run", "r"))): 1,
        ("fedda_run_going_on", ()): 1,
        ("fedda_round", method): 2,
        ("fedda_rounds", method): 4,
        ("fedda_round_seconds", method): 4,
        ("fedda_newest_round_seconds", method): 5,
        ("fedda_left_seconds", ()): 56,
        ("fedda_accuracy", method): 0.4,
        ("fedda_training_loss", method): 1.0,
        ("fedda_bytes", (("direction", "to"), ("kind", "model"), ("role", "source"))): 2000,
        ("fedda_bytes", (("direction", "from"), ("kind", "model"), ("role", "source"))): 1800,
        ("fedda_troubles", (("what", "silent"),)): 1,
    }


def test_an_ended_run_has_no_seconds_left() -> None:
    last = events()[-1] | {"round": 3}
    run = RunNow(7, "r", "/r", "kd3a", "finished", "completed")
    found = told(Snapshot((), (run,)), tell([*events(), last, {"event": "done"}], SETTINGS))
    assert found["fedda_run_going_on", ()] == 0 and ("fedda_left_seconds", ()) not in found


def test_without_a_run_there_are_sites_only() -> None:
    found = told(Snapshot((SiteNow(1, "a", "source", True),)), Story())
    assert {name for name, _ in found} == {
        "fedda_sites_registered",
        "fedda_sites_reachable",
        "fedda_sites_working",
        "fedda_runs_going_on",
    }


def test_labels_take_few_values_whatever_sites_say(run: RunNow) -> None:
    odd: list[dict[str, Any]] = [
        {"event": "trouble", "what": f"what {i}", "site": f"site {i}", "text": "x"}
        for i in range(1000)
    ]
    spoilt = events()[-1] | {"round": 3, "bytes": {f"up role{i} kind{i}": 1 for i in range(1000)}}
    many = tuple(SiteNow(i, f"site {i}", "", True) for i in range(1000))
    snapshot = replace(sites(run), sites=many)
    found = told(snapshot, tell([*events(), *odd, spoilt], SETTINGS))
    assert len(found) < 30
    other = (("direction", "other"), ("kind", "other"), ("role", "other"))
    assert found["fedda_bytes", other] == 1000
    assert found["fedda_troubles", (("what", "other"),)] == 1000
    assert not [labels for _, labels in found if "site" in str(labels)]


@pytest.mark.parametrize("kind", [*Kind, "scalars"])
def test_bytes_of_every_kind_that_crosses_have_its_label(run: RunNow, kind: str) -> None:
    story = tell([*events(), events()[-1] | {"round": 3, "bytes": {f"from source {kind}": 9}}])
    bytes_of = {k: n for k, n in told(sites(run), story).items() if k[0] == "fedda_bytes"}
    own = (("direction", "from"), ("kind", str(kind)), ("role", "source"))
    assert bytes_of["fedda_bytes", own] == 9 + 1800 * (kind == "model")


def test_the_operators_port_serves_them(run: RunNow) -> None:
    with serving(lambda: sites(run)) as address, client_of(address) as client:
        answer = client.get(METRICS)
        assert isinstance(answer, httpx.Response)
        assert answer.headers["content-type"].startswith("text/plain")
        assert samples(answer.text)["fedda_round", (("method", "fedavg"),)] == 2


def test_the_board_shows_metrics_that_there_are(run: RunNow) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "fedda.json").read_text())
    asked = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    story = tell([*events(), events()[-1] | {"round": 3, "infomax": 1.0}], SETTINGS)
    there = {name for name, _ in told(sites(run), story)}
    named = {name for expr in asked for name in re.findall(r"fedda_\w+", expr)}
    assert named <= there and there - named <= {"fedda_run_info"}
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)
