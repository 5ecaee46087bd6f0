"""Two studies at once on one server, over real processes, TLS and node keys.

anna's key is for heart; bert takes part in both; carl, whose key is for all, lists neither; the
target town takes part in both.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedda.cli import app
from fedda.errors import Code
from fedda.ops import certificate, chain, keys
from fedda.ops.bundle import stage
from tests.federation import Federation, Operator, Run
from tests.patience import PATIENCE
from tests.processes import leaving_nothing

pytestmark = pytest.mark.slow

POLICIES = {
    "anna": "[study.heart]",
    "bert": "[budget]\nrounds = 100\n[study.heart]\n[study.lungs.budget]\nrounds = 2",
    "carl": "[study.brain]",
    "town": "[study.heart]\n[study.lungs.leaving]\ntests = false\nlogs = true",
}
# Both runs wait for none that will not come: with these waits they would last for hours.
SETTINGS = {"method": "fedavg", "rounds": 2, "wait.settle": 3600.0, "wait.sites": 7200.0}
SETTINGS |= {"run.expect": 0, "wait.tries": 1}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("studies")
    options = {}
    for name, text in POLICIES.items():
        (folder / f"{name}.toml").write_text(text)
        options[name] = ["--policy", str(folder / f"{name}.toml")]
    hub = Federation(folder / "hub", client_options=options)
    certificate.init(hub.home, ["127.0.0.1"])
    keys.add(hub.home, "anna", studies=["heart"])
    with leaving_nothing(hub) as made:
        yield made


@pytest.fixture(scope="module")
def both(hub: Federation) -> dict[str, Run]:
    """A run of each study, of the same name, at the same time."""
    places = {"heart": hub.runs / "of-heart", "lungs": hub.runs / "of-lungs"}
    lasting = {"heart": {}, "lungs": {"run.evaluate": False}}
    found = {}
    for study, place in places.items():
        flat = SETTINGS | lasting[study] | {"run.study": study, "run.dir": str(place)}
        own = stage(hub.directory / f"app-{study}", study=study)
        begun = hub.begin("kd", flat, own)
        found[study] = Run(hub, place / "kd", begun.id, begun.flat)
    for run in found.values():
        run.finish()
    return found


def entries(hub: Federation, site: str) -> list[chain.Entry]:
    found = chain.check(hub.directory / "state" / site / "audit.jsonl")
    assert not found.bad
    return found.entries


def test_each_run_has_the_sites_that_consent_to_its_study(both: dict[str, Run]) -> None:
    for study, names in (("heart", ["anna", "bert", "town"]), ("lungs", ["bert", "town"])):
        results = json.loads((both[study].folder / "results.json").read_text())
        assert [site["name"] for site in results["sites"]] == names
        assert results["config"]["run.study"] == study
        assert both[study].find("started")[0]["study"] == study
        (refused,) = both[study].find("trouble")
        assert (refused["site"], refused["text"]) == ("carl", Code.STUDY.public)


def test_a_site_s_log_and_files_keep_its_studies_apart(
    hub: Federation, both: dict[str, Run]
) -> None:
    assert {e["study"] for e in entries(hub, "anna") if "study" in e} == {"heart"}
    bert = [
        e for e in entries(hub, "bert") if e.get("kind") == "train" and e["event"] == "answered"
    ]
    assert sorted(e["study"] for e in bert) == ["heart"] * 2 + ["lungs"] * 2
    assert {(e["event"], e.get("code")) for e in entries(hub, "carl")} == {
        ("started", None),
        ("received", None),
        ("refused", "STUDY"),
    }
    assert "lists the studies brain, and the request is for " in hub.processes["carl"].text()
    notes = hub.directory / "state" / "bert" / "bert" / "notes"
    assert sorted(p.name for p in notes.iterdir()) == ["heart+kd.fedavg-0", "lungs+kd.fedavg-0"]
    for study, run in both.items():
        words = ["policy", "log", "--state-dir", str(hub.directory / "state" / "bert"), "--verify"]
        done = CliRunner().invoke(app, [*words, "--against", str(run.folder)])
        assert done.exit_code == 0, (study, done.output)


def test_a_study_s_spent_budget_stops_that_study_alone(
    hub: Federation, both: dict[str, Run]
) -> None:
    few = {"method": "fedavg", "rounds": 1, "wait.tries": 1, "run.expect": 0, "run.evaluate": False}
    again = hub.begin("again", few | {"run.study": "lungs"})
    assert not hub.wait(again.id, PATIENCE).succeeded
    assert Code.BUDGET.public in again.find("failed")[0]["text"]
    assert "2 training requests for the study lungs is spent" in hub.processes["bert"].text()
    # A new name, or none, is no fresh budget.
    for study in ("lungs2", ""):
        name = f"new{study}"
        new = hub.begin(name, few | {"run.study": study, "wait.sites": 2.0, "wait.settle": 0.0})
        assert not hub.wait(new.id, PATIENCE).succeeded
        assert new.find("trouble", what="refused", site="bert", text=Code.STUDY.public)
    hub.begin("more", few | {"run.study": "heart", "wait.settle": 0.0}).finish()
    show = ["policy", "show", str(hub.directory.parent / "bert.toml"), "--json", "--state-dir"]
    used = json.loads(
        CliRunner().invoke(app, [*show, str(hub.directory / "state" / "bert")]).stdout
    )
    of = used["used"]["studies"]
    assert (used["used"]["rounds"], of["heart"]["rounds"], of["lungs"]["rounds"]) == (5, 3, 2)


def test_watch_and_logs_are_for_a_study(hub: Federation, both: dict[str, Run]) -> None:
    command = ["watch", "--server", hub.home, "--study"]
    watcher = Operator(hub, [*command, "lungs", "--run", "kd"])
    assert watcher.popen.wait(PATIENCE) == 0
    assert f"see: fedda report {both['lungs'].folder}" in watcher.text()
    none = Operator(hub, [*command, "brain", "--run", "kd"])
    assert none.popen.wait(PATIENCE) == 1 and "knows no run 'kd'" in none.text()
    for study, code in (("lungs", 0), ("heart", 1), ("brain", 1)):
        logs = Operator(hub, ["logs", "town", "--server", hub.home, "--study", study])
        assert logs.popen.wait(PATIENCE) == code, logs.text()


def test_a_key_leaves_a_study_while_the_server_runs(hub: Federation, both: dict[str, Run]) -> None:
    keys.assign(hub.home, "bert", ["heart"])
    few = {"method": "fedavg", "rounds": 1, "wait.sites": 2.0, "wait.settle": 0.0, "run.expect": 0}
    ends = 0
    for n in range(20):  # the server follows within two seconds
        run = hub.begin(f"left-{n}", few | {"run.study": "lungs"})
        hub.wait(run.id, PATIENCE)
        if not run.find("joined", site="bert"):
            ends = n
            break
        shutil.rmtree(run.folder, ignore_errors=True)
    else:
        raise AssertionError("bert was still asked")
    assert not Path(hub.runs / f"left-{ends}" / "results.json").exists()
