"""Methods that sum gradients within a round, over real processes, TLS and node keys."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.federation import Federation, final_model, rounds
from tests.local_grid import SMALL_SUMS
from tests.patience import FACTOR, PATIENCE
from tests.processes import wait_for_act

pytestmark = pytest.mark.slow

SUMMED = SMALL_SUMS | {"exchange.rejoin": 1.0}
DILS = SUMMED | {
    "method": "dils",
    "rounds": 3,
    "dils.collaborator": "bert",
    "dils.pretrain": 1,
    "dils.epochs": 1,
    "dils.discriminator.sizes": "8",
    "train.batch-size": 16,
}

FRUDA = SUMMED | {
    "method": "fruda",
    "rounds": 4,
    "fruda.pretrain": 1,
    "fruda.epochs": 1,
    "fruda.discriminator.sizes": "8",
    "fruda.measure.steps": 10,
    "train.batch-size": 16,
}


def state_of(state: Path, name: str, site: str) -> dict[str, Any]:
    return load_file(state / site / f"{name}.dils-0.3.method.safetensors")


def same(hub: Federation, name: str, results: dict[str, Any], alone: dict[str, Any]) -> bool:
    """Check the server's model -> whether both sites have the same state as without a network."""
    assert final_model(results, "dils") == final_model(alone, "dils")
    for site in ("bert", "town"):
        live = state_of(hub.directory / "state" / site, name, site)
        here = state_of(hub.directory / "alone" / name, name, site)
        assert live.keys() == here.keys()
        if not all(live[tensor].equal(here[tensor]) for tensor in here):
            return False
    return True


def test_a_site_that_dies_within_an_exchange_is_waited_for_and_nothing_is_lost(
    hub: Federation,
) -> None:
    """Two processes compute the same as one, and what they exchange is counted."""
    hub.act("bert", {"3": ["hold", 0]})
    near = {"exchange.join": PATIENCE, "wait.train": 5.0 * FACTOR, "wait.tries": 20}
    run = hub.begin("broken", DILS | near)
    wait_for_act(hub, run.folder, "bert", "hold in round 3")
    hub.kill("bert")
    hub.act("bert", {})
    paused = run.wait_for("trouble", what="paused", round=3)
    assert "bert" in paused["text"] or "collaborator" in paused["text"]
    hub.revive("bert")
    results = run.finish()
    alone = hub.alone("broken", DILS)
    assert same(hub, "broken", results, alone)
    assert run.find("trouble", what="silent", site="bert")
    assert run.find("trouble", what="exchange ended")  # town gets this and stops computing
    now, then = (rounds(r, "dils") for r in (results, alone))
    for number, syncs in ((1, 0), (2, 4)):
        gradients = [k for k in now[number]["bytes"] if k.endswith("gradient")]
        assert len(gradients) == syncs
        values = syncs * (64 * 8 + 8 + 8 + 1) * 4  # 4 bytes per value
        for key in gradients:
            assert values < now[number]["bytes"][key] < values + 1500
            # Only the greetings differ.
            assert abs(now[number]["bytes"][key] - then[number]["bytes"][key]) < 300
    assert "BEGIN CERTIFICATE" not in (run.folder / "journal.jsonl").read_text()


@pytest.mark.nightly("fedda/exchange")
def test_a_site_that_is_restarted_within_an_exchange_keeps_nobody_waiting(hub: Federation) -> None:
    """Every deadline that could end the wait is far away."""
    far = {"exchange.join": 900.0, "exchange.rejoin": 900.0, "wait.train": 3600.0}
    hub.act("bert", {"3": ["hold", 0]})
    run = hub.begin("restarted", DILS | far | {"exchange.wait": 900.0, "wait.settle": 30.0})
    wait_for_act(hub, run.folder, "bert", "hold in round 3")
    hub.kill("bert")
    hub.act("bert", {})
    hub.revive("bert")
    results = run.finish()
    assert same(hub, "restarted", results, hub.alone("restarted", DILS))
    (ended,) = run.find("trouble", what="exchange ended")
    assert ended["text"].startswith("bert stopped before its last sync")


@pytest.mark.nightly("fedda/exchange")
def test_fruda_measures_all_candidates_at_once_and_chooses_as_in_one_process(
    hub: Federation,
) -> None:
    results = hub.begin("chosen", FRUDA).finish()
    assert results["events"] == []
    (training,) = results["trainings"]["fruda"]
    (alone,) = hub.alone("chosen", FRUDA)["trainings"]["fruda"]
    assert training["selection"] == alone["selection"]
    assert [row["name"] for row in training["selection"]["candidates"]] == ["anna", "bert", "carl"]
    assert "after" in training["selection"]
    assert Path(training["model"]).read_bytes() == Path(alone["model"]).read_bytes()
    measured = training["rounds"][1]["bytes"]
    to_each = measured["from target gradient"], measured["from source gradient"]
    assert abs(to_each[0] - to_each[1]) < 300  # one gradient per candidate; the greetings differ
