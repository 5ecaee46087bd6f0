"""An order that hides classes never leaves the training: row i of what comes out is row i."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedda import data, models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.data.reader import Checked
from fedda.errors import DataError
from fedda.library.outcome import Model
from tests.command_lines import call

COUNT = 12
VALUES = [10 + 20 * i for i in range(COUNT)]  # of image i, so that each can be told
SPLITS = ["train", "test", "train"] * (COUNT // 3)
MLP = ModelConfig(name="mlp", hidden="4")


def pictures(folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    for i, value in enumerate(VALUES):
        Image.new("L", (4, 4), value).save(folder / f"s{i:02d}.png")
    return [f"{folder.name}/s{i:02d}.png" for i in range(COUNT)]


def csv_table(root: Path, more: dict[str, list[str]] | None = None, comma: str = ",") -> Path:
    columns = {"path": pictures(root / "img"), "label": ["a", "b"] * (COUNT // 2)} | (more or {})
    rows = [columns.keys(), *zip(*columns.values(), strict=True)]
    (root / "t.csv").write_text("".join(comma.join(row) + "\n" for row in rows))
    return root / "t.csv"


def parquet_table(root: Path, form: str) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = pictures(root / "img")
    contents = [(root / path).read_bytes() for path in paths]
    columns = {
        "paths": {"path": paths},
        "names": {"image": paths},
        "bytes": {"image": contents, "id": [f"case {i}" for i in range(COUNT)]},
        "dicts": {"image": [{"bytes": c, "path": p} for c, p in zip(contents, paths, strict=True)]},
    }[form]
    parquet.write_table(arrow.table(columns | {"split": SPLITS}), root / "t.parquet")
    return root / "t.parquet"


def folder_of_parquets(root: Path) -> Path:
    """Two files, the training rows in one and the test rows in the other."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    contents = [(root / path).read_bytes() for path in pictures(root / "img")]
    for name, rows in (("test-0", contents[:5]), ("train-0", contents[5:])):
        (root / "hf").mkdir(exist_ok=True)
        parquet.write_table(arrow.table({"image": rows}), root / "hf" / f"{name}.parquet")
    return root / "hf"


def class_folders(root: Path) -> Path:
    for i, path in enumerate(pictures(root / "all")):
        place = root / "all" / SPLITS[i] / ("a", "b")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        (root / path).rename(place / Path(path).name)
    return root / "all"


def arrays(root: Path, end: str = "npz") -> Path:
    x = np.array(VALUES, np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    its = {"x_train": x[:7], "x_test": x[7:], "y_test": np.arange(5) % 2}
    root.mkdir(exist_ok=True)
    if end == "npz":
        np.savez(root / "a.npz", **its)  # type: ignore[arg-type]
        return root / "a.npz"
    with pytest.importorskip("h5py").File(root / "a.h5", "w") as file:
        for name, values in its.items():
            file[name] = values
    return root / "a.h5"


NUMBERS = [str(i) for i in range(COUNT)]
PATHS = [f"img/s{i:02d}.png" for i in range(COUNT)]
IDS, CASES = ([f"{before}{i}" for i in range(COUNT)] for before in ("k", "case "))
IN_FILES = [f"test-0.parquet/{i}" for i in range(5)] + [f"train-0.parquet/{i}" for i in range(7)]
IN_ARRAYS = [f"x_train/{i}" for i in range(7)] + [f"x_test/{i}" for i in range(5)]
FORMS: dict[str, tuple[Callable[[Path], Path], list[str], list[str]]] = {
    "csv": (csv_table, NUMBERS, PATHS),
    "csv with splits": (lambda root: csv_table(root, {"split": SPLITS}), NUMBERS, PATHS),
    "csv with ids": (lambda root: csv_table(root, {"id": IDS}), NUMBERS, IDS),
    "csv with semicolons": (lambda root: csv_table(root, None, ";"), NUMBERS, PATHS),
    "csv with tabs": (lambda root: csv_table(root, None, "\t"), NUMBERS, PATHS),
    "parquet of paths": (lambda root: parquet_table(root, "paths"), NUMBERS, PATHS),
    "parquet of names": (lambda root: parquet_table(root, "names"), NUMBERS, PATHS),
    "parquet of bytes": (lambda root: parquet_table(root, "bytes"), NUMBERS, CASES),
    "parquet of images": (lambda root: parquet_table(root, "dicts"), NUMBERS, PATHS),
    "parquets": (folder_of_parquets, IN_FILES, []),
    "npz": (arrays, IN_ARRAYS, []),
    "h5": (lambda root: arrays(root, "h5"), IN_ARRAYS, []),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [5, 100])
def test_every_row_is_predicted_in_its_order(tmp_path: Path, form: str, batch: int) -> None:
    make, names, keys = FORMS[form]
    path = make(tmp_path / "x")
    found = list(data.batches(path, (1, 4, 4), batch))
    assert [name for its, _, _ in found for name in its] == names
    assert torch.cat([x.x[:, 0, 0, 0] for _, x, _ in found]).tolist() == VALUES
    assert [key for some in found for key in some.keys] == keys


def by_name(path: Path) -> dict[str, int]:
    """The value of each example that predictions name."""
    return {
        name: int(value)
        for its, some, _ in data.batches(path, (1, 4, 4), 5)
        for name, value in zip(its, some.x[:, 0, 0, 0], strict=True)
    }


@pytest.mark.parametrize("form", [*FORMS, "folders"])
def test_what_a_target_trains_on_can_be_told(tmp_path: Path, form: str) -> None:
    """The names are in the order of the examples, which itself says nothing of classes."""
    path = (class_folders if form == "folders" else FORMS[form][0])(tmp_path / "x")
    x, names = data.load_target(path).x, data.names(path)
    every = by_name(path)
    where = "train/" if form == "folders" else ""
    assert [every[where + name.removeprefix(where)] for name in names] == x[:, 0, 0, 0].tolist()
    assert len(set(names)) == len(names) == len(x)


@pytest.mark.parametrize("form", FORMS)
def test_the_command_and_the_library_answer_row_by_row(tmp_path: Path, form: str) -> None:
    make, names, keys = FORMS[form]
    path, model = make(tmp_path / "x"), tmp_path / "m.safetensors"
    network = models.build(MLP, (1, 4, 4), 2, seed=0)
    models.save(model, network, config=MLP, inputs=Inputs((1, 4, 4)), classes=("a", "b"))
    x = torch.tensor(VALUES, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4)
    right = models.predict(models.load(model)[0], x)[:, 1].tolist()
    assert len({f"{each:.6g}" for each in right}) == COUNT
    done = call("predict", model, path, "--batch", 5)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["file"] for row in rows] == names
    assert [row["key"] for row in rows if "key" in row] == keys
    assert [float(row["p_b"]) for row in rows] == pytest.approx(right, rel=1e-4)
    own = Model(*models.load(model)).probabilities(path)
    assert own[:, 1].tolist() == pytest.approx(right, rel=1e-4)


@pytest.mark.contrib
@pytest.mark.parametrize("form", [*FORMS, "folders"])
def test_an_image_to_label_is_the_file_it_says(tmp_path: Path, form: str) -> None:
    path = (class_folders if form == "folders" else FORMS[form][0])(tmp_path / "x")
    count = len(data.names(path))
    call("label", "--target", path, "--n", count, "--out", tmp_path / "out")
    every = by_name(path)
    with (tmp_path / "out" / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == count
    for row in rows:
        shown = int(np.asarray(Image.open(tmp_path / "out" / row["image"]))[0, 0])
        name = row["file"] if row["file"] in every else f"train/{row['file']}"
        assert every[name] == shown


def test_a_split_alone_keeps_its_rows_numbers(tmp_path: Path) -> None:
    path = csv_table(tmp_path / "x", {"split": SPLITS})
    ((names, x, _),) = data.batches(path, (1, 4, 4), 99, reading=data.Reading(split="test"))
    assert names == [str(i) for i in range(COUNT) if SPLITS[i] == "test"]
    assert x.x[:, 0, 0, 0].tolist() == [VALUES[int(name)] for name in names]


def test_another_packages_reader_numbers_what_it_gives() -> None:
    class Given:
        def target(self, channels: int, size: int, progress: object) -> data.Unlabelled:
            return data.Unlabelled(torch.zeros(3, 1, 4, 4, dtype=torch.uint8))

    assert Checked(Given(), "x", Path("x")).names() == ["0", "1", "2"]  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(8, 6, 3), (8, 6, 1), (3, 8, 6), (8, 6, 4), (8, 6)])
def test_one_image_has_one_answer(shape: tuple[int, ...]) -> None:
    """Or it is refused, where it could be several."""
    colours = 3 if 3 in shape else 1
    model = models.build(MLP, (colours, 8, 8), 2, seed=0)
    about = models.Meta(MLP, Inputs((colours, 8, 8)), classes=("a", "b"), version="")
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    given = torch.from_numpy(x) if shape[0] == 3 else x
    try:
        assert len(Model(model, about).predict(given)) == 1
    except DataError as error:
        assert "one image or several" in str(error) and shape != (8, 6, 3)
