"""`fedda choose`: what to take without labels, and a choice by a few."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedda.contrib.lab.comparison import Plan, Variant
from fedda.contrib.lab.labelled import Drawn, Labels
from fedda.contrib.lab.measured import Choice, as_markdown, most
from tests.command_lines import call
from tests.contrib.lab.test_label import fill
from tests.test_refine import clouds

SHORT = ("--rounds", "2", "-c", "model.name=mlp", "-c", "model.hidden=16", "--jobs", "1")
FEDAVG, KD3A = Variant("fedavg"), Variant("kd3a")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites of vectors; the target has no labels."""
    made = tmp_path_factory.mktemp("sites")
    for seed, name in enumerate(("a", "b")):
        x, y = clouds(120, seed)
        np.savez(made / f"{name}.npz", x_train=x, y_train=y)
    np.savez(made / "t.npz", x_train=clouds(120, 3, 0.1)[0])
    return made


def test_without_labels_it_says_what_to_take_and_trains_nothing(root: Path, tmp_path: Path) -> None:
    words = ("--data", root, "--target", "t", "--out", tmp_path / "c", *SHORT[:-2])
    said = call("choose", *words).output.replace("\n", " ")
    assert "take FedAvg and AdaBN, refined: fedda run fedavg --simulate" in said
    assert f"fedda label --target {root / 't.npz'} --n 50" in said
    assert not (tmp_path / "c").exists()


def test_labels_choose_among_trained_methods(root: Path, tmp_path: Path) -> None:
    """The labels are those that one refined model gives, so it has all of them right."""
    out, labels = tmp_path / "c", tmp_path / "labels"
    call("label", "--target", root / "t.npz", "--n", 30, "--out", labels)
    images = json.loads((labels / "about.json").read_text())["images"]
    fill(labels, [str(clouds(120, 3, 0.1)[1][i]) for i in images])
    words = ("--data", root, "--target", "t", "--out", out, "--labels", labels, *SHORT)
    call("choose", *words, "--method", "kd3a")
    found = json.loads((out / "choice.json").read_text())
    assert found["labels"] == 30 and found["looks"] == 1
    assert [c["name"] for c in found["candidates"]] == ["FedAvg", "KD3A"]
    for row in found["candidates"]:
        assert 0 <= row["low"] <= row["right"] / 30 <= row["high"] <= 1
    assert found["command"].startswith(f"fedda run {found['method']} --simulate")
    assert all(Path(folder).is_dir() for folder in found["folders"])
    assert "Take " in (out / "choice.md").read_text()
    # The same command trains nothing again, and its look counts.
    call("choose", *words, "--method", "kd3a")
    assert json.loads((out / "choice.json").read_text())["looks"] == 2


def choice(right: dict[Variant, list[bool]]) -> Choice:
    """A choice by hand."""
    plan = Plan(Path("sites"), Path("out"), [FEDAVG, KD3A], ["t"], [0], {})
    labels = Labels(Drawn(0, 100, "", tuple(range(10)), 1), [], Path())
    return Choice(plan, labels, right, dict.fromkeys(right, "fedda run"), 4)


@pytest.mark.parametrize(
    ("won", "lost", "chosen"),
    [
        (0, 0, FEDAVG),
        (1, 0, FEDAVG),  # p is 1
        (2, 0, FEDAVG),  # 2 / 4 = .5
        (3, 0, KD3A),  # 2 / 8
        (0, 3, FEDAVG),
        (3, 1, FEDAVG),  # (1 + 4) 2 / 16 = .625
        (5, 1, KD3A),  # (1 + 6) 2 / 64 = .22
    ],
)
def test_the_reference_is_left_if_labels_tell_it_apart(
    won: int, lost: int, chosen: Variant
) -> None:
    fedavg = [True] * lost + [False] * won + [True] * (10 - lost - won)
    kd3a = [False] * lost + [True] * won + [True] * (10 - lost - won)
    made = choice({FEDAVG: fedavg, KD3A: kd3a})
    assert made.chosen == chosen
    why = "It has more" if chosen == KD3A or lost > won else "The labels do not tell"
    why = why if won != lost else "None has more"
    assert f"Take {chosen.name}, refined. {why}" in as_markdown(made)


@pytest.mark.parametrize(("n", "doubted"), [(6, True), (7, False)])  # of 10, from 23 and 30 %
def test_what_labels_do_not_tell_from_guessing_is_said(n: int, doubted: bool) -> None:
    text = as_markdown(choice({FEDAVG: [True] * n + [False] * (10 - n)}))
    assert ("better than guessing among 4 classes." in text) == doubted


def test_most_of_the_seeds_decide_an_image() -> None:
    answers: Any = [[True, True, False], [True, False, False], [False, True, False]]
    assert most(answers) == [True, True, False]
    assert most(answers[:2]) == [True, False, False]  # one of two is not most
