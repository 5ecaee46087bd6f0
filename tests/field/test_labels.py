"""A label names one class, by the same rules in every file and in the library; names decide."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import ImageFolder

import fedda
from fedda import data
from fedda.data import naming
from fedda.errors import DataError
from fedda.library.own_data import folder_of
from tests.command_lines import call

COUNT = 6
RIGHT: dict[str, tuple[list[Any], list[str]]] = {
    "names": (["cat", "dog"] * 3, ["cat", "dog"]),
    "numbers": ([0, 1] * 3, ["0", "1"]),
    "numbers as texts": (["0", "10"] * 3, ["0", "10"]),
    "floats of a column with gaps": ([0.0, 1.0] * 3, ["0", "1"]),
    "floats as texts": (["0.0", "1.0"] * 3, ["0", "1"]),
    "with commas": (["lung, left", "lung, right"] * 3, ["lung, left", "lung, right"]),
    "booleans": ([True, False] * 3, ["False", "True"]),
}
NONE = (None, "", " ", float("nan"), "NaN", "nan", "None", "null", "NA", "n/a", "<NA>", -1, "-1")
NONE += (-1.0, "-1.0", -100, "?", "unlabeled")
MANY = ([0, 1], "cat|dog", "cat;dog", "['cat', 'dog']", "cat,dog", "cat + dog", {"a": 1})
ODD = (0.25, "0.25", "cat\ndog")
WRONG = [*NONE, *MANY, *ODD]


def png(folder: Path, i: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), 40 * i + np.arange(8), np.uint8)).save(folder / f"{i}.png")
    return folder / f"{i}.png"


def in_csv(root: Path, values: list[Any]) -> Path:
    """As pandas writes them."""
    paths = [png(root / "img", i).relative_to(root).as_posix() for i in range(len(values))]
    pd.DataFrame({"path": paths, "label": pd.Series(values, dtype=object)}).to_csv(
        root / "t.csv", index=False
    )
    return root / "t.csv"


def in_parquet(root: Path, values: list[Any]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        values = [value if isinstance(value, list | dict) else [value] for value in values]
        if len({type(value) for value in values}) > 1:
            pytest.skip("a column has one type")
        if len({type(one) for value in values for one in value}) > 1:
            values = [[str(one) for one in value] for value in values]
    contents = [png(root / "img", i).read_bytes() for i in range(len(values))]
    parquet.write_table(arrow.table({"image": contents, "label": values}), root / "t.parquet")
    return root / "t.parquet"


def in_folders(root: Path, values: list[Any]) -> Path:
    for i, value in enumerate(values):
        png(root / "train" / str(value), i)
    return root


def in_npz(root: Path, values: list[Any]) -> Path:
    names = list(dict.fromkeys(map(str, values)))
    x = np.arange(COUNT * 64, dtype=np.uint8).reshape(COUNT, 8, 8)[: len(values)]
    np.savez(root / "a.npz", x=x, y=[names.index(str(v)) for v in values], classes=np.array(names))
    return root / "a.npz"


def in_h5(root: Path, values: list[Any]) -> Path:
    with (
        np.load(in_npz(root, values)) as found,
        pytest.importorskip("h5py").File(root / "a.h5", "w") as file,
    ):
        for name in ("x", "y"):
            file[name] = found[name]
        file["classes"] = [str(name) for name in found["classes"]]
    return root / "a.h5"


def in_library(root: Path, values: list[Any]) -> Path:
    x = np.arange(COUNT * 64, dtype=np.uint8).reshape(COUNT, 8, 8)[: len(values)]
    return folder_of({"a": (x, values)}, root / "data") / "a.npz"


def in_series(root: Path, values: list[Any]) -> Path:
    return in_library(root, pd.Series(values))  # type: ignore[arg-type]


TABLES = (in_csv, in_parquet, in_library, in_series)
NAMED = (in_folders, in_npz, in_h5)  # the classes' names are given apart, so all are texts


@pytest.mark.parametrize("form", RIGHT)
@pytest.mark.parametrize("make", [*TABLES, *NAMED])
def test_a_label_is_the_name_of_a_class(
    tmp_path: Path, make: Callable[[Path, list[Any]], Path], form: str
) -> None:
    values, classes = RIGHT[form]
    found = data.load_source(make(tmp_path, values))
    wanted = classes if make not in NAMED else sorted({str(value) for value in values})
    assert sorted({found.classes[y] for y in found.y.tolist()}) == wanted
    own = [found.classes[y] for y in found.y.tolist()]
    assert [own.count(name) for name in wanted] == [3, 3]
    if make is not in_folders:
        assert len({*own[::2]}) == len({*own[1::2]}) == 1


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("make", [*TABLES, *NAMED])
def test_what_names_no_class_or_several_is_refused(
    tmp_path: Path, make: Callable[[Path, list[Any]], Path], wrong: Any
) -> None:
    rest = [0, 1] if isinstance(wrong, int | float) else ["cat", "dog"]
    values = [*rest, wrong, *rest, rest[0]]
    if make in NAMED and (wrong in (0.25, "0.25", "", " ", "cat,dog", "cat + dog")):
        pytest.skip("a folder or a list of names may be called so")
    if make is in_library and isinstance(wrong, list):
        values = [[v] if not isinstance(v, list) else v for v in values]
    with pytest.raises(DataError) as error:
        data.verify(make(tmp_path, values), "source")
    assert "\n" not in str(error.value)
    if make in (in_csv, in_parquet, in_series) and not isinstance(wrong, list | dict):
        assert "row 3" in str(error.value) or "place 2" in str(error.value)


@pytest.mark.parametrize("pair", [("1", "01"), ("1", "1.0")])
def test_one_number_in_two_writings_is_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    with pytest.raises(DataError, match="one number"):
        naming.names([*pair, "cat"], "x")
    with pytest.raises(DataError, match="one number"):
        data.load_source(in_folders(tmp_path, [*pair, "cat"]))


@pytest.mark.parametrize(
    "heading",
    [
        "path;label",
        "sep=;\npath;label",
        '"sep=;"\r\npath;label',
        "sep=\t\r\npath\tlabel",
        "path\tlabel",
        "path, label",
        "\ufeffpath;label",
    ],
)
def test_what_spreadsheets_write_is_read(tmp_path: Path, heading: str) -> None:
    path = in_csv(tmp_path, ["a", "b"] * 3)
    comma = "\t" if "\t" in heading else ";" if ";" in heading else ", "
    rows = path.read_text().splitlines()[1:]
    text = "\n".join([heading, *(row.replace(",", comma) for row in rows)])
    path.write_text(text, encoding="utf-8")
    found = data.load_source(path)
    assert found.classes == ("a", "b") and found.y.tolist() == [0, 1] * 3


def test_a_column_that_is_missing_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("file;diagnosis\na.png;x\n")
    with pytest.raises(
        DataError, match=r"no column label \(file, diagnosis\).*--columns path=file,label=diagnosis"
    ):
        data.load_source(tmp_path / "t.csv")


LEVELS = {"ant": 30, "bee": 120, "cow": 220}


def tree(root: Path, classes: list[str]) -> ImageFolder:
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(5):
            Image.new("L", (8, 8), LEVELS[name] + i).save(root / name / f"{i}.png")
    return ImageFolder(str(root))


TESTS: dict[str, Callable[[Path], Any]] = {
    "all": lambda root: tree(root, ["ant", "bee", "cow"]),
    "one class less": lambda root: tree(root, ["bee", "cow"]),
    "one class": lambda root: tree(root, ["cow"]),
    "a part": lambda root: Subset(tree(root, ["bee", "cow"]), range(3, 9)),
    "joined": lambda root: ConcatDataset([tree(root / "1", ["cow"]), tree(root / "2", ["bee"])]),
    "a part of joined": lambda root: Subset(
        ConcatDataset([tree(root / "1", ["cow"]), tree(root / "2", ["ant", "bee"])]), range(2, 12)
    ),
}


def shades(labelled: data.Labelled) -> set[tuple[str, int]]:
    names = [labelled.classes[y] for y in labelled.y.tolist()]
    return {(n, int(v) // 10 * 10) for n, v in zip(names, labelled.x[:, 0, 0, 0], strict=True)}


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("role", ["source", "target"])
def test_each_dataset_numbers_its_own_classes(tmp_path: Path, test: str, role: str) -> None:
    train = tree(tmp_path / "train", ["ant", "bee", "cow"])
    sites = {"a": (train, TESTS[test](tmp_path / "test")), "b": train}
    place = folder_of(sites, tmp_path / "data", ["a"] if role == "target" else [])
    found = data.load_evaluation(place / "a.npz", classes=("ant", "bee", "cow"))
    assert found is not None
    assert shades(found) <= {(name, level) for name, level in LEVELS.items()}
    assert len({name for name, _ in shades(found)}) == len({n for n, _ in shades(found)})


@pytest.mark.contrib
@pytest.mark.parametrize("form", ["csv", "npz"])
def test_a_simulation_says_which_tests_are_trained_on(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    draws, root = np.random.default_rng(0), tmp_path / "sites"
    x = {name: draws.normal(0, 1, (60, 3)).astype("float32") for name in ("north", "south", "west")}
    x["west"][:4] = x["west"][50:54]
    x["north"][7] = x["west"][55]
    y = np.arange(60) % 2
    root.mkdir()
    for name, its in x.items():
        if form == "npz":
            parts: Any = {"x_train": its[:50], "y_train": y[:50], "x_test": its[50:]}
            np.savez(root / f"{name}.npz", y_test=y[50:], **parts)
        else:
            frame = pd.DataFrame(its, columns=["a", "b", "c"]).assign(label=y)  # type: ignore[call-overload]
            frame["split"] = np.where(np.arange(60) < 50, "train", "test")
            frame.to_csv(root / f"{name}.csv", index=False)
    about: Any = {"rounds": 1, "baseline": "none", "run_refine": "none", "preset": "table"}
    fedda.simulate(root, "west", "fedavg", **about)
    run = capsys.readouterr().err
    call("look", "--data", root, "--target", "west", "--out", tmp_path / "look")
    look = json.loads((tmp_path / "look" / "look.json").read_text())["text"]
    words = ("--data", root, "--target", "west", "--preset", "table", "--rounds", 1)
    compared = call("compare", "fedavg", *words, "--out", tmp_path / "compared").output
    for said in (run, look, compared):
        assert "west: 4 of the 10 test examples are also training examples at west, so" in said
        assert "west: 1 of the 10 test examples are also training examples at north, so" in said
        assert "at south, so" not in said


@pytest.mark.parametrize("form", ["folders", "csv", "parquet", "npz", "h5"])
@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("shared", [0, 2])
def test_a_test_image_that_is_trained_on_is_said(
    tmp_path: Path, form: str, role: Any, shared: int
) -> None:
    images = [np.full((8, 8), 20 * i + np.arange(8), np.uint8) for i in range(10)]
    test = [*images[:shared], *images[6 : 10 - shared]]
    rows = [("train", image) for image in images[:6]] + [("test", image) for image in test]
    if form in ("npz", "h5"):
        its = {"x_train": np.stack(images[:6]), "y_train": np.arange(6) % 2}
        its |= {"x_test": np.stack(test), "y_test": np.arange(len(test)) % 2}
        path = tmp_path / f"a.{form}"
        if form == "npz":
            np.savez(path, **its)
        else:
            with pytest.importorskip("h5py").File(path, "w") as file:
                for name, values in its.items():
                    file[name] = values
    else:
        path = tmp_path / "x"
        for i, (split, image) in enumerate(rows):
            place = path / split / "ab"[i % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{i}.png")
        names = [next(path.glob(f"*/*/{i}.png")) for i in range(len(rows))]
        about = {"label": ["a", "b"] * (len(rows) // 2), "split": [split for split, _ in rows]}
        if form == "csv":
            its = {"path": [n.relative_to(path).as_posix() for n in names]} | about
            pd.DataFrame(its).to_csv(path / "t.csv", index=False)
            path = path / "t.csv"
        elif form == "parquet":
            arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            made = arrow.table({"image": [n.read_bytes() for n in names]} | about)
            parquet.write_table(made, path / "t.parquet")
            path = path / "t.parquet"
    said = " ".join(data.verify(path, role).warnings)
    assert (f"{shared} of the 4 test examples are also training" in said) == bool(shared)
    shown = call("data", "check", path, "--role", role, "--min-images", 2)
    assert ("also training examples" in shown.output.replace("\n", " ")) == bool(shared)


def test_torch_labels_and_numpy_labels_are_the_same(tmp_path: Path) -> None:
    x = torch.zeros(4, 8, 8, dtype=torch.uint8)
    for i, y in enumerate((torch.tensor([0, 1, 2, 0]), np.array([0, 1, 2, 0], np.uint8))):
        place = folder_of({"a": (x, y)}, tmp_path / str(i))
        assert data.load_source(place / "a.npz").y.tolist() == [0, 1, 2, 0]
