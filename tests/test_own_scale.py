"""`input.window=own`: each site scales its own vectors, in training, tests and predictions."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedda
from fedda import data
from fedda.config.inputs import scales_of, window_of
from fedda.data import Reading
from fedda.data.own_columns import OwnColumns
from fedda.errors import ConfigError, DataError
from fedda.settings import RunConfig

OWN = Reading(window="own")
FEW: dict[str, Any] = {"rounds": 3, "preset": "vectors", "model_bottleneck": 16, "quiet": True}


def vectors(n: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> tuple[Any, Any]:
    """Vectors around three points, in a site's own units."""
    draws, y = np.random.default_rng(seed), np.arange(n) % 3
    centres = np.random.default_rng(7).normal(0, 2, (3, 8))
    x = centres[y] + draws.normal(0, 1, (n, 8))
    return (scale * x + shift).astype(np.float32), y


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A site's file, whose tests differ from its training vectors."""
    x, y = vectors(90, 1, 50.0, 300.0)
    test, labels = vectors(45, 2, 50.0, 300.0)
    np.savez(tmp_path / "site.npz", x_train=x, y_train=y, x_test=test, y_test=labels)
    return tmp_path / "site.npz"


def test_by_hand() -> None:
    """A column of -1 and 1 has the deviation s = sqrt(40/39), one that is constant none."""
    x = torch.tensor([[-1.0, 5.0], [1.0, 5.0]]).repeat(20, 1)
    s = (40 / 39) ** 0.5
    scaled = OwnColumns(x, "x", OWN)(x)
    assert scaled[:2, 0].tolist() == pytest.approx([-1 / (s + 0.05 * s), 1 / (s + 0.05 * s)])
    assert scaled[:, 1].abs().max() == 0


def test_one_column_in_large_units_leaves_the_others_as_they_are() -> None:
    """As an income beside an age and codes of 0 and 1; of alike columns each counts as before."""
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 1e6
    scaled = OwnColumns(x, "x", OWN)(x)
    assert scaled.std(dim=0).min() > 0.75
    assert OwnColumns(torch.zeros(50, 2), "x", OWN)(x[:50, :2]).isfinite().all()
    alike = x[:, :5] * torch.tensor([1.0, 1.2, 1.4, 1.6, 4.0])
    deviation = alike.std(dim=0)
    wanted = (alike - alike.mean(dim=0)) / (deviation + 0.1 * deviation.mean())
    torch.testing.assert_close(OwnColumns(alike, "x", OWN)(alike), wanted)


def test_tests_are_scaled_as_the_training_vectors_are(place: Path) -> None:
    plain, own = data.load_source(place), data.load_source(place, reading=OWN)
    assert own.x.mean(dim=0).abs().max() < 1e-4
    assert torch.equal(own.x, data.load_target(place, reading=OWN).x)
    tests, before = data.load_evaluation(place, reading=OWN), data.load_evaluation(place)
    assert tests is not None and before is not None
    torch.testing.assert_close(tests.x, OwnColumns(plain.x, place, OWN)(before.x))
    # Predictions are made of the same numbers, whichever part is asked for, and like the site.
    alone = replace(OWN, split="test")
    for whose, reading, start in ((None, alone, 0), (place, alone, 0), (None, OWN, len(own.x))):
        found = data.batches(place, tests.shape, 16, reading=reading, like=whose)
        assert torch.equal(torch.cat([each.examples.x for each in found])[start:], tests.x)
    # A training part that cannot be read is an error: tests never scale themselves instead.
    x = plain.x.numpy().copy()
    x[0, 0] = np.inf
    np.savez(place, x_train=x, x_test=before.x.numpy())
    with pytest.raises(DataError, match="x_train"):
        next(data.batches(place, tests.shape, 16, reading=alone))


def test_sites_with_other_units_train_a_model_together() -> None:
    def sites() -> dict[str, Any]:
        target = vectors(120, 3, 0.01, -5.0)[0], None, vectors(60, 4, 0.01, -5.0)
        return {"a": vectors(120, 1), "b": vectors(120, 2, 100.0, 40.0), "t": target}

    found = fedda.simulate(sites(), "t", "fedavg", run_refine="none", **FEW).results.accuracy
    raw = fedda.simulate(sites(), "t", "fedavg", run_refine="none", input_window="", **FEW)
    plain = raw.results.accuracy
    assert found is not None and plain is not None
    assert found > 0.9 > plain


def test_predictions_are_scaled_too(tmp_path: Path) -> None:
    target = vectors(120, 3, 9.0, 2.0)[0], None, vectors(60, 4, 9.0, 2.0)
    sites = {"a": vectors(120, 1), "b": vectors(120, 2), "t": target}
    run = fedda.simulate(sites, "t", "fedavg", dir=tmp_path / "r", **FEW)
    assert run.results.accuracy is not None
    new, y = vectors(60, 4, 9.0, 2.0)
    assert (run.model.predict(new) == y.astype(str)).mean() > run.results.accuracy - 0.1


def test_it_is_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    images = np.zeros((50, 8, 8), np.uint8), np.arange(50) % 2
    np.savez(tmp_path / "a.npz", x_train=images[0], y_train=images[1])
    with pytest.raises(DataError, match="is for vectors"):
        data.load_source(tmp_path / "a.npz", reading=OWN)
    config = RunConfig.parse({"input.window": "own"})
    with pytest.raises(ConfigError, match="are images"):
        config.task("kd3a", 0, (1, 8, 8), ["a", "b"], 3)
    with pytest.raises(ConfigError, match="changes the scale of all"):
        RunConfig.parse(
            {"input.window": "own", "privacy.noise": 1.0, "model.norm": "group", "method": "fedavg"}
        )


SCALE = "age=50/10, sugar=5/2"


def test_a_scale_by_hand() -> None:
    assert scales_of(SCALE) == {"age": (50.0, 10.0), "sugar": (5.0, 2.0)}
    assert scales_of("own") == scales_of("0,255") == {} and window_of(SCALE) is None
    reading = Reading().within(SCALE, "mean", ("age", "ill", "sugar"))
    x = torch.tensor([[60.0, 1.0, 1.0], [40.0, 0.0, math.nan]]).repeat(20, 1)
    scaled = OwnColumns(x, "x", reading)(x)
    assert scaled[:2].tolist() == [[1.0, 1.0, -2.0], [-1.0, 0.0, -2.0]]
    none = ("age=50", "age=50/0", "age=a/b", "age=50/10,age=50/10", "=5/2", "age=nan/1", "age=1/-1")
    for odd in (*none, "age=1e99/1", "age=1/1e-99", "age=1/1e99"):  # 0 or infinite in float32
        with pytest.raises(ConfigError, match="mean and deviation of each column"):
            RunConfig.parse({"input.window": odd})


def test_one_scale_for_all_keeps_what_differs_between_sites(tmp_path: Path) -> None:
    """Nearly all are ill in the west, which its own mean would hide."""
    shares, frames = {"east": 0.5, "north": 0.4, "west": 0.95}, {}
    for seed, (name, ill) in enumerate(shares.items()):
        draws = np.random.default_rng(seed)
        y = draws.random(200) < ill
        x = pd.DataFrame({"age": draws.normal(50, 10, 200), "sugar": 5 + 4 * y})
        x["sugar"] += draws.normal(0, 1.5, 200)
        labels = np.where(y, "ill", "well")
        frames[name] = (x, labels, (x, labels)) if name == "west" else (x, labels)

    def accuracy(window: str) -> Any:
        about: Any = {"preset": "table", "quiet": True, "run_refine": "none"}
        place = tmp_path / str(len(window))
        return fedda.simulate(
            frames, "west", "fedavg", dir=place, input_window=window, train_lr=0.05, **about
        )

    own, run = accuracy("own"), accuracy(SCALE)
    assert run.results.accuracy > own.results.accuracy + 0.15
    few = frames["west"][0][:5]  # a few rows need no others for a mean
    assert len(run.model.predict(few)) == 5
    with pytest.raises(DataError, match="too few"):
        own.model.predict(few)


def test_a_scale_needs_the_names_of_columns(place: Path) -> None:
    with pytest.raises(DataError, match="no names of its columns"):
        data.load_source(place, reading=Reading(window=SCALE))
    config = RunConfig.parse({"input.window": SCALE})
    with pytest.raises(ConfigError, match="scales the column 'sugar', which"):
        config.task("fedavg", 0, (2,), ["a", "b"], 3, columns=("age", "weight"))
    with pytest.raises(ConfigError, match="is for vectors"):
        config.task("fedavg", 0, (1, 8, 8), ["a", "b"], 3)
