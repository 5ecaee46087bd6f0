"""Values as they are: columns in raw units, dark images; the site names them, and so does a run."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedda
from fedda import data
from fedda.cli.client import _summary  # pyright: ignore[reportPrivateUsage]
from fedda.data import Reading
from fedda.data.form import AS_IT_IS
from fedda.errors import FeddaError
from fedda.settings import Task
from tests.field.written import GRAY_ALPHA, RGB, png

OWN = Reading(window="own")


def vectors(scales: list[float], shift: float = 0.0, n: int = 60) -> dict[str, np.ndarray]:
    """Vectors of three classes, with a scale and a shift for each column."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    x = (rng.normal(size=(n, len(scales))) + y[:, None]) * scales
    return {"x": (x + shift * np.array(scales)).astype("float32"), "y": y}


def odd(path: Path, reading: Reading = AS_IT_IS) -> str:
    return " ".join(data.verify(path, "source", reading=reading).warnings)


def saved(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


@pytest.mark.parametrize("shift", (0.0, 40.0))
def test_columns_of_another_scale_are_named(tmp_path: Path, shift: float) -> None:
    raw = saved(tmp_path / "raw.npz", vectors([1, 1, 5000, 1, 1e6], shift))
    assert "columns 2, 4 (counted from 0)" in odd(raw) and "input.window=own" in odd(raw)
    assert not odd(raw, OWN)
    one = saved(tmp_path / "one.npz", vectors([1, 1, 1, 0, 1e6], shift))
    assert "column 4 (counted from 0)" in odd(one)
    assert not odd(saved(tmp_path / "plain.npz", vectors([1, 2, 0.1, 0, 0.001])))
    large = odd(saved(tmp_path / "large.npz", vectors([3e4] * 5)))
    assert "the vectors have values of about" in large


def test_words_that_are_counted_have_no_odd_scale(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.binomial(1, np.geomspace(0.5, 0.01, 300), (400, 300)).astype("float32")
    assert not odd(saved(tmp_path / "words.npz", {"x": x, "y": np.arange(400) % 2}))


def test_a_training_names_the_site_once(caplog: pytest.LogCaptureFixture) -> None:
    raw = vectors([1, 1, 3000])
    sites: Any = {name: (raw["x"], raw["y"]) for name in ("anna", "bert", "town")}
    with caplog.at_level(logging.WARNING):
        fedda.simulate(sites, "town", "fedavg", seeds=2, quiet=True, **SMALL)
        told = [r.getMessage() for r in caplog.records if "counted from 0" in r.getMessage()]
        assert [text.partition(":")[0] for text in told] == ["anna", "bert", "town"]
        caplog.clear()
        fedda.simulate(sites, "town", "fedavg", quiet=True, input_window="own", **SMALL)
    assert not [r for r in caplog.records if "counted from 0" in r.getMessage()]


SMALL: Any = {"model_name": "mlp", "model_hidden": "8", "rounds": 2, "train_batch_size": 30}
SMALL |= {"train_steps": 0, "train_carry_momentum": False, "train_weight_decay": 0.0}


def test_a_guard_that_trips_over_raw_units_says_so() -> None:
    raw = vectors([1, 1, 1e5], shift=40.0)
    sites: Any = {name: (raw["x"], raw["y"]) for name in ("anna", "bert", "town")}
    cause = r"anna: .*guard.max-statistics allows; vectors in raw units.*input.window=own"
    with pytest.raises(FeddaError, match=cause):
        fedda.simulate(sites, "town", "fedavg", quiet=True, **SMALL)


def test_a_training_that_learns_nothing_names_dark_images_before_the_rate() -> None:
    y = np.arange(90) % 3
    x = np.repeat(y, 256).reshape(90, 16, 16).astype(np.uint8)  # 0 to 2 of 255
    sites: Any = {name: (x, y, (x, y)) for name in ("anna", "bert", "town")}
    still = SMALL | {"rounds": 8, "train_lr": 1e-6, "train_lr_end": 1e-6}
    run = fedda.simulate(sites, "town", "fedavg", seeds=(1,), quiet=True, **still)
    texts = [each.text for each in run.results.doubts if "train.lr" in each.text]
    assert texts and all("a small part of their range" in text for text in texts)


@pytest.mark.parametrize(
    "shape, window, said",
    (("5", "", "raw units"), ("5", "own", ""), ("1,8,8", "", "small part of their range")),
)
def test_what_may_be_the_cause(shape: str, window: str, said: str) -> None:
    task = Task(method="fedavg", shape=shape, window=window, class_names="a\nb")
    assert said in task.suspect and bool(task.suspect) == bool(said)


def test_a_site_says_its_images_in_words(tmp_path: Path) -> None:
    for i in range(3):
        Image.new("RGB", (8, 8 + i), (9 * i, 200, 100)).save(tmp_path / f"{i}.png")
    found = data.describe(tmp_path, "target")
    assert found.form == "colour images, of several sizes (a run sets input.size)"
    said = _summary(found)
    assert "3 colour images, of several sizes" in said and "0 x 0" not in said
    raw = data.describe(saved(tmp_path / "raw.npz", vectors([1, 1])), "source")
    assert "60 vectors of 2 numbers" in _summary(raw)


@pytest.mark.parametrize("colour, channels", ((RGB, 3), (GRAY_ALPHA, 2)))
def test_of_colours_of_16_bits_the_check_says_what_is_read(
    tmp_path: Path, colour: int, channels: int
) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (8, 8, channels)).astype(np.uint16)
    (tmp_path / "0.png").write_bytes(png(values, 16, colour))
    assert "the high byte is read" in data.verify(tmp_path, "target").gray
    (tmp_path / "0.png").write_bytes(png((values >> 8).astype(np.uint8), 8, colour))
    assert not data.verify(tmp_path, "target").gray
