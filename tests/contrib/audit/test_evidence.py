"""Evidence before export: its figures and thresholds, its page, and whose it is."""

import json
from pathlib import Path

import pytest
import typer

from clients.policy.rules import Policy
from fedda.contrib.audit import membership
from fedda.contrib.audit.finding import Audit, Finding
from fedda.contrib.audit.prove import ABOVE, Proof
from fedda.contrib.report.page import evidence
from fedda.errors import ConfigError
from tests.command_lines import call
from tests.contrib.audit.test_audits import made
from tests.contrib.report.test_page import Read


def row(attack: str, on: str, examples: int, **recovered: float) -> Finding:
    guess = {"images": 0.01, "psnr": 13.2, "error": 0.4} | membership.GUESS
    named = {k.replace("tpr_", "tpr@0."): v for k, v in recovered.items()}
    return Finding(attack, on, examples, named, guess)


ERRORS = {"step": 0.1, "first": 0.5, "last": 0.3, "mean": 0.0}
SHARES = tuple(row("shares", on, 20, error=error) for on, error in ERRORS.items())
IMAGES = {1: 1.0, 16: 0.5, 64: 0.055}
UPDATES = tuple(row("update", "early", n, images=x, psnr=15.0) for n, x in IMAGES.items())
MEMBERS = (
    row("membership", "model", 80, auc=0.7, tpr_01=0.3, tpr_001=0.02),
    row("membership", "confidence", 80, auc=0.6, tpr_01=0.2, tpr_001=0.01),
    row("membership", "atoms", 80, auc=0.6, tpr_01=0.2, tpr_001=0.9),
)
FOUND = (
    Audit("update", {"threshold": 13.2}, UPDATES),
    Audit("membership", {"shadows": 4, "epochs": 1, "noise": 0.0}, MEMBERS),
    Audit("shares", {"sites": 30}, SHARES),
)
ROWS = [finding for audit in FOUND for finding in audit.findings]
for audit in FOUND:
    audit.settings["data"] = "clinic-a"


def test_the_figures_are_the_worst_that_the_site_lets_happen() -> None:
    assert evidence.figures(ROWS, 64) == {"images": 0.055, "membership": 0.02, "shares": 0.75}
    assert evidence.figures(ROWS, 16)["images"] == 0.5
    assert evidence.figures(ROWS, 100)["images"] == 0.055  # of the most that could be tried
    assert evidence.figures([], 64) == dict.fromkeys(evidence.MEANING)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Evidence of a site -> its page, in a folder alone."""
    run = made(tmp_path)
    page = tmp_path / "evidence.html"
    proof = Proof(run, page, None)
    model = run / "model.safetensors"
    proof.finish(model, {"method": "fedavg", "x": "<b>"}, "clinic-a", FOUND, {"seed": 7})
    return page


def test_the_page_says_what_crossed_what_was_tried_and_what_is_open(written: Path) -> None:
    html = written.read_text()
    tables = Read(html).tables
    assert {"What crossed", "Figures", "Audit", "Settings of the attacks"} <= set(tables)
    assert ["seed", "7"] in tables["Settings of the attacks"]
    assert len(tables["What crossed"]) > 1 and "lower bounds" in html
    assert "<b>" not in html and "&lt;b&gt;" in html and "src=" not in html
    about = json.loads(written.with_suffix(".json").read_text())
    assert about["figures"]["images"] == 0.055 and about["above"] == []
    assert about["crosses"] and about["options"] == {"seed": 7}
    assert "nobody has judged the figures" in html  # no policy was given


def test_a_figure_above_the_policy_ends_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, policy = made(tmp_path), tmp_path / "policy.toml"
    arguments = (run / "model.safetensors", {}, "clinic-a", FOUND, {})
    for text, odd in (
        ("[protect]\nmin-images = 64\n[audit]\nimages = 0.06\nmembership = 0.02", ""),
        ("[protect]\nmin-images = 64\n[audit]\nimages = 0.05", "images is 0.0550, and 0.05"),
        ("[audit]\nimages = 0.06", "images is 0.5000"),  # steps over two images are allowed
        ("[audit]\nmembership = 0.01", "membership is 0.0200"),
    ):
        policy.write_text(text)
        proof = Proof(run, None, policy)
        if not odd:
            proof.finish(*arguments)
            continue
        with pytest.raises(typer.Exit) as ended:
            proof.finish(*arguments)
        assert ended.value.exit_code == ABOVE and odd in capsys.readouterr().err
    assert not any(v is not None for v in Policy().audit.model_dump().values())


def test_bad_files_are_refused_before_any_attack(tmp_path: Path) -> None:
    run = made(tmp_path)
    with pytest.raises(ConfigError, match="page's name that ends in"):
        Proof(run, tmp_path / "e.pdf", None)
    with pytest.raises(ConfigError, match="cannot be read"):
        Proof(run, None, tmp_path / "none.toml")


@pytest.mark.nightly("fedda/contrib/audit")
def test_the_command_attacks_writes_and_judges(tmp_path: Path) -> None:
    run, policy, page = made(tmp_path), tmp_path / "policy.toml", tmp_path / "e.html"
    policy.write_text("[audit]\nshares = 0.0\n")
    words = ["--data", tmp_path / "clinic.npz", "--steps", 2, "--shadows", 4, "--sites", 3]
    words += ["--epochs", 1, "--evidence", page, "--policy", policy]
    call("audit", "all", run, *words, code=ABOVE)
    about = json.loads(page.with_suffix(".json").read_text())
    assert about["above"] == ["shares"] and about["options"]["shadows"] == 4


def test_the_page_says_whose_models_were_seen_and_what_was_trained_less() -> None:
    plain, sealed = ["from source model", "from target model"], ["from source sealed"]
    epochs = {"epochs": 2, "epochs-of-the-run": 40}
    risks = " ".join(evidence.open_risks({}, plain, ROWS, epochs))
    assert "The server saw the model that the target sent." in risks
    assert "models of 2 epochs, and the run made 40" in risks
    risks = " ".join(evidence.open_risks({}, [*sealed, "from target model"], ROWS, {}))
    assert "The target saw the model of each single source" in risks
    assert "target sent" not in risks and "epochs" not in risks
