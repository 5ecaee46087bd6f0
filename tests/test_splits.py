"""The part of the data that a site trains on, in every form of data, and saved data sets."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clients.site.memory import Site
from fedda import data
from fedda.config.inputs import Inputs
from fedda.data import table
from fedda.errors import ConfigError, DataError
from tests.command_lines import call

from .test_tables import encoded, values

PARTS = {"train": range(4), "test": range(10, 12), "validation": range(20, 26)}


def folder(root: Path) -> Path:
    for part, numbers in PARTS.items():
        for i in numbers:
            path = root / part / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 6), i).save(path)
    return root


def archive(root: Path) -> Path:
    root.mkdir()
    arrays: dict[str, Any] = {}
    for part, numbers in PARTS.items():
        arrays[f"x_{part}"] = np.stack([np.full((6, 8), i, np.uint8) for i in numbers])
        arrays[f"y_{part}"] = np.array([i % 2 for i in numbers])
    np.savez(root / "site.npz", classes=np.array(["a", "b"]), **arrays)
    return root / "site.npz"


def listed(root: Path) -> Path:
    """A CSV table of the images of `folder`."""
    folder(root / "images")
    rows = [f"images/{part}/{'ab'[i % 2]}/{i}.png,{'ab'[i % 2]},{part},{'xy'[i % 3 > 0]}"
            for part, numbers in PARTS.items() for i in numbers]  # fmt: skip
    (root / "site.csv").write_text("\n".join(["path,label,split,clinic", *rows]) + "\n")
    return root / "site.csv"


def columns(numbers: range) -> Any:
    arrow = pytest.importorskip("pyarrow")
    features = {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    its = {"image": [encoded(i) for i in numbers], "label": [i % 2 for i in numbers]}
    made = arrow.table(its | {"clinic": ["xy"[i % 3 > 0] for i in numbers]})
    return made.replace_schema_metadata(about)


def parquet(root: Path) -> Path:
    write = pytest.importorskip("pyarrow.parquet").write_table
    root.mkdir()
    for part, numbers in PARTS.items():
        write(columns(numbers), root / f"{part}-00000-of-00001.parquet")
    return root


def saved(root: Path, parts: dict[str, range] | None = None) -> Path:
    """A `DatasetDict` as `save_to_disk` of datasets 5.2 writes it, each split in two files."""
    for part, numbers in (parts or PARTS).items():
        one(root / part, numbers)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": list(parts or PARTS)}))
    return root


def one(root: Path, numbers: range, split: str | None = None, **state: Any) -> Path:
    """A `Dataset` in the same way."""
    arrow = pytest.importorskip("pyarrow")
    root.mkdir(parents=True)
    names = [f"data-0000{k}-of-00002.arrow" for k in range(2)]
    for name, some in zip(names, (numbers[:1], numbers[1:]), strict=True):
        made = columns(some)
        with arrow.ipc.new_stream(str(root / name), made.schema) as stream:
            stream.write_table(made)
    files = [{"filename": name} for name in names]
    (root / "state.json").write_text(json.dumps({"_data_files": files, "_split": split} | state))
    (root / "dataset_info.json").write_text("{}")
    return root


FORMS = {"folder": folder, "npz": archive, "csv": listed, "parquet": parquet, "saved": saved}


@pytest.mark.parametrize("form", FORMS)
def test_a_site_trains_on_the_split_that_it_names(tmp_path: Path, form: str) -> None:
    path = FORMS[form](tmp_path / "site")
    if form != "csv":  # a table whose rows name another split has to be told
        assert sorted(values(data.load_source(path).x)) == [*PARTS["train"]]
    for part in PARTS:
        its = data.Reading(split=part)
        train = data.load_source(path, reading=its)
        assert sorted(values(train.x)) == [*PARTS[part]]
        assert [values(train.x)[i] % 2 for i in range(len(train))] == train.y.tolist()
        target = data.load_target(path, reading=its)
        assert sorted(values(target.x)) == [*PARTS[part]]
        test = data.load_evaluation(path, reading=its)
        # Nobody tests on what was trained on.
        assert test is None if part == "test" else test is not None
        assert test is None or sorted(values(test.x)) == [*PARTS["test"]]
        for role in ("source", "target"):
            described = data.verify(path, role, reading=its)
            assert described.train == len(PARTS[part]) == len(data.identities(path, role, its))
            assert described.test == (0 if part == "test" else 2)
    with pytest.raises(DataError, match=r"(?s)(no split dev|x_dev|split dev).*--split"):
        data.load_source(path, reading=data.Reading(split="dev"))


@pytest.mark.parametrize("name", ["../up", ".hidden", "-x", "a/b"])
def test_a_split_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--split is .*the name of a split"):
        data.Reading.of(split=name)


def test_a_site_and_predictions_keep_to_the_split(tmp_path: Path) -> None:
    path = folder(tmp_path / "site")
    node = {"role": "source", "name": "x", "data": str(path), "reproducible": True}
    site = Site(node | {"split": "validation", "min-images": 6})
    assert site.offer()["examples"] == 6
    assert sorted(values(site.training(Inputs((1, 6, 6))).x)) == [*PARTS["validation"]]
    for form, wanted in (("folder", 6), ("npz", 6)):
        data_at = FORMS[form](tmp_path / form)
        found = data.batches(data_at, (1, 6, 8), 4, reading=data.Reading(split="validation"))
        assert sum(len(names) for names, _, _ in found) == wanted


SECOND, STATE = Path("train/data-00001-of-00002.arrow"), Path("train/state.json")
INDEXED = {"_data_files": [{"filename": SECOND.name}], "_indices_data_files": [{"filename": "i"}]}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda site: (site / STATE).write_text(json.dumps(INDEXED)), "flatten_indices"),
        (lambda site: (site / SECOND).unlink(), f"lacks {SECOND.name}"),
        (lambda site: (site / STATE).write_text("{"), "state.json cannot be read"),
        (lambda site: (site / STATE).write_text("{}"), "names no files"),
        (lambda site: cut(site / SECOND), "cannot be read as Arrow"),
        (lambda site: (site / "dataset_dict.json").write_text('{"splits": 3}'), "names no splits"),
    ],
)
def test_damaged_saved_data_sets_are_refused(tmp_path: Path, damage: Any, words: str) -> None:
    path = saved(tmp_path / "site")
    damage(path)
    with pytest.raises(DataError, match=words):
        data.verify(path, "source")


@pytest.mark.parametrize("form", ["csv", "parquet", "saved"])
def test_a_split_is_cut_into_sites(tmp_path: Path, form: str) -> None:
    path, out = FORMS[form](tmp_path / "all"), tmp_path / "out"
    call("data", "split", path, out, "--by", "clinic", "--split", "validation")
    trained: list[int] = []
    for site in data.domains(out).values():
        trained += values(data.load_source(site).x)
    assert sorted(trained) == [*PARTS["validation"]]
    tests = [data.load_evaluation(site) for site in data.domains(out).values()]
    assert sorted(v for t in tests if t is not None for v in values(t.x)) == [*PARTS["test"]]
    with pytest.raises(DataError, match=r"no (rows of the )?split dev.*--split"):
        table.split(path, tmp_path / "none", "clinic", data.Reading(split="dev"))
    assert not (tmp_path / "none").exists()


def test_what_datasets_saves_is_read_as_it_gives_it(tmp_path: Path) -> None:
    """With the package itself, where it is installed."""
    datasets = pytest.importorskip("datasets")
    images = [Image.new("L", (8, 6), i) for i in range(7)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    made = datasets.Dataset.from_dict(
        {"image": images, "label": [i % 2 for i in range(7)]}, features=features
    ).shuffle(seed=1)
    made.save_to_disk(tmp_path / "site", num_shards=2)
    found = data.load_source(tmp_path / "site")
    wanted = torch.stack([torch.from_numpy(np.array(row["image"])) for row in made])
    assert torch.equal(found.x[:, 0], wanted) and found.y.tolist() == made["label"][:]


@pytest.mark.parametrize("role", ["source", "target"])
def test_two_tables_of_numbers_in_a_folder_are_refused_with_what_to_do(
    tmp_path: Path, role: str
) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("age,label\n1,a\n2,b\n")
    with pytest.raises(DataError, match=r"2 tables \(test\.csv, train\.csv\).* a column split"):
        data.describe(tmp_path, role)  # type: ignore[arg-type]
