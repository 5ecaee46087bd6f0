"""Folders as people have them, with lists or a table beside the images, are read as they lie."""

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

import fedda
from fedda import data
from fedda.data.file_lists import lists_of
from fedda.data.form import Reading
from fedda.errors import DataError, FeddaError
from tests.command_lines import call

CLASSES = ("axe", "bat", "cat")


def image(place: Path, value: int) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), value).save(place)
    return place


def values(x: torch.Tensor) -> list[int]:
    return x[:, 0, 0, 0].tolist()


def domain(root: Path, name: str = "clipart", lists: str = ".", ends: str = "") -> dict[str, int]:
    """Four images of each class in ROOT/NAME, lists in ROOT/LISTS -> each file's value."""
    lines: dict[str, list[str]] = {"train": [], "test": []}
    made = {}
    for label, class_name in enumerate(CLASSES):
        for i in range(4):
            path = f"{name}/{class_name}/{i}.png"
            made[path] = 10 * label + i
            image(root / path, made[path])
            lines["test" if i == 3 else "train"].append(f"{path} {label}\n")
    for split, text in lines.items():
        kind = {"": split, "_kfold": "crossval" if split == "test" else split}[ends]
        (root / lists / f"{name}_{kind}{ends}.txt").write_text("".join(text))
    return made


TRAIN, TEST = [0, 1, 2, 10, 11, 12, 20, 21, 22], [3, 13, 23]


def check_read(site: Path) -> None:
    found = data.verify(site, "source")
    assert (found.train, found.test, found.classes) == (9, 3, CLASSES)
    train, test = data.load_source(site), data.load_evaluation(site, classes=CLASSES)
    assert values(train.x) == TRAIN and train.y.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert test is not None and values(test.x) == TEST and test.y.tolist() == [0, 1, 2]
    assert sorted(values(data.load_target(site).x)) == TRAIN
    assert data.describe(site, "target").counts == {}
    named = dict(zip(data.names(site), values(data.load_target(site).x), strict=True))
    assert len(named) == 9


def test_a_domain_as_it_is_downloaded_into_a_folder_of_any_name(tmp_path: Path) -> None:
    """`--data ./clp` with the archive, the lists, and what the archive held, in it or as it."""
    domain(tmp_path / "clp")
    (tmp_path / "clp" / "clipart.zip").write_bytes(b"PK")
    check_read(tmp_path / "clp")
    domain(tmp_path / "there")
    (tmp_path / "there" / "clipart").rename(tmp_path / "clip")
    for name in ("clipart_train.txt", "clipart_test.txt"):
        (tmp_path / "there" / name).rename(tmp_path / "clip" / name)
    check_read(tmp_path / "clip")
    with pytest.raises(DataError, match=r"clipart\.zip is an archive: unpack it"):
        data.verify(tmp_path / "clp" / "clipart.zip", "source")


@pytest.mark.parametrize("ends", ("", "_kfold"))
@pytest.mark.parametrize("lists", (".", "clipart"))
@pytest.mark.parametrize("given", (".", "clipart"))
def test_a_domain_with_its_lists(tmp_path: Path, given: str, lists: str, ends: str) -> None:
    domain(tmp_path / "clp", lists=lists, ends=ends)
    check_read(tmp_path / "clp" / given)


def test_lists_are_read_by_check_and_by_runs(tmp_path: Path) -> None:
    for name in ("clipart", "real", "sketch"):
        domain(tmp_path / "net", name)
    shown = call("data", "check", tmp_path / "net" / "real", "--json", "--min-images", 2)
    assert json.loads(shown.stdout)["test"] == 3
    assert list(data.domains(tmp_path / "net")) == ["clipart", "real", "sketch"]
    assert data.passed_over(tmp_path / "net") == ""
    run = fedda.simulate(
        tmp_path / "net", "real", "fedavg", rounds=1, quiet=True, model_name="mlp", model_hidden="8"
    )
    assert run.results.classes == CLASSES
    (tmp_path / "net" / "notes.txt").write_text("by hand")
    assert "notes.txt" in data.passed_over(tmp_path / "net")


def test_lists_that_are_no_sites(tmp_path: Path) -> None:
    for name in ("clipart", "real"):
        domain(tmp_path / "net", name)
    with pytest.raises(DataError, match=r"lists of 2 domains \(clipart, real\).*net/clipart"):
        data.verify(tmp_path / "net", "source")
    one = tmp_path / "net" / "real_train.txt"
    one.write_text(one.read_text().replace("real/bat/0.png 1", "real/bat/0.png 2"))
    with pytest.raises(DataError, match=r"real_train.txt, line 5.*one label per class folder"):
        data.verify(tmp_path / "net" / "real", "source")
    (tmp_path / "net" / "clipart" / "axe" / "0.png").unlink()
    with pytest.raises(DataError, match=r"axe/0.png cannot be read"):
        data.verify(tmp_path / "net" / "clipart", "source")


def test_lists_beside_a_site_lead_nowhere_else(tmp_path: Path) -> None:
    domain(tmp_path / "net", "real")
    domain(tmp_path / "net", "secret")
    one = tmp_path / "net" / "real_train.txt"
    one.write_text("secret/axe/0.png 0\n")
    with pytest.raises(DataError, match="leads out of this folder"):
        data.verify(tmp_path / "net" / "real", "source")
    shutil.move(one, tmp_path / "elsewhere.txt")
    one.symlink_to(tmp_path / "elsewhere.txt")
    assert "real_test" in str(lists_of(tmp_path / "net" / "real"))
    assert "real_train" not in str(lists_of(tmp_path / "net" / "real"))


def table(
    file: Path, heading: Sequence[str], rows: Sequence[Sequence[object]], delimiter: str = ","
) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(heading)
        writer.writerows(rows)
    return file


def scans(site: Path, folder: str = "images", count: int = 6) -> list[tuple[str, str]]:
    """Images 0.. in a folder of the site -> their names and labels, with the last one first."""
    for i in range(count):
        image(site / folder / f"scan-{i}.png", i)
    return [(f"scan-{i}.png", CLASSES[i % 2]) for i in reversed(range(count))]


def path_of(name: str) -> str:
    return f"images/{name}"


def stem_of(name: str) -> str:
    return name.removesuffix(".png")


@pytest.mark.parametrize("written", (path_of, str, stem_of, lambda name: f"images/{stem_of(name)}"))
@pytest.mark.parametrize(
    "heading, columns",
    (
        (("path", "label"), ""),
        (("image", "label"), ""),
        (("file_name", "label"), ""),
        (("filename", "diagnosis"), "label=diagnosis"),
        (("Image Index", "Finding"), "path=Image Index,label=Finding"),
        (("label", "path"), "path=label,label=path"),
    ),
)
def test_images_with_a_table_beside_them(tmp_path, written, heading, columns) -> None:
    rows = [(written(name), label) for name, label in scans(tmp_path / "site")]
    table(tmp_path / "site" / "labels.csv", heading, rows)
    reading = Reading.of(columns=columns)
    found = data.verify(tmp_path / "site", "source", reading=reading)
    assert found.counts == {"axe": 3, "bat": 3} and not found.test
    train = data.load_source(tmp_path / "site", reading=reading)
    assert values(train.x) == [5, 4, 3, 2, 1, 0] and train.y.tolist() == [1, 0] * 3
    assert sorted(values(data.load_target(tmp_path / "site", reading=reading).x)) == [*range(6)]


def test_a_table_that_is_not_known_is_refused_with_the_option_to_type(tmp_path: Path) -> None:
    rows = [(name, 40 + i, label) for i, (name, label) in enumerate(scans(tmp_path / "site"))]
    file = table(tmp_path / "site" / "all.csv", ("scan", "age", "diagnosis"), rows)
    said = r"\(.*scan, age, diagnosis\).*--columns path=scan,label=diagnosis"
    for place in (tmp_path / "site", file):
        with pytest.raises(DataError, match=said):
            data.verify(place, "source")
    assert sorted(values(data.load_target(tmp_path / "site").x)) == [*range(6)]
    *_, warning = data.describe(tmp_path / "site", "target").warnings
    assert "path=scan,label=diagnosis" in warning and "passed over" in warning
    with pytest.raises(DataError, match=r"no CSV file with all the columns.*scan, age, diagnosis"):
        data.verify(tmp_path / "site", "source", reading=Reading.of(columns="path=nowhere"))
    other = table(tmp_path / "other" / "ages.csv", ("patient", "age"), [("p-1", 40)])
    for name in CLASSES:
        image(tmp_path / "other" / name / "0.png", 0)
    assert data.verify(other.parent, "source").classes == CLASSES  # it names no image


def test_class_folders_count_where_a_table_lies_beside_them(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in CLASSES:
            image(tmp_path / split / name / f"{split}.png", 0)
    table(tmp_path / "notes.csv", ("path", "label"), [("train/axe/train.png", "bat")])
    found = data.describe(tmp_path, "source")
    assert (found.classes, found.train, found.test) == (CLASSES, 3, 3)
    assert "notes.csv" in " ".join(found.warnings)


def test_a_name_of_two_images_is_refused(tmp_path: Path) -> None:
    for folder in ("left", "right"):
        rows = scans(tmp_path / "site", folder)
    table(tmp_path / "site" / "labels.csv", ("path", "label"), rows)
    with pytest.raises(DataError, match=r"left/scan-5.png, right/scan-5.png"):
        data.describe(tmp_path / "site", "source")
    paths = [
        (f"{('left', 'right')[i % 2]}/{stem_of(row[0])}", row[1]) for i, row in enumerate(rows)
    ]
    table(tmp_path / "site" / "labels.csv", ("path", "label"), paths)
    assert data.verify(tmp_path / "site", "source").train == 6


def test_columns_go_to_every_site_of_a_run(tmp_path: Path) -> None:
    for name in ("north", "south", "west"):
        rows = [(stem, label) for stem, label in scans(tmp_path / name)]
        table(tmp_path / name / "all.csv", ("scan", "finding"), rows)
    settings = {"rounds": 1, "model_name": "mlp", "model_hidden": "8", "quiet": True}
    columns = "path=scan,label=finding"
    with pytest.raises(FeddaError, match=columns):
        fedda.simulate(tmp_path, "west", "fedavg", **settings)
    run = fedda.simulate(tmp_path, "west", "fedavg", columns=columns, **settings)
    assert run.results.classes == ("axe", "bat")
    assert Reading.said(Reading.of(columns=columns).flat()).named["path"] == "scan"
