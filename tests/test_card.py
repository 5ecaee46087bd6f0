"""A run's model card: what it says, and whom it does not name."""

from pathlib import Path
from typing import Any

import pytest

from fedda.results import read
from fedda.results.card import CARD, card
from fedda.settings import RunConfig, defaults
from server.journal import Journal
from server.simulation import simulate
from tests.local_grid import Node, make_domains

SETTINGS: dict[str, Any] = {"method": "kd3a", "kd3a.vote": "hard", "rounds": 2}
SETTINGS |= {"run.name": "r", "run.seeds": "0,1", "run.baseline": "fedavg"}
SETTINGS |= {"model.name": "mlp", "model.hidden": "16", "train.batch-size": 16}
SETTINGS |= {"track.tensorboard": False}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    return [n | {"threads": 1} for n in make_domains(tmp_path_factory.mktemp("domains"))]


@pytest.fixture(scope="module")
def folder(nodes: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a baseline."""
    root = tmp_path_factory.mktemp("runs")
    simulate(RunConfig.parse(SETTINGS | {"run.dir": str(root)}), nodes, Journal(), "process")
    return root / "r"


def test_a_run_has_a_card_with_its_accuracy_data_and_settings(folder: Path) -> None:
    text, results = (folder / CARD).read_text(), read.load(folder)
    assert text.startswith(f"# KD3A: {len(results['classes'])} classes\n")
    means = read.summary(results)["methods"]
    for method, title in (("fedavg", "FedAvg (source-only)"), ("kd3a", "KD3A")):
        last = means[method]["last"]
        wanted = f"{100 * last['mean']:.1f} ± {100 * last['std']:.1f} %"
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {title} "))
        assert wanted in line
    for site in results["sites"]:
        assert f" {site['examples']:,} | " in text
    assert "`kd3a.vote`" in text and "`hard`" in text
    assert "train.momentum" not in text  # a default


NOTHING_HIDDEN = "Nothing hid single models or gradients from the server"
PROTECTED: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden": "sum"}, "", "KD3A: Secure sums"),
    ({"hidden": "sealed"}, "", "KD3A: Sealed models"),
    ({"exchange.masked": True}, "from source gradient", "Masked gradients"),
    ({"exchange.noise": 0.5}, "from source gradient", "Noise of 0.5"),
    ({"privacy.noise": 1.3}, "", "(noise 1.3): epsilon 2.35"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "sent", "said"), PROTECTED, ids=lambda v: str(v)[:30])
def test_it_says_how_models_and_examples_were_protected(
    folder: Path, settings: dict[str, Any], sent: str, said: str
) -> None:
    results = read.load(folder)
    assert NOTHING_HIDDEN in card(results, defaults())
    (*_, last) = results["trainings"]["kd3a"]
    (last if "hidden" in settings else results["config"]).update(settings)
    if sent:
        # Without gradients these settings do nothing, and the card does not claim them.
        assert NOTHING_HIDDEN in card(results, defaults())
        last["bytes"][sent] = 8
    if "privacy.noise" in settings:
        assert "which epsilon was spent no source said" in card(results, defaults())
        for entry, epsilon in zip(last["rounds"], (1.75, 2.3456), strict=True):
            entry["epsilon"] = epsilon
    text = card(results, defaults())
    assert NOTHING_HIDDEN not in text
    (line,) = (x for x in text.partition("## What left")[2].splitlines() if x.startswith("- "))
    assert said in line


def test_it_names_no_site_and_no_path(folder: Path, nodes: list[Node]) -> None:
    text = (folder / CARD).read_text()
    for node in nodes:
        assert str(node["name"]) not in text and str(node["data"]) not in text
    assert str(folder.parent) not in text


def test_names_of_classes_are_text_where_markdown_takes_html(folder: Path) -> None:
    results = read.load(folder)
    results["classes"][0] = "<img src=x onerror=alert(2)>"
    assert "<img" not in card(results, defaults())
