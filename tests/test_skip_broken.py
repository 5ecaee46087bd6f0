"""Image files that cannot be read: an error, or passed over if the site says so."""

import csv
import errno
import logging
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image

import fedda
from fedda.data import Reading, describe, identities, load_evaluation, load_source, load_target
from fedda.data.batchwise import batches
from fedda.errors import DataError
from tests.command_lines import call

SKIP = Reading.of(skip_broken=True)
FEW = ["-c", "rounds=1", "-c", "model.name=mlp", "-c", "model.hidden=8", "-c", "input.size=8"]


def images(folder: Path, *, good: int, bad: int = 0) -> None:
    folder.mkdir(parents=True)
    draws = np.random.default_rng(good)
    for i in range(good):
        Image.fromarray(draws.integers(0, 255, (8, 8), np.uint8)).save(folder / f"{i}.png")
    for i in range(bad):
        whole = (folder / "0.png").read_bytes()
        (folder / f"bad{i}.png").write_bytes(whole[: len(whole) // 2] if i % 2 else b"no image")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sources, of which one has two broken files and its test one; a target with one."""
    root = tmp_path / "sites"
    for site, bad in (("a", 2), ("b", 0)):
        images(root / site / "train" / "cat", good=12, bad=bad)
        images(root / site / "train" / "dog", good=12)
        images(root / site / "test" / "cat", good=3, bad=bad // 2)
    images(root / "t", good=20, bad=1)
    return root


def test_broken_files_are_passed_over_everywhere(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = root / "a", root / "t"
    with pytest.raises(DataError, match="bad0"):
        load_source(source)
    with caplog.at_level(logging.WARNING):
        found = describe(source, "source", SKIP)
    assert (found.train, found.test, found.counts) == (24, 3, {"cat": 12, "dog": 12})
    passed = f"{source / 'train' / 'cat'}: 2 images that cannot be read are passed over"
    assert any(text.startswith(f"{passed} (bad0.png, bad1.png)") for text in found.warnings)
    assert "left out, as they cannot be read: bad0.png, bad1.png" in caplog.text
    training = load_source(source, reading=SKIP)
    assert len(training) == len(identities(source, "source", SKIP)) == 24
    tests = load_evaluation(source, reading=SKIP)
    assert tests is not None and len(tests) == 3
    assert len(load_target(target, reading=SKIP)) == 20
    assert load_source(root / "b").x.equal(load_source(root / "b", reading=SKIP).x)
    names = [name for some, _, _ in batches(target, (1, 8, 8), 4, reading=SKIP) for name in some]
    assert len(names) == 20 and "bad0.png" not in names
    few: Any = {"rounds": 1, "model_name": "mlp", "model_hidden": "8", "input_size": 8}
    run = fedda.simulate(root, "t", "fedavg", skip_broken=True, quiet=True, **few)
    assert [s["examples"] for s in run.results.raw["sites"]] == [24, 24, 20]


def test_a_file_of_other_accounts_is_not_to_be_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Image, "open", denied)
    told = r"0\.png cannot be read \(Permission denied\): let this account read it, or pass over"
    with pytest.raises(DataError, match=told):
        load_source(root / "b")


def test_a_file_that_was_mended_is_read_again(root: Path) -> None:
    assert describe(root / "t", "target", SKIP).train == 20
    (root / "t" / "bad0.png").write_bytes((root / "t" / "0.png").read_bytes())
    assert describe(root / "t", "target", SKIP).train == 21


def test_a_class_of_broken_files_alone_is_an_error(root: Path) -> None:
    images(root / "a" / "train" / "owl", good=1)
    (root / "a" / "train" / "owl" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"none of the 1 images in .*owl can be read"):
        describe(root / "a", "source", SKIP)


def test_the_commands_take_it(root: Path, tmp_path: Path, signal_handlers: None) -> None:
    """A run and its model's predictions."""
    words = ("run", "fedavg", "--simulate", root, "--target", "t", "--dir", tmp_path / "runs")
    assert "bad" in call(*words, *FEW, code=1).output
    call(*words, *FEW, "--name", "skip", "--skip-broken")
    results = fedda.load(tmp_path / "runs" / "skip").results
    assert {s["name"]: s["examples"] for s in results.raw["sites"]} == {"a": 24, "b": 24, "t": 20}
    table = tmp_path / "t.csv"
    words = ("predict", tmp_path / "runs" / "skip", root / "t", "--out", table)
    call(*words, code=1)
    call(*words, "--skip-broken")
    with table.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 20
    words = ("data", "check", root / "a", "--role", "source")
    call(*words, code=1)
    said = call(*words, "--skip-broken", "--min-images", 24).output
    assert "2 images that cannot be read are passed over" in said


def test_a_simulated_run_says_what_does_not_fit_before_it_begins(tmp_path: Path) -> None:
    for site in ("a", "t"):
        for name in ("cat", "dog"):
            for i in range(10):
                part = "test" if i > 7 else "train"
                spelt = name.title() if (site, part) == ("t", "test") else name
                place = tmp_path / "sites" / site / part / spelt / f"{i}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8), 9 * i, np.uint8)).save(place)
    few = {"rounds": 1, "model_name": "mlp", "model_hidden": "8", "quiet": True}
    with pytest.raises(DataError, match=r"tests of the class 'Cat'.*'cat' differs from it only in"):
        fedda.simulate(tmp_path / "sites", "t", "fedavg", **few)
    for file in (tmp_path / "sites" / "t" / "train").rglob("[1-9].png"):
        file.unlink()
    (tmp_path / "sites" / "t" / "train" / "dog" / "0.png").unlink()
    (tmp_path / "sites" / "t" / "train" / "dog").rmdir()
    with pytest.raises(DataError, match=r"has 1 training examples, .*on 2 or more.*add some$"):
        fedda.simulate(tmp_path / "sites", "t", "fedavg", run_evaluate=False, **few)


def test_check_refuses_what_a_site_would_and_names_all_broken_files(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    for i in range(30):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(folder / f"{i}.png")

    words = ("data", "check", tmp_path, "--min-images")
    call(*words, 16)
    said = call(*words, 31, code=1).output
    assert "has 30 training examples, but a site trains on 31 or more" in said
    for i in range(25):
        (folder / f"{i}.png").write_bytes(b"no image")
    said = call(*words, 16, code=1).output
    assert said.count(".png cannot be read") == 25 and "more" not in said
    assert "has 5 training examples" in call(*words, 16, "--skip-broken", code=1).output
    call(*words, 5, "--skip-broken")


def test_broken_images_of_a_table_are_passed_over_with_their_rows(tmp_path: Path) -> None:
    images(tmp_path / "images", good=4, bad=1)
    names = ["0.png", "bad0.png", "1.png", "gone.png", "2.png", "3.png"]
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *zip(names, "xyxyxy", strict=True)])
    with pytest.raises(DataError, match=r"bad0.png.*or pass over such files with --skip-broken"):
        load_source(tmp_path)
    found = load_source(tmp_path, reading=SKIP)
    assert [found.classes[i] for i in found.y] == ["x", "x", "x", "y"]
    assert len(load_target(tmp_path, reading=SKIP)) == 4
    rows = [name for names, _, _ in batches(tmp_path, (1, 8, 8), 3, reading=SKIP) for name in names]
    assert rows == ["0", "2", "4", "5"]
