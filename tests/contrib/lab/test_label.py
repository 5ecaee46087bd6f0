"""A few labels at a target: the draw, the exact intervals, and models judged by them."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import binom

import fedda
from fedda.contrib.lab import labelled
from fedda.errors import DataError
from tests.command_lines import call


def test_an_interval_by_hand() -> None:
    """Of n images all right: the low end is where n in a row have a chance of 2.5 %."""
    found = labelled.interval(10, 10)
    assert found.low == pytest.approx(0.025 ** (1 / 10)) and found.high == 1.0
    none = labelled.interval(0, 10)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 10)) and none.low == 0.0


@pytest.mark.parametrize("p", [0.5, 0.8, 0.97])
@pytest.mark.parametrize("n", [20, 50])
def test_intervals_hold_as_often_as_they_say(p: float, n: int) -> None:
    """Exactly, over all outcomes: one look at 5 %, and three looks at 5 % together."""
    missed = {
        look: sum(
            float(binom.pmf(k, n, p))
            for k in range(n + 1)
            if not (found := labelled.interval(k, n, look)).low <= p <= found.high
        )
        for look in range(4)
    }
    assert missed[0] <= 0.05
    assert all(missed[look] <= labelled.error_of(look) for look in (1, 2, 3))
    assert sum(labelled.error_of(look) for look in range(1, 1000)) < 0.05


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sites whose images show their class by brightness, and a run over them."""
    root = tmp_path_factory.mktemp("label")

    def site(seed: int, n: int = 90) -> tuple[Any, Any]:
        draws, y = np.random.default_rng(seed), np.arange(n) % 3
        return (80 * y[:, None, None] + draws.integers(0, 60, (n, 8, 8))).astype(np.uint8), y

    x, _ = site(3)
    np.savez(root / "t.npz", x_train=x)
    sites = {"a": site(1), "b": site(2), "t": root / "t.npz"}
    few: Any = {"rounds": 4, "model_name": "mlp", "model_hidden": "16", "quiet": True}
    fedda.simulate(sites, "t", "fedavg", dir=root / "run", **few)
    return root


def fill(folder: Path, labels: list[str]) -> None:
    """Write labels into labels.csv, from the top."""
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, label in zip(rows, labels, strict=False):
        row["label"] = label
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "file", "label"])
        writer.writeheader()
        writer.writerows(rows)


def test_images_are_drawn_labelled_and_models_judged(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    drawn = call("label", "--target", place / "t.npz", "--n", 30, "--out", out)
    assert "30 of 90 images" in drawn.output and "50: 24" in drawn.output
    rows = json.loads((out / "about.json").read_text())["images"]
    with np.load(place / "t.npz") as file:
        x = file["x_train"]
    for number in (1, 30):
        shown = np.asarray(Image.open(out / f"{number:04d}.png"))
        assert np.array_equal(shown, x[rows[number - 1]])
    fill(out, [str(row % 3) for row in rows[:20]])
    judge = ("label", "--target", place / "t.npz", "--out", out, "--model", place / "run")
    judged, again = call(*judge), call(*judge)
    assert "20 of 30 images labelled, look 1" in judged.output and "look 2" in again.output
    assert "guessing" not in judged.output
    (one,), (two,) = (
        [line for line in r.output.splitlines() if "%, from" in line] for r in (judged, again)
    )
    assert float(two.split("from ")[1].split()[0]) < float(one.split("from ")[1].split()[0])
    fill(out, [str((row + (i > 9)) % 3) for i, row in enumerate(rows[:20])])
    assert "better than guessing among 3 classes" in call(*judge).output


def test_rows_may_be_sorted_and_a_gap_among_labels_is_refused(place: Path, tmp_path: Path) -> None:
    """Else labels would be compared with other images' answers, and easy images alone count."""
    out = tmp_path / "out"
    call("label", "--target", place / "t.npz", "--n", 30, "--out", out)
    fill(out, [str(row % 3) for row in json.loads((out / "about.json").read_text())["images"]])
    head, *rows = (out / "labels.csv").read_text().splitlines()
    judge = ("label", "--target", place / "t.npz", "--out", out, "--model", place / "run")
    before, _ = call(*judge).output, (out / "labels.csv").write_text("\n".join([head, *rows[::-1]]))
    right = re.compile(r": ([\d.]+ %)")
    assert right.findall(call(*judge).output) == right.findall(before)
    (out / "labels.csv").write_text("\n".join([head, *rows[:3], *rows[4:]]))
    assert "no label in row 4, and some below" in call(*judge, code=1).output


def test_bad_input_is_one_sentence(place: Path, tmp_path: Path) -> None:
    def said(*words: str | Path) -> str:
        result = call("label", *words, code=1)
        assert "Traceback" not in result.output
        return result.output

    assert "the target has 90 images" in said("--target", place / "t.npz", "--n", "91")
    out = tmp_path / "out"
    call("label", "--target", place / "t.npz", "--n", 10, "--out", out)
    assert "holds something already" in said("--target", place / "t.npz", "--out", out)
    judge = "--target", place / "t.npz", "--out", out, "--model", place / "run"
    assert "no label in its first row" in said(*judge)
    fill(out, ["7"])
    assert "no class of the model" in said(*judge)
    other = tmp_path / "other.npz"
    np.savez(other, x_train=np.zeros((90, 8, 8), np.uint8))
    assert "not these 90 read as now" in said("--target", other, *judge[2:])
    assert "holds no images" in said("--target", place / "t.npz", "--out", tmp_path, *judge[4:])
    with pytest.raises(DataError, match="no label"):
        labelled.answered([{"label": ""}], 1, ["a"])
