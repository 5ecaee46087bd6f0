"""Values as they are: columns in raw units, dark images; the site names them, and so does a run."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

import fedda
from fedda import data
from fedda.data import Reading
from fedda.data.form import AS_IT_IS
from fedda.errors import FeddaError
from fedda.library.own_data import folder_of
from fedda.library.program_inputs import columns_of, frame, images, in_order
from fedda.settings import Task

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


def arrow(columns: dict[str, Any]) -> Any:
    return pa.table(columns)


def coded_arrow(columns: dict[str, Any]) -> Any:
    """Arrow's codes of texts, whose gaps are lost on numpy's way."""
    return pa.table({n: pa.array(v).dictionary_encode() for n, v in columns.items()})


class Polars:
    """polars' own names, without pandas'."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns
        self.columns = [*columns]

    def to_numpy(self, *, order: str = "fortran") -> np.ndarray:
        return np.stack([np.asarray(v, object) for v in self._columns.values()], axis=1)

    def __getitem__(self, name: str) -> Any:
        return np.asarray(self._columns[name], object)


def records(columns: dict[str, Any]) -> Any:
    rows = [*zip(*columns.values(), strict=True)]
    return np.array(rows, [(name, object) for name in columns])


@pytest.mark.parametrize("table", [pd.DataFrame, arrow, coded_arrow, Polars, dict, records])
def test_columns_of_any_librarys_table_go_by_name(table: Any) -> None:
    age, sex, bed = [41.5, None, 60.0], ["f", None, "m"], ["1_7", "2_3", "1_7"]
    x = table({"age": age, "sex": sex, "bed": bed})
    assert columns_of(x) == ("age", "sex", "bed")
    found, texts = frame(x, "x", ["bed", "sex", "age"])
    right = [[0, 0, 41.5], [1, np.nan, np.nan], [0, 1, 60]]  # 1_7 is no number
    np.testing.assert_array_equal(found, right)
    assert {n: [*its] for n, its in texts.items()} == {"bed": ["1_7", "2_3"], "sex": ["f", "m"]}
    chosen = in_order(table({"b": [1.0, 2.0], "a": [3.0, 4.0]}), ("a", "b"))
    np.testing.assert_array_equal(chosen, [[3, 1], [4, 2]])


MASKED = np.ma.masked_equal([[1.0, -9999.0], [3.0, 4.0]], -9999.0)


@pytest.mark.parametrize("given", [MASKED, [*MASKED]])
def test_what_is_masked_is_a_gap(given: Any) -> None:
    np.testing.assert_array_equal(images(given, "x"), [[1, np.nan], [3, 4]])


def test_pixels_and_labels_that_are_masked_are_refused(tmp_path: Path) -> None:
    pixels = np.ma.masked_equal(np.arange(64, dtype=np.uint8).reshape(1, 8, 8), 9)
    with pytest.raises(FeddaError, match="masked or not finite"):
        images(pixels, "x")
    y = np.ma.masked_equal([0, 1, -9999], -9999)
    with pytest.raises(FeddaError, match="no label in place 2"):
        folder_of({"a": (np.zeros((3, 2)), y)}, tmp_path / "data")


@pytest.mark.parametrize(
    ("rows", "warned"),
    [
        ("0.12,-3.1,4\n0.2,1,2\n", True),
        ("39,State-gov,7\n50,Private,1\n41,State-gov,2\n", True),
        ("0,1,2\n0.2,1,2\n", False),
        ("1,2,3\n0.2,1,2\n", False),
        ("400.5,401,402,403,404,405,406,407,408\n" + "1,2,3,4,5,6,7,8,9.5\n", False),
        ("age,2020,2021\n50,0.5,0.25\n41,1,2\n", False),
    ],
)
def test_a_table_without_a_heading_is_named(tmp_path: Path, rows: str, warned: bool) -> None:
    (tmp_path / "t.csv").write_text(rows)
    said = " ".join(data.describe(tmp_path / "t.csv", "target").warnings)
    assert ("seems to hold values" in said) == warned


class Masks(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(1, 8, 8), torch.zeros(8, 8)


def test_masks_and_images_half_transparent_everywhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FeddaError, match="second part is no label"):
        folder_of({"a": Masks()}, tmp_path / "data")
    bands = np.random.default_rng(0).integers(60, 200, (8, 8, 4)).astype(np.uint8)
    with pytest.raises(FeddaError, match="half transparent"):
        images([Image.fromarray(bands)], "x")


LOWER, META = partial(torch.autocast, "cpu", dtype=torch.bfloat16), partial(torch.device, "meta")


def test_modes_of_torch_change_nothing() -> None:
    its = vectors([1, 1, 1])
    sites: Any = {name: (its["x"], its["y"]) for name in ("anna", "bert", "town")}
    about: Any = {"target": "town", "method": "fedavg", "preset": "vectors", "rounds": 1}
    about |= {"baseline": "none", "quiet": True, "train_batch_size": 20}

    def ran() -> Any:
        return fedda.simulate(sites, **about).model.probabilities(its["x"])

    plain = ran()
    for mode in (torch.inference_mode, torch.no_grad, META, LOWER):
        with mode():
            found = ran()
        np.testing.assert_array_equal(found, plain)


@pytest.mark.contrib
def test_what_an_hdf5_file_calls_missing_is_a_gap(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array([[1, -9999], [3, 4]], "float32")
        file["x"].attrs["_FillValue"] = np.float32(-9999)
        file["y"] = [0, 1]
    assert "1 of 2 rows have missing values" in odd(tmp_path / "a.h5")
