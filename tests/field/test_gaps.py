"""Tables of numbers with gaps: refused by default, or filled by what the site itself has."""

import logging
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedda
from clients.site.memory import Site
from fedda import data, models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs, Missing
from fedda.data import Reading
from fedda.data.own_columns import OwnColumns
from fedda.errors import ConfigError, DataError, FeddaError
from fedda.models import blank
from fedda.settings import RunConfig, Task
from tests.command_lines import call

NAN = float("nan")
FEW: Any = {"model_name": "mlp", "model_hidden": "8", "rounds": 2, "train_batch_size": 30}
MEAN, MEDIAN, INDICATOR = (Reading(missing=way) for way in ("mean", "median", "indicator"))
FILLED = [way for way in get_args(Missing) if way != "refuse"]


def patients(n: int, seed: int, gone: int = 0, lacks: int | None = None) -> tuple[Any, Any]:
    """Vectors of two classes in four columns, some of which have gaps."""
    draws, y = np.random.default_rng(seed), np.arange(n) % 2
    x = (draws.normal(size=(n, 4)) + 3 * y[:, None]).astype(np.float32)
    x[:gone, 1] = np.nan
    if lacks is not None:
        x[:, lacks] = np.nan
    return x, y


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def table(path: Path, x: Any, y: Any = None, **more: Any) -> Path:
    """A CSV file of columns age, chol, sex and zinc, with empty cells for gaps."""
    frame = pd.DataFrame(dict(zip(("age", "chol", "sex", "zinc"), x.T, strict=True)) | more)
    if y is not None:
        frame["label"] = np.where(y, "ill", "well")
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


@pytest.mark.parametrize(("reading", "middle"), ((MEAN, 3.0), (MEDIAN, 2.0), (INDICATOR, 3.0)))
def test_by_hand(reading: Reading, middle: float) -> None:
    """The own values of a column are 1, 2 and 6; the second has none, and gets 0."""
    x = torch.tensor([[1.0, NAN], [2.0, NAN], [6.0, NAN], [NAN, NAN]]).repeat(10, 1)
    own = OwnColumns(x, "x", reading)
    found = own(x)
    expected = [[1.0, 0.0], [2.0, 0.0], [6.0, 0.0], [middle, 0.0]]
    assert found[:4, :2].tolist() == expected
    marks = [[0.0, 1.0]] * 3 + [[1.0, 1.0]]
    assert found[:4, 2:].tolist() == (marks if reading is INDICATOR else [[]] * 4)
    assert own(torch.tensor([[NAN, 7.0]]))[0, :2].tolist() == [middle, 7.0]


def test_a_scale_counts_no_gaps_and_comes_before_the_indicators() -> None:
    """Values -1 and 1 have the same deviation with gaps between them; what fills them is 0."""
    full = torch.tensor([[-1.0], [1.0]]).repeat(20, 1)
    holes = torch.cat([full, torch.full((30, 1), NAN)])
    own = Reading(window="own", missing="indicator")
    found = OwnColumns(holes, "x", own)(holes)
    torch.testing.assert_close(found[:40, :1], OwnColumns(full, "x", own)(full)[:, :1])
    assert found[40:].tolist() == [[0.0, 1.0]] * 30


def test_gaps_are_refused_by_default_and_the_check_says_how_to_take_them(tmp_path: Path) -> None:
    x, y = patients(60, 0, gone=5)
    site = saved(tmp_path / "a.npz", x=x, y=y, columns=np.array(["age", "chol", "sex", "zinc"]))
    refused = r"5 rows, and input\.missing is refuse: fill.*-c input\.missing=mean, median or"
    for loading in (data.load_source, data.load_target):
        with pytest.raises(DataError, match=refused):
            loading(site)
    with pytest.raises(DataError, match=refused):
        list(data.batches(site, (4,), 16))
    found = data.verify(site, "source")
    assert found.gaps == 5 and not found.empty
    (said,) = found.warnings
    assert said.startswith("5 of 60 rows have missing values (NaN), in the column chol: ")
    assert said.endswith("-c input.missing=mean, median or indicator")
    with pytest.raises(DataError, match=refused):
        found.check_fit(("0", "1"), "", "refuse")
    found.check_fit(("0", "1"), "", "mean")
    done = call("data", "check", site, "--min-images", 2)
    assert "in the column chol" in done.output.replace("\n", " ")


def test_tests_are_filled_by_what_the_training_rows_have(tmp_path: Path) -> None:
    (x, y), (test, labels) = patients(60, 0), patients(20, 1, gone=20)
    site = saved(tmp_path / "a.npz", x_train=x, y_train=y, x_test=test, y_test=labels)
    assert data.describe(site, "source").gaps == 20
    with pytest.raises(DataError, match="20 rows"):
        data.load_evaluation(site)
    found = data.load_evaluation(site, reading=MEDIAN)
    assert found is not None
    assert found.x[:, 1].tolist() == pytest.approx([float(np.median(x[:, 1]))] * 20)
    assert torch.equal(data.load_source(site, reading=MEDIAN).x, torch.tensor(x))


def test_a_column_without_a_value_is_named_at_the_check_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = patients(60, 0, lacks=2)
    site = saved(tmp_path / "a.npz", x=x, y=y)
    found = data.verify(site, "source")
    said = "no training row has a value in the column 2 (counted from 0)"
    assert found.empty == ("2",) and said in found.warnings[-1]
    own = Reading(window="own", missing="mean")
    with caplog.at_level(logging.WARNING):
        assert data.load_source(site, reading=own).x[:, 2].abs().max() == 0
    assert [r.getMessage() for r in caplog.records if said in r.getMessage()]


@pytest.mark.parametrize("way", FILLED)
def test_sites_with_other_gaps_train_together_and_the_model_predicts(
    tmp_path: Path, way: str
) -> None:
    target = patients(80, 3, gone=30)[0], None, patients(60, 4, gone=20)
    sites: Any = {"a": patients(90, 1, lacks=1), "b": patients(90, 2, gone=9), "t": target}
    flat: Any = {"preset": "table", "train_lr": 0.05, "input_missing": way, "quiet": True}
    run = fedda.simulate(sites, "t", "fedavg", dir=tmp_path / "r", run_refine="none", **flat)
    assert run.results.accuracy is not None and run.results.accuracy > 0.9
    width = 8 if way == "indicator" else 4
    about = models.describe(tmp_path / "r" / "model.safetensors")
    assert about.shape == (width,) and about.inputs.missing == way
    new, y = patients(60, 5, gone=20)
    assert (run.model.predict(new) == y.astype(str)).mean() > 0.8
    every = saved(tmp_path / "new.npz", x=new)
    found = call("predict", tmp_path / "r", every)
    labels = [line.split(",")[1] for line in found.output.splitlines() if line[0].isdigit()]
    assert labels == run.model.predict(new)
    few = saved(tmp_path / "few.npz", x=new[:5])
    assert "5 vectors, too few" in call("predict", tmp_path / "r", few, code=1).output
    alike = call("predict", tmp_path / "r", few, "--like", every)
    for a, b in zip(csv_of(alike), csv_of(found)[:5], strict=True):
        assert a[:2] == b[:2] and a[2:] == pytest.approx(b[2:], rel=1e-4)


def csv_of(found: Any) -> list[list[Any]]:
    """Predicted rows: a name, a class, and probabilities, whose last digit follows the batch."""
    rows = [line.split(",") for line in found.output.splitlines() if line[0].isdigit()]
    return [[*row[:2], *map(float, row[2:])] for row in rows]


def test_a_models_file_has_no_values_of_a_site(tmp_path: Path) -> None:
    """Only how gaps were filled: no array of it is as long as a site's columns are many."""
    config, place = ModelConfig(name="identity"), tmp_path / "m"
    inputs = Inputs((4,), missing="median")
    models.save(place, blank(config, (4,), 2), config=config, inputs=inputs, classes=["a", "b"])
    assert models.describe(place).inputs == inputs
    shapes = {tuple(t.shape) for t in models.load(place)[0].state_dict().values()}
    assert shapes == {(2, 4), (2,)}


def test_a_run_that_refuses_gaps_says_so_before_it_trains(tmp_path: Path) -> None:
    sites: Any = {name: patients(60, i, gone=4) for i, name in enumerate(("anna", "bert", "town"))}
    with pytest.raises(FeddaError, match=r"anna.*missing values \(NaN\) in 4 rows"):
        fedda.simulate(sites, "town", "fedavg", quiet=True, **FEW)
    place = saved(tmp_path / "a.npz", x=sites["anna"][0], y=sites["anna"][1])
    node = {"role": "source", "name": "anna", "data": str(place)}
    site = Site(node)
    task = Task(method="fedavg", shape="4", class_names="0\n1")
    with pytest.raises(DataError, match="4 rows"):
        site.check_fit(task)
    site.check_fit(task.model_copy(update={"missing": "mean"}))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"input\.missing is 'zero'"):
        RunConfig.parse({"input.missing": "zero"})
    config = RunConfig.parse({"input.missing": "mean"})
    with pytest.raises(ConfigError, match=r"is for vectors.*are images"):
        config.task("kd3a", 0, (1, 8, 8), ["a", "b"], 3)
    assert config.task("kd3a", 0, (8,), ["a", "b"], 3).missing == "mean"
    private = {"privacy.noise": 1.0, "model.norm": "group", "method": "fedavg"}
    with pytest.raises(ConfigError, match="fills the gaps of all"):
        RunConfig.parse({"input.missing": "mean", **private})
    few = torch.tensor([[1.0], [NAN]])
    with pytest.raises(DataError, match=r"2 vectors, too few.*input\.missing=mean"):
        OwnColumns(few, "x", MEAN)


def test_infinite_values_stay_refused(tmp_path: Path) -> None:
    x, y = patients(60, 0, gone=2)
    x[7, 0] = np.inf
    site = saved(tmp_path / "a.npz", x=x, y=y)
    for reading in (Reading(), MEAN):
        with pytest.raises(DataError, match=r"not finite in 1 rows, the first is row 7"):
            data.load_source(site, reading=reading)
    with pytest.raises(DataError, match="not finite"):
        data.verify(site, "source")


@pytest.mark.parametrize("ending", ("csv", "parquet"))
def test_a_table_of_numbers(tmp_path: Path, ending: str) -> None:
    x, y = patients(60, 0, gone=3)
    split = np.where(np.arange(60) < 50, "train", "test")
    path = table(tmp_path / f"a.{ending}", x, y, split=split, id=np.arange(60) + 100)
    found = data.verify(path, "source")
    assert (found.train, found.test, found.shape, found.gaps) == (50, 10, (4,), 3)
    assert found.counts == {"ill": 25, "well": 25} and "in the column chol" in found.warnings[0]
    train, test = data.load_source(path, reading=MEAN), data.load_evaluation(path, reading=MEAN)
    assert train.classes == ("ill", "well") and test is not None and len(test) == 10
    np.testing.assert_allclose(train.x[3:].numpy(), x[3:50], rtol=1e-6)
    assert train.y.tolist() == (1 - y[:50]).tolist()
    assert len(data.identities(path, "target")) == 50
    parts = list(data.batches(path, (4,), 16, reading=MEAN))
    keys = dict(pair for each in parts for pair in zip(each.names, each.keys, strict=True))
    assert len(keys) == 60 and keys["x_train/3"] == "103" and keys["x_test/0"] == "150"


@pytest.mark.parametrize("role", ["source", "target"])
def test_rows_of_empty_cells_are_no_examples(tmp_path: Path, role: Any) -> None:
    """Excel writes them below a sheet; a target filled them with means."""
    rows = [f"{i},{i % 7},{i % 2}" for i in range(50)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["age,dose,label", *rows[:9], ",,", " , ,", "", *rows[9:], ",,", ""]))
    found = data.verify(path, role)
    assert (found.train, found.gaps) == (50, 0)
    assert "3 rows have no value in any cell: passed over" in found.warnings
    path.write_text("path,label\na.png,a\n,\nb.png,b\n")
    for name in ("a.png", "b.png"):
        Image.new("L", (8, 8)).save(tmp_path / name)
    found = data.describe(path, role)
    assert found.train == 2 and "1 row has no value in any cell: passed over" in found.warnings


def test_a_targets_labels_are_not_read(tmp_path: Path) -> None:
    x, _ = patients(60, 0)
    path = table(tmp_path / "a.csv", x, label=["", "?"] * 30)
    assert data.load_target(path).shape == (4,) and data.describe(path, "target").train == 60
    with pytest.raises(DataError, match="no label in row 1"):
        data.load_source(path)


def test_columns_are_taken_by_name_and_one_that_is_absent_is_all_gaps(tmp_path: Path) -> None:
    x, y = patients(60, 0)
    path = table(tmp_path / "a.csv", x, y, note="seen twice")
    with pytest.raises(DataError, match=r"has texts in note.*categories=note=seen twice\|\.\.\.'"):
        data.load_source(path)
    odd = table(tmp_path / "odd.csv", x, y, note=["seen, twice", *["1"] * 59])
    with pytest.raises(
        DataError, match=r"'seen, twice' in row 1 of its column note .*: numbers, or"
    ):
        data.load_source(odd)
    named = Reading.of(columns="values=sex+ca+age,label=label")
    found = data.describe(path, "source", named)
    assert found.shape == (3,) and found.empty == ("ca",) and found.gaps == 60
    filled = data.load_source(path, reading=named.within("", "mean")).x
    np.testing.assert_allclose(filled.numpy(), np.stack([x[:, 2], 0 * x[:, 0], x[:, 0]], 1), 1e-5)
    with pytest.raises(DataError, match=r"none of the columns ca \(it has age"):
        data.load_source(path, reading=Reading.of(columns="values=ca"))
    for odd in ("values=", "values=a+a", "values=a++b"):
        with pytest.raises(ConfigError, match="values=age"):
            Reading.of(columns=odd)
