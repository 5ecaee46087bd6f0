"""Further forms of a site's data: tables of images, Hugging Face's parquet, HDF5."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedda import data
from fedda.data import table
from fedda.data.cache import Cache, Stored
from fedda.errors import DataError


def images(root: Path, count: int = 6) -> list[Path]:
    """Gray images of 8 x 6 pixels; image i is i everywhere."""
    root.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("L", (8, 6), i).save(root / f"{i}.png")
    return [root / f"{i}.png" for i in range(count)]


def rows(count: int = 6) -> list[dict[str, str]]:
    """Two domains in turns, classes cat and dog, the last two rows to test."""
    return [
        {"path": f"pictures/{i}.png", "label": ("dog", "cat")[i // 2 % 2]}
        | {"split": "test" if i >= count - 2 else "train", "domain": ("photo", "sketch")[i % 2]}
        for i in range(count)
    ]


def write(path: Path, given: list[dict[str, str]]) -> Path:
    images(path.parent / "pictures")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(given[0]))
        writer.writeheader()
        writer.writerows(given)
    return path


def values(x: torch.Tensor) -> list[int]:
    return x[:, 0, 0, 0].tolist()


def test_a_csv_table(tmp_path: Path) -> None:
    path = write(tmp_path / "site.csv", rows())
    train, test = data.load_source(path), data.load_evaluation(path, classes=("cat", "dog"))
    assert train.classes == ("cat", "dog") and train.shape == (1, 6, 8)
    assert values(train.x) == [0, 1, 2, 3] and train.y.tolist() == [1, 1, 0, 0]
    assert test is not None and values(test.x) == [4, 5] and test.y.tolist() == [1, 1]
    assert sorted(values(data.load_target(path).x)) == [0, 1, 2, 3]
    found = data.verify(path, "source")
    assert (found.train, found.test, found.counts) == (4, 2, {"cat": 2, "dog": 2})
    assert data.describe(path, "target").classes == ("dog",)
    assert len(set(data.identities(path, "source"))) == 4
    assert torch.equal(data.load_target(path, size=4).x, data.load_target(path, size=4).x)
    cached = data.load_source(path, size=4, resize="crop", cache=Cache(tmp_path / "c", True)).x
    assert isinstance(cached, Stored)
    assert torch.equal(cached, data.load_source(path, size=4, resize="crop").x)
    (named, first, _), *_ = data.batches(path, (1, 4, 4), 3)
    assert named == ["0", "1", "2"] and first.shape == (1, 4, 4)


def test_a_target_needs_no_labels_and_uses_none(tmp_path: Path) -> None:
    bare = [{"path": row["path"]} for row in rows()]
    path = write(tmp_path / "site.csv", bare)
    assert len(data.load_target(path)) == 6 and data.load_evaluation(path) is None
    with pytest.raises(DataError, match=r"no column label.*--role target"):
        data.load_source(path)
    path = write(tmp_path / "odd.csv", [row | {"label": ""} for row in rows()[:4]])
    assert len(data.load_target(path)) == 4
    with pytest.raises(DataError, match="no label in row 1"):
        data.load_source(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"split": "val"}, "split 'val': train or test"),
        ({"path": "pictures/gone.png"}, r"gone\.png cannot be read"),
        ({"split": "test", "label": "cow"}, r"class 'cow'.*\(cat, dog\)"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, changed: dict[str, str], words: str) -> None:
    given = rows()
    given[0] |= changed
    path = write(tmp_path / "site.csv", given)
    with pytest.raises(DataError, match=words):
        data.load_source(path)


def test_damaged_tables_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text, words in (
        (b"name,label\nx.PNG,y\n", "no column path"),
        (b"path,label\na.png\n", "more or fewer values than columns in line 2"),
        (b"path,label\n", "no training rows"),
        (b"path,label\n\xff\xfe,b\n", "cannot be read as CSV .*: write it as UTF-8"),
        (b'age,label\n1,"a\n2,b\n3,"c" d\n', "cannot be read as CSV .*: close each quote"),
    ):
        path.write_bytes(text)
        with pytest.raises(DataError, match=words):
            data.verify(path, "source")


def encoded(i: int) -> dict[str, Any]:
    out = io.BytesIO()
    Image.new("L", (8, 6), i).save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def hugging_face(folder: Path, damaged: bool = False, hidden: int | None = None) -> Path:
    """A data set as Hugging Face writes it: splits in files, numbers with names in the metadata."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "data").mkdir(parents=True)
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    for split, numbers in (("train", [0, 1, 2, 3]), ("test", [4, 5])):
        columns = {
            "image": [encoded(i) for i in numbers],
            "label": [i % 2 for i in numbers],
            "domain": ["photo" if i < 2 else "sketch" for i in numbers],
        }
        if hidden is not None and split == "test":
            columns["label"] = [hidden] * len(numbers)
        if damaged:
            columns["image"][0]["bytes"] = columns["image"][0]["bytes"][:50]
        made = arrow.table(columns).replace_schema_metadata(about)
        parquet.write_table(made, folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


SITE = "age,label\n1,a\n2,b\n"
NO_SITES = {
    "latin.csv": ("age,label\n1,h\xf6her\n".encode("latin-1"), "write it as UTF-8"),
    "utf16.csv": (SITE.encode("utf-16-le"), "zero bytes, as UTF-16 has without a mark"),
    "empty.csv": (b"", "empty.csv is empty: write it again"),
    "bars.csv": (SITE.replace(",", "|").encode(), "separate columns by commas, semicolons or tabs"),
    "case.csv": (b"age,Label\n1,a\n2,b\n", "--columns label=Label"),
    "west.csv": (b"age,diagnosis\n1,a\n2,b\n", "no column label"),
    "texts.csv": (b"sex,label\nf,a\nm,b\n", "no number in its first row"),
    "cut.parquet": (b"PAR1", "cannot be read as parquet"),
    "north.tsv": (SITE.encode(), "save a table as .csv"),
    "north.xlsx": (b"PK", "save a table as .csv"),
    "north.csv.gz": (b"\x1f\x8b", "save a table as .csv"),
    "north.zip": (b"PK", "unpack it"),
}


@pytest.mark.parametrize("name", NO_SITES)
@pytest.mark.parametrize("sites", [("east",), ()])
def test_a_file_of_data_that_is_no_site_is_refused_beside_such_files(
    tmp_path: Path, name: str, sites: tuple[str, ...]
) -> None:
    """Else a run goes on without a hospital, and nobody knows why."""
    for site in sites:
        (tmp_path / f"{site}.csv").write_text(SITE)
    content, reason = NO_SITES[name]
    (tmp_path / name).write_bytes(content)
    for papers in ("README.md", "notes.txt", "made.json", "benchmark.json"):
        (tmp_path / papers).touch()
    with pytest.raises(DataError, match=r"; or move it out of .* each file of data is a site") as e:
        data.domains(tmp_path)
    assert reason in str(e.value) and name in str(e.value)
    (tmp_path / name).unlink()
    assert [*data.domains(tmp_path)] == [*sites]
    passed = "no sites, and passed over: README.md, made.json, notes.txt; a site is a folder or one"
    assert passed in data.passed_over(tmp_path)


def test_a_table_beside_folders_of_images_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    for name in ("latin.csv", "west.csv"):
        (tmp_path / name).write_bytes(NO_SITES[name][0])
    head, *reasons = data.passed_over(tmp_path).split("\n  ")
    assert head.endswith("no sites, and passed over: latin.csv, west.csv")
    assert "write it as UTF-8" in reasons[0] and "no column label" in reasons[1]


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_folder_with_a_table_among_others_says_how_to_give_it(tmp_path: Path, role: Any) -> None:
    (tmp_path / "Data.CSV").write_text("age,label\n1,a\n2,b\n")
    assert data.describe(tmp_path, role).train == 2
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"\(Data\.CSV is a table: give its own path"):
        data.describe(tmp_path, role)


def test_hugging_face_parquet(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "hf")
    train, test = data.load_source(path), data.load_evaluation(path)
    assert train.classes == ("cat", "dog") and train.y.tolist() == [0, 1, 0, 1]
    assert values(train.x) == [0, 1, 2, 3] and test is not None and values(test.x) == [4, 5]
    assert table.split(path, tmp_path / "out", "domain") == {"photo": 2, "sketch": 4}
    sketch = data.load_source(tmp_path / "out" / "sketch")
    assert values(sketch.x) == [2, 3] and sketch.classes == ("cat", "dog")
    with pytest.raises(DataError, match=r"row 1 of .*parquet cannot be read as an image"):
        data.verify(hugging_face(tmp_path / "bad", damaged=True), "target")


def test_parquet_with_paths(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "site.csv", rows())
    columns = {name: [row[name] for row in rows()] for name in rows()[0]}
    parquet.write_table(arrow.table(columns), tmp_path / "site.parquet")
    plain, same = (data.load_source(tmp_path / f"site.{end}") for end in ("csv", "parquet"))
    assert torch.equal(plain.x, same.x) and torch.equal(plain.y, same.y)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        data.verify(tmp_path / "bad.parquet", "source")


def arrays() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    return {"x_train": x, "y_train": np.arange(6) % 2, "x_test": x[:2], "y_test": np.arange(2)}


@pytest.mark.contrib
def test_hdf5_is_read_as_npz(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    np.savez(tmp_path / "a.npz", **arrays(), classes=np.array(["cat", "dog"]))  # type: ignore[arg-type]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in arrays().items():
            file[name] = array
        file["classes"] = ["cat", "dog"]
        file.create_group("notes")
    for load in (data.load_source, data.load_evaluation):
        ours, theirs = load(tmp_path / "a.h5", size=5), load(tmp_path / "a.npz", size=5)
        assert ours is not None and theirs is not None and ours.classes == ("cat", "dog")
        assert torch.equal(ours.x, theirs.x) and torch.equal(ours.y, theirs.y)
    assert data.verify(tmp_path / "a.h5", "target").train == 6
    (tmp_path / "b.h5").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        data.load_source(tmp_path / "b.h5")


@pytest.mark.contrib
def test_hdf5_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = arrays()["x_train"]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")
    with pytest.raises(DataError, match="no training examples"):
        data.load_target(tmp_path / "a.h5")


@pytest.mark.parametrize(("name", "extra"), [("a.h5", "hdf5"), ("a.parquet", "parquet")])
def test_a_missing_package_is_named(
    tmp_path: Path, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> None:
        raise ImportError(module)

    monkeypatch.setattr("fedda.data.optional.import_module", missing)
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"not installed: pip install 'fedda\[{extra}\]'"):
        data.load_target(tmp_path / name)
