"""No site is passed over without a word, and `check` refuses whatever a run would refuse."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedda
from clients.site.memory import Site
from fedda import data
from fedda.errors import DataError, RunError
from fedda.settings import Task
from tests.command_lines import call

CLASSES = ("cat", "dog", "fox")


def arrays(count: int = 30) -> dict[str, np.ndarray]:
    y = np.arange(count) % 2
    noise = np.random.default_rng(0).integers(0, 40, (count, 8, 8))
    return {"x": (60 + 130 * y[:, None, None] + noise).astype(np.uint8), "y": y}


def folders(place: Path, classes: tuple[str, ...], test: tuple[str, ...] = ()) -> Path:
    for split, names in (("train", classes), ("test", test)):
        for name in names:
            (place / split / name).mkdir(parents=True)
            for i in range(12):
                level = 60 + 80 * CLASSES.index(name) + i + (split == "test")
                Image.new("L", (8, 8), level).save(place / split / name / f"{i}.png")
    return place


def site(root: Path, form: str) -> str:
    """Write a site -> its name."""
    if form == "npz":
        np.savez(root / "a.npz", **arrays())  # type: ignore[arg-type]
    elif form == "NPZ":
        np.savez(root / "b.npz", **arrays())  # type: ignore[arg-type]
        (root / "b.npz").rename(root / "b.NPZ")
    elif form == "h5":
        with pytest.importorskip("h5py").File(root / "c.h5", "w") as file:
            for name, values in arrays().items():
                file[name] = values
    elif form == "folder":
        folders(root / "d", ("cat", "dog"))
    elif form == "csv":
        (root / "e.csv").write_text("path;label\nd/train/cat/0.png;cat\n")
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"image": [b"x"], "label": ["cat"]}), root / "f.parquet")
    return {"npz": "a", "NPZ": "b", "h5": "c", "folder": "d", "csv": "e", "parquet": "f"}[form]


FORMS = ("npz", "NPZ", "h5", "folder", "csv", "parquet")


@pytest.mark.contrib
def test_each_form_is_a_site_and_all_else_is_named(tmp_path: Path) -> None:
    names = [site(tmp_path, form) for form in FORMS]
    assert list(data.domains(tmp_path)) == names
    assert data.passed_over(tmp_path) == ""
    (tmp_path / "README.md").touch()
    (tmp_path / ".hidden").touch()
    assert list(data.domains(tmp_path)) == names
    assert "no sites, and passed over: README.md; a site is" in data.passed_over(tmp_path)
    (tmp_path / "costs.csv").write_text("what,euros\n")
    with pytest.raises(DataError, match="a source needs labels"):
        data.domains(tmp_path)


@pytest.mark.parametrize("form", ["npz", "h5", "csv", "parquet"])
def test_two_sites_of_one_name_are_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / site(tmp_path, form)).mkdir()
    with pytest.raises(RunError, match="would both be the site"):
        data.domains(tmp_path)


@pytest.mark.contrib
def test_a_site_in_hdf5_takes_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("npz", "h5"):
        site(tmp_path, form)
    np.savez(tmp_path / "t.npz", **arrays())  # type: ignore[arg-type]
    (tmp_path / "notes.txt").touch()
    run = fedda.simulate(
        tmp_path, "t", "fedavg", rounds=1, baseline="none", model_name="mlp", model_hidden="4"
    )
    assert [each["name"] for each in run.results.raw["sites"]] == ["a", "c", "t"]
    assert "notes.txt" in capsys.readouterr().err


def task(classes: tuple[str, ...]) -> Task:
    return Task(shape="1,8,8", class_names="\n".join(classes))


@pytest.mark.parametrize("classes", [CLASSES, ("fox", "dog", "cat"), ("dog", "eel", "cat", "fox")])
@pytest.mark.parametrize("own", [CLASSES, ("cat", "fox"), ("fox",)])
def test_a_sites_labels_are_numbered_as_the_run_does(
    tmp_path: Path, own: tuple[str, ...], classes: tuple[str, ...]
) -> None:
    place = folders(tmp_path / "x", own, own)
    found = Site({"role": "source", "data": str(place), "reproducible": True})
    for labelled in (found.learnt_from(task(classes)), found.tested_on(task(classes))):
        assert isinstance(labelled, data.Labelled) and labelled.classes == classes
        for x, y in zip(labelled.x[:, 0, 0, 0].tolist(), labelled.y.tolist(), strict=True):
            assert classes[y] == CLASSES[(x - 60) // 80]


def test_a_source_is_told_which_classes_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = folders(tmp_path / "x", ("cat", "dog"))
    found = Site({"role": "source", "data": str(place)})
    found.check_fit(task(CLASSES))
    assert "no example: ['fox']" in caplog.text
    assert found.offer()["classes"] == ["cat", "dog"]  # and no counts
    with pytest.raises(DataError, match="class 'dog' of this site is not among"):
        found.learnt_from(task(("cat", "fox")))


def test_an_empty_class_folder_is_a_class_without_examples(tmp_path: Path) -> None:
    place = folders(tmp_path / "x", ("cat", "dog"))
    (place / "train" / "fox").mkdir()
    found = data.verify(place, "source")
    assert found.classes == CLASSES and found.counts == {"cat": 12, "dog": 12, "fox": 0}
    assert any("no example of the class fox" in text for text in found.warnings)
    assert data.load_source(place).classes == CLASSES
    (place / "train" / "fox" / "notes.txt").touch()
    with pytest.raises(DataError, match=r"only notes\.txt.* train or test"):
        data.describe(place, "source")


def of(method: str) -> Any:
    own = [f"{top}/{method}.py" for top in ("clients", "strategies", "fedda/algorithms")]
    own.append(f"fedda/contrib/methods/{method}")
    return pytest.param(method, marks=pytest.mark.nightly("clients/site", "clients/base.py", *own))


@pytest.mark.parametrize(
    "method", ["fedavg", "kd3a", *map(of, ("feddadil", "shot", "decision", "mdan"))]
)
def test_a_source_without_one_class_takes_part(tmp_path: Path, method: str) -> None:
    sites = (("a", CLASSES), ("b", ("fox", "cat")), ("c", CLASSES), ("t", CLASSES))
    for name, classes in sites:
        folders(tmp_path / "sites" / name, classes, CLASSES if name == "t" else ())
    model: dict[str, Any] = {"model_name": "mlp", "model_hidden": "4", "train_batch_size": 8}
    if method == "mdan":
        model |= {"exchange_min_examples": 4, "exchange_expose_features": True, "rounds": 4}
    run = fedda.simulate(tmp_path / "sites", "t", method, baseline="none", **{"rounds": 2, **model})
    assert run.results.classes == CLASSES
    events = json.loads((run.folder / "results.json").read_text())["events"]
    (lacks,) = (event for event in events if event["what"] == "classes")
    assert lacks["site"] == "b" and "does not have the classes 'dog', which" in lacks["text"]


def test_a_class_that_two_sources_spell_in_two_ways_is_told_as_perhaps_one(tmp_path: Path) -> None:
    for name, last in (("a", "fox"), ("b", "dog"), ("t", "fox")):
        folders(tmp_path / "sites" / name, ("cat", last))
    model: dict[str, Any] = {"model_name": "mlp", "model_hidden": "4", "train_batch_size": 8}
    about = {"baseline": "none", "rounds": 1, "run_refine": "none"} | model
    run = fedda.simulate(tmp_path / "sites", "t", "fedavg", **about)
    events = json.loads((run.folder / "results.json").read_text())["events"]
    told = {each["site"]: each["text"] for each in events if each["what"] == "classes"}
    assert "alone names the classes 'fox'" in told["a"] and "alone name 'dog'" in told["a"]
    assert "alone name 'fox'" in told["b"] and "one class has two names" in told["b"]


@pytest.mark.parametrize("name", [b"caf\xe9", b"two\nlines", b"nan", b"-1"])
def test_a_class_folder_that_no_run_takes_is_refused_by_name(tmp_path: Path, name: bytes) -> None:
    place = folders(tmp_path / "x", ("cat", "dog"))
    os.mkdir(os.fsencode(place / "train") + b"/" + name)
    image = (place / "train" / "cat" / "0.png").read_bytes()
    Path(os.fsdecode(os.fsencode(place / "train") + b"/" + name + b"/1.png")).write_bytes(image)
    shown = ascii(os.fsdecode(name))[1:-1]
    for command in ("check", "show"):
        done = call("data", command, place, code=1)
        assert "Traceback" not in done.output
        assert f"'{shown}'" in done.output
    with pytest.raises(DataError, match="rename it"):
        data.load_source(place)


def test_a_targets_table_needs_no_labels(tmp_path: Path) -> None:
    (tmp_path / "north.csv").write_text("age,label\n1,a\n2,b\n")
    (tmp_path / "east.csv").write_text("age\n1\n2\n")
    assert {*data.domains(tmp_path, targets=["east"])} == {"north", "east"}
    with pytest.raises(DataError, match=r"east\.csv has no column label"):
        data.domains(tmp_path)
    (tmp_path / "notes.csv").write_text("text\nhello\n")
    with pytest.raises(DataError, match=r"notes\.csv has no number in its first row"):
        data.domains(tmp_path, targets=["east", "notes"])
