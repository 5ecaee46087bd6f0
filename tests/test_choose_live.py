"""`fedda choose --server`: the search over sites that have joined, and what is not known there."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedda.choose.on_server import LivePlan
from fedda.cli import app
from fedda.comparison import Variant
from fedda.errors import RunError
from fedda.library.beginning import Launch
from fedda.settings import RunConfig
from server.journal import Journal
from server.simulation import simulate
from tests.federation import Federation
from tests.local_grid import Node
from tests.test_choose import OPTIONS, TINY

pytestmark = pytest.mark.usefixtures("signal_handlers")

WORDS = ["choose", "--server", "hub", "--target", "town", "--seeds", "2", "--settings", "0"]


@pytest.fixture
def hub(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], list[tuple[str, bool]]]:
    """Let the sites of these folders stand for a server's -> a function that makes one fail."""
    begun: list[tuple[str, bool]] = []
    broken: set[str] = set()
    state = {"state-dir": str(tmp_path / "state")}  # a site has the same one in every run

    def submit(
        config: RunConfig, launch: Launch, folder: Path, listen: Callable[[dict[str, Any]], None]
    ) -> None:
        assert launch.server.endswith("hub") and config.run.target == "town"
        begun.append((config.method, config.run.resume))
        if config.method in broken:
            raise RunError("the sites went home.")
        run = config.run.model_copy(update={"expect": len(domains)})
        journal = Journal(folder / "journal.jsonl", listen)
        simulate(
            config.model_copy(update={"run": run}),
            [dict(n) | state for n in domains],
            journal,
            "process",
        )

    monkeypatch.setattr("fedda.cli.choose.on_server", submit)

    def breaks(method: str) -> list[tuple[str, bool]]:
        broken.add(method)
        return begun

    return breaks


def call(out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, [*WORDS, "--out", str(out), *OPTIONS, *more])


@pytest.mark.slow
def test_it_chooses_among_what_fits_the_sites_that_joined(
    hub: Callable[[str], list[tuple[str, bool]]], tmp_path: Path
) -> None:
    begun = hub("")
    result = call(tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "sites: anna (source, " in result.output and "town (target, 48)" in result.output
    made = json.loads((tmp_path / "out" / "choice.json").read_text())["decision"]
    assert {c["method"] for c in made["candidates"]} <= {"fedavg", "adabn", "kd3a", "fdann", "mdan"}
    # The target has compared each model with those before it, and its rounded shares are a table.
    assert all(0 < c["agreement"] <= 1 for c in made["candidates"])
    assert "agreement" in made["alone"]
    words = shlex.split(made["command"])
    assert words[:4] == ["fedda", "run", made["method"], "--server"]
    assert words[5:7] == ["--target", "town"]
    assert "has not compared" not in (tmp_path / "out" / "choice.md").read_text()
    # One look, then FedAvg and four methods, each with all rounds and two seeds.
    assert begun[0] == ("fedavg", False) and len(begun) == 1 + 2 * 5
    assert call(tmp_path / "out").exit_code == 0
    assert len(begun) == 11  # nothing is trained again


def test_a_training_that_fails_is_named_and_goes_on_later(
    hub: Callable[[str], list[tuple[str, bool]]], tmp_path: Path
) -> None:
    hub("kd3a")
    result = call(tmp_path / "out", "--method", "adabn,kd3a")
    assert result.exit_code == 1, result.output
    text = (tmp_path / "out" / "choice.md").read_text()
    assert "failed: KD3A, seed 0: the sites went home." in text
    assert not [*(tmp_path / "out").rglob("kd3a*")]  # a failed start leaves no folder


def test_obstacles_are_those_of_the_sites_that_joined(tmp_path: Path) -> None:
    made = LivePlan(
        tmp_path,
        tmp_path,
        [Variant("fedavg")],
        ["town"],
        [0],
        TINY,
        launch=Launch(),
        submit=lambda *_: None,
    )
    seen = {
        "sites": [
            {"name": "anna", "role": "source", "examples": 100},
            {"name": "town", "role": "target", "examples": 300},
        ],
        "config": {"exchange.min-examples": 256, "model.name": "mlp"},
        "batchnorm": False,
    }
    assert "no BatchNorm" in made.obstacle("adabn", seen)
    assert "for 2 sources or more" in made.obstacle("mdan", seen)
    assert made.obstacle("fdann", seen).startswith("anna has 100 examples")
    assert made.obstacle("kd3a", seen) == ""
    seen["config"] = {"exchange.min-examples": 64, "model.name": "mlp"}
    assert made.obstacle("fdann", seen) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["choose", "--target", "town"], "Give --data ROOT, or --server DIR"),
        ([*WORDS, "--data", "x"], "Give --data ROOT, or --server DIR"),
        ([*WORDS, "--jobs", "2"], "--jobs is for simulated sites"),
        ([*WORDS, "--split", "x"], "--split is for simulated sites"),
        ([*WORDS, "--out", "out"], "No server runs from"),
        ([*WORDS, "--target", "a,b"], "names several domains"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert said in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly("fedda/choose", "fedda/cli/choose.py", "fedda/cli/launch.py")
def test_it_chooses_over_a_real_federation(federation: Federation, tmp_path: Path) -> None:
    federation.mend()
    out = tmp_path / "choice"
    words = ["choose", "--server", str(federation.home), "--target", "town", "--out", str(out)]
    words += ["--method", "kd3a", "--seeds", "1", "--settings", "0"]
    result = CliRunner().invoke(app, [*words, *OPTIONS])
    assert result.exit_code == 0, result.output
    made = json.loads((out / "choice.json").read_text())
    assert {c["method"] for c in made["decision"]["candidates"]} == {"fedavg", "kd3a"}
    again = CliRunner().invoke(
        app, [*shlex.split(made["decision"]["command"])[1:], "--dir", str(tmp_path / "runs")]
    )
    assert again.exit_code == 0, again.output
    assert (Path(made["folders"][0]) / "model.safetensors").is_file()
