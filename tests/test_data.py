"""A site's data: what can be read, what is refused, and that a target has no labels."""

import json
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedda import data
from fedda.data.show import contact_sheet
from fedda.errors import ConfigError, DataError, RunError
from tests.command_lines import call

RNG = np.random.default_rng(0)
RED = (255, 0, 0)


def picture(path: Path, colour: int | tuple[int, ...] = 0, size: tuple[int, int] = (4, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "L" if isinstance(colour, int) else "RGB"
    Image.new(mode, size, colour).save(path)
    return path


def folder(root: Path, files: Mapping[str, int | tuple[int, ...]]) -> Path:
    for name, colour in files.items():
        picture(root / name, colour)
    return root


def arrays(**others: Any) -> dict[str, Any]:
    """Return gray training images with labels 0, 1, 2, 0, 1, 2, with the changes in `others`."""
    x = np.arange(120, dtype=np.uint8).reshape(6, 4, 5)
    return {"x_train": x, "y_train": np.arange(6) % 3} | others


def npz(path: Path, given: dict[str, Any]) -> Path:
    np.savez(path, allow_pickle=True, **{k: v for k, v in given.items() if v is not None})
    return path


def csr(dense: np.ndarray, name: str) -> dict[str, np.ndarray]:
    """Compress sparse rows with two loops, with small index types as in files."""
    values, columns, ends = [], [], [0]
    for row in dense:
        for column, value in enumerate(row):
            if value:
                values.append(value)
                columns.append(column)
        ends.append(len(values))
    return {
        f"{name}_data": np.array(values, dtype=dense.dtype),
        f"{name}_indices": np.array(columns, dtype=np.uint16),
        f"{name}_indptr": np.array(ends, dtype=np.int32),
        f"{name}_shape": np.array(dense.shape),
    }


# What can be read


def test_image_folder_of_a_source(tmp_path: Path) -> None:
    files = {"train/b/1.png": 20, "train/b/2.BMP": 30, "train/a/1.png": 10}
    folder(tmp_path, files | {"test/b/1.png": 40})
    train, test = data.load_source(tmp_path), data.load_evaluation(tmp_path)
    assert train.classes == ("a", "b") and train.kind == "image" and len(train) == 3
    assert train.shape == (1, 4, 4) and train.x.dtype == torch.uint8
    assert train.x[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert train.y.tolist() == [0, 1, 1] and train.y.dtype == torch.int64
    # The test folder has only class b, but numbers it as the training folder does.
    assert test is not None and test.y.tolist() == [1] and test.classes == ("a", "b")


@pytest.mark.parametrize("ending", ["png", "jpg", "jpeg", "bmp", "webp", "tif", "tiff", "PNG"])
def test_every_image_format_keeps_its_colour(tmp_path: Path, ending: str) -> None:
    folder(tmp_path, {f"red/1.{ending}": RED})
    pixel = data.load_source(tmp_path).x[0, :, 2, 2].int()
    assert (pixel - torch.tensor(RED)).abs().max() <= 3  # JPEG and WebP are lossy


def test_colour_and_grayscale_in_one_folder_is_colour(tmp_path: Path) -> None:
    folder(tmp_path, {"a/1.png": 7, "a/2.png": RED, "b/1.png": 9})
    x = data.load_source(tmp_path).x
    assert x[0, :, 0, 0].tolist() == [7, 7, 7] and x[1, :, 0, 0].tolist() == list(RED)
    assert data.load_source(tmp_path, channels=1).x[1, 0, 0, 0] == 76  # 0.299 * 255
    warnings = data.describe(tmp_path, "source").warnings
    assert len(warnings) == 1 and "grayscale" in warnings[0]


def test_transparent_palette_image_is_read_without_a_warning(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([*RED, 0, 255, 0])
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "1.png", transparency=b"\xff\x00")
    assert data.load_source(tmp_path).x[0, :, 0, 0].tolist() == list(RED)


def test_photo_on_its_side_is_turned_upright(tmp_path: Path) -> None:
    image = Image.new("L", (6, 4), 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "1.jpg", exif=exif)
    assert data.describe(tmp_path, "source").shape == (1, 6, 4)
    assert data.load_source(tmp_path).shape == (1, 6, 4)


def test_mixed_sizes_are_resized_while_reading(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png", 50, (4, 4))
    picture(tmp_path / "a" / "2.png", 90, (10, 6))
    train = data.load_source(tmp_path, size=5)
    assert train.shape == (1, 5, 5)
    assert train.x.flatten(1).unique(dim=1).flatten().tolist() == [50, 90]
    found = data.describe(tmp_path, "source")
    assert found.shape == (1, 0, 0) and any("set input.size" in w for w in found.warnings)
    assert data.verify(tmp_path, "source") == found


@pytest.mark.parametrize("colour", [False, True])
def test_npz_images(tmp_path: Path, colour: bool) -> None:
    shape = (6, 4, 5, 3) if colour else (6, 4, 5)
    x = RNG.integers(0, 256, shape, dtype=np.uint8)
    test = {"x_test": x[:2], "y_test": np.array([2, 0], dtype=np.int32)}
    path = npz(tmp_path / "site.npz", arrays(x_train=x, **test))
    train, evaluation = data.load_source(path), data.load_evaluation(path)
    assert train.shape == ((3 if colour else 1), 4, 5) and train.classes == ("0", "1", "2")
    assert train.x[3, -1, 1, 2] == (x[3, 1, 2, 2] if colour else x[3, 1, 2])
    assert evaluation is not None and evaluation.y.tolist() == [2, 0]
    # The folder that contains the file gives the same.
    assert torch.equal(data.load_source(tmp_path).x, train.x)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float64, ">f4"])
def test_npz_vectors_become_float32(tmp_path: Path, dtype: Any) -> None:
    path = npz(tmp_path / "a.npz", {"x": np.array([[1, 2], [3, 4]], dtype), "y": np.array([0, 1])})
    train = data.load_source(path)
    assert train.kind == "vector" and train.shape == (2,) and train.x.dtype == torch.float32
    assert train.x.tolist() == [[1, 2], [3, 4]]
    assert data.load_evaluation(path) is None


@pytest.mark.parametrize("name", ["x", "x_train"])
def test_csr_pieces_equal_the_dense_array(tmp_path: Path, name: str) -> None:
    dense = RNG.integers(0, 3, (7, 300)).astype(np.uint8)
    dense[3] = 0  # an empty row
    y = {f"y{name[1:]}": np.arange(7) % 2}
    path = npz(tmp_path / "sparse.npz", csr(dense, name) | y)
    assert np.array_equal(data.load_source(path).x.numpy(), dense)
    assert np.array_equal(data.load_target(path).x.numpy(), dense)
    assert data.describe(path, "source").shape == (300,)


def test_align_renumbers_by_name(tmp_path: Path) -> None:
    folder(tmp_path, {"train/x.png": 0, "test/dog/1.png": 1, "test/cat/1.png": 2})
    test = data.load_evaluation(tmp_path, classes=("dog", "cow", "cat"))
    assert test is not None and test.classes == ("dog", "cow", "cat")
    assert test.y.tolist() == [2, 0]  # read in the order cat, dog
    with pytest.raises(DataError, match=r"'cat' .* not among the run's classes \(dog, owl\)"):
        data.load_evaluation(tmp_path, classes=("dog", "owl"))


def test_describe_counts_and_warns(tmp_path: Path) -> None:
    names = ("train/a/1.png", "train/a/2.png", "train/b/1.png", "test/a/1.png")
    folder(tmp_path, dict.fromkeys(names, 1))
    for clutter in ("train/Thumbs.db", "train/a/.DS_Store", "train/a/desktop.ini", ".hidden"):
        (tmp_path / clutter).write_text("clutter")
    picture(tmp_path / "train" / ".thumbs" / "1.png")
    found = data.describe(tmp_path, "source")
    assert (found.train, found.test, found.shape) == (3, 1, (1, 4, 4))
    assert found.counts == {"a": 2, "b": 1} and found.classes == ("a", "b")
    assert found.warnings == ()

    (tmp_path / "train" / "a" / "notes.txt").write_text("stray")
    picture(tmp_path / "train" / "a" / "moving.gif")
    picture(tmp_path / "val" / "a" / "1.png")
    strays, beside = data.describe(tmp_path, "source").warnings
    assert "2 files that are not images are passed over (moving.gif, notes.txt)" in strays
    assert "(val)" in beside
    assert len(data.load_source(tmp_path)) == 3


def test_describe_says_when_test_and_training_images_differ(tmp_path: Path) -> None:
    folder(tmp_path / "f", {"train/a/1.png": 1, "train/b/1.png": 1})
    picture(tmp_path / "f" / "test" / "a" / "1.png", RED, (8, 4))
    assert "test images are colour 8x4" in data.describe(tmp_path / "f", "source").warnings[0]
    test = {"x_test": np.zeros((1, 6, 6), np.uint8), "y_test": np.array([0])}
    path = npz(tmp_path / "a.npz", arrays(**test, x_tst=np.zeros(3)))
    shapes, unused = data.describe(path, "source").warnings
    assert "(1, 6, 6)" in shapes and "x_tst" in unused


# A target has no labels


@pytest.mark.parametrize("layout", ["{}.png", "train/{}.png", "train/batch/{}.png", "batch/{}.png"])
@pytest.mark.parametrize("test", [False, True])
def test_target_folders(tmp_path: Path, layout: str, test: bool) -> None:
    folder(tmp_path, {layout.format(i): i for i in range(5)})
    if test:
        folder(tmp_path, {"test/cat/1.png": 100, "test/dog/1.png": 200})
    train, evaluation = data.load_target(tmp_path), data.load_evaluation(tmp_path)
    assert sorted(train.x[:, 0, 0, 0].tolist()) == [0, 1, 2, 3, 4]  # without the images of test/
    assert (evaluation is not None) is test
    if evaluation is not None:
        assert evaluation.classes == ("cat", "dog") and evaluation.y.tolist() == [0, 1]
    found = data.describe(tmp_path, "target")
    assert (found.train, found.test, found.counts) == (5, 2 * test, {})
    assert found.classes == (("cat", "dog") if test else ())


def test_unlabelled_type_has_no_field_for_labels(tmp_path: Path) -> None:
    folder(tmp_path, {f"train/{c}/{i}.png": 100 * c + i for c in range(2) for i in range(8)})
    train = data.load_target(tmp_path)
    assert vars(train).keys() == {"x"}
    assert not hasattr(train, "y") and not hasattr(train, "classes")
    assert not isinstance(train, data.Labelled)
    order = (train.x[:, 0, 0, 0] >= 100).tolist()
    assert order not in (sorted(order), sorted(order, reverse=True))  # so it reveals no label
    assert torch.equal(train.x, data.load_target(tmp_path).x)


def test_target_never_opens_the_label_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = npz(tmp_path / "a.npz", arrays(y_train=None))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y_train.npy", b"garbage")
    opened: list[str] = []
    really: Callable[..., Any] = zipfile.ZipFile.open

    def spy(self: zipfile.ZipFile, name: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(getattr(name, "filename", name))
        return really(self, name, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "open", spy)
    assert len(data.load_target(path)) == 6
    assert data.describe(path, "target").train == 6
    assert data.load_evaluation(path) is None
    assert set(opened) == {"x_train.npy"}
    with pytest.raises(DataError, match=r"y_train in .* cannot be read"):
        data.load_source(path)


def test_target_npz_needs_no_labels(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", {"x": np.ones((3, 2))})
    assert data.load_target(path).x.tolist() == [[1, 1]] * 3
    with pytest.raises(DataError, match=r"no y \(found: x\).*source needs labels.*--role target"):
        data.load_source(path)


def test_unlabelled_test_images_mean_no_evaluation(tmp_path: Path) -> None:
    folder(tmp_path / "f", {"train/1.png": 1, "test/1.png": 1})
    assert data.load_evaluation(tmp_path / "f") is None
    assert "images without class folders" in data.describe(tmp_path / "f", "target").warnings[0]
    assert len(data.load_target(folder(tmp_path / "g", {"1.png": 1, "test/2.png": 2}))) == 1
    path = npz(tmp_path / "a.npz", arrays(x_test=np.zeros((2, 4, 5), np.uint8)))
    assert data.load_evaluation(path) is None
    assert "no y_test" in data.describe(path, "target").warnings[0]


# What is refused: always with a DataError that names the place and a remedy


def refused(path: Path, role: data.Role, *words: str) -> None:
    """Check that loading and verifying both fail with all of `words` and name the path."""
    load = data.load_source if role == "source" else data.load_target
    for attempt in (lambda: load(path), lambda: data.verify(path, role)):
        with pytest.raises(DataError) as caught:
            attempt()
        for word in words:
            assert re.search(word, str(caught.value)), f"{word!r} not in {caught.value}"
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("role", ["source", "target"])
def test_paths_that_cannot_be_data(tmp_path: Path, role: data.Role) -> None:
    refused(tmp_path / "nowhere", role, "does not exist", "give a folder")
    refused(picture(tmp_path / "1.png"), role, "neither a folder nor an .npz")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", role, "holds no (training )?images", "png")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".DS_Store").touch()
    refused(tmp_path / "hidden", role, "holds no (training )?images")
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        npz(tmp_path / "two" / f"{name}.npz", arrays())
    refused(tmp_path / "two", role, r"2 \.npz files \(a.npz, b.npz\)", "name the one")
    with pytest.raises(ConfigError, match="source or target"):
        data.describe(tmp_path, "judge")  # pyright: ignore[reportArgumentType]


def test_source_folders_that_are_refused(tmp_path: Path) -> None:
    refused(folder(tmp_path / "flat", {"1.png": 1, "2.png": 2}), "source", "2 images and no class")
    flat = folder(tmp_path / "flat-train", {"train/1.png": 1})
    refused(flat, "source", "needs labels", "<class>", "--role target")
    refused(folder(tmp_path / "no-train", {"a/1.png": 1, "test/a/1.png": 1}), "source", "no train/")

    bare = folder(tmp_path / "bare", {"train/a/1.png": 1})
    (bare / "train" / "b").mkdir()
    (bare / "train" / "b" / "moving.gif").touch()
    refused(bare, "source", "train/b holds no images", r"only moving\.gif", "remove it")
    (bare / "train" / "b" / "1.npy").touch()
    arrays = r"\(1\.npy is of arrays: save all of a site .* of one \.npz file"
    refused(bare, "source", arrays)
    refused(bare / "train" / "b", "target", arrays)

    extra = folder(tmp_path / "extra", {"train/a/1.png": 1, "test/a/1.png": 1, "test/b/1.png": 1})
    refused(extra, "source", r"test/b is a class that .*train does not have \(a\)")


def test_mixed_sizes_name_two_files(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png", 0, (4, 4))
    picture(tmp_path / "a" / "2.png", 0, (4, 5))
    with pytest.raises(DataError, match=r"a/1.png is 4x4 and .*a/2.png is 4x5: set input.size"):
        data.load_source(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
@pytest.mark.parametrize("size", [0, 4])
def test_damaged_images_are_named(tmp_path: Path, damage: str, size: int) -> None:
    good = picture(tmp_path / "a" / "1.png", 0, (64, 64))
    Image.fromarray(RNG.integers(0, 256, (64, 64), dtype=np.uint8)).save(good)
    bad = tmp_path / "a" / "2.png"
    whole = good.read_bytes()
    damaged = {"cut": whole[: len(whole) // 2], "text": b"not a picture", "empty": b""}
    bad.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"a/2.png cannot be read as an image .*remove it"):
        data.load_source(tmp_path, size=size, channels=1 if size else 0)
    with pytest.raises(DataError, match=r"a/2.png cannot be read"):
        data.verify(tmp_path, "target")


def test_verify_names_all_damaged_images(tmp_path: Path) -> None:
    folder(tmp_path, {f"{part}/a/{i}.png": 1 for part in ("train", "test") for i in range(4)})
    for name in ("train/a/0.png", "train/a/3.png", "test/a/2.png"):
        (tmp_path / name).write_bytes(b"not a picture")
    for role in ("source", "target"):
        with pytest.raises(DataError, match=r"^3 images cannot be read:") as caught:
            data.verify(tmp_path, role)
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == 3 and all("cannot be read as an image" in line for line in lines)
        for name, line in zip(("train/a/0", "train/a/3", "test/a/2"), lines, strict=True):
            assert f"{name}.png" in line
    (tmp_path / "test" / "a" / "2.png").unlink()
    (tmp_path / "train" / "a" / "3.png").unlink()
    with pytest.raises(DataError, match=r"train/a/0.png cannot be read as an image"):
        data.verify(tmp_path, "source")
    for i in range(4, 34):
        (tmp_path / "train" / "a" / f"{i}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)^31 images cannot be read:.*\n  and 11 more$"):
        data.verify(tmp_path, "source")


def test_folders_may_be_called_Train_and_Test(tmp_path: Path) -> None:
    folder(tmp_path, {"Train/a/1.png": 1, "Train/b/2.png": 2, "TEST/a/3.png": 3, "old/x.png": 4})
    found = data.describe(tmp_path, "source")
    assert (found.train, found.test, found.classes) == (2, 1, ("a", "b"))
    assert "folders beside Train/ and TEST/ are passed over (old)" in found.warnings[0]
    shutil.copytree(tmp_path / "Train", tmp_path / "upper" / "TRAIN")
    assert data.load_source(tmp_path / "upper").classes == ("a", "b")
    folder(tmp_path, {"train/c/5.png": 5})
    with pytest.raises(DataError, match=r"holds Train/ and train/, whose names differ only in"):
        data.describe(tmp_path, "source")


def test_uneven_classes_and_names_that_are_nearly_equal_are_warned_of(tmp_path: Path) -> None:
    files = {f"healthy/{i}.png": 1 for i in range(22)} | {"Healthy /1.png": 1, "ill/1.png": 2}
    folder(tmp_path, files | {"ill/2.png": 2})
    warnings = " ".join(data.describe(tmp_path, "source").warnings)
    assert "'Healthy ' and 'healthy' differ only in case or spaces" in warnings
    assert "'healthy' has 22 examples and 'Healthy ' 1; train.sampler=balanced" in warnings
    (tmp_path / "Healthy " / "1.png").unlink()
    (tmp_path / "Healthy ").rmdir()
    warnings = " ".join(data.describe(tmp_path, "source").warnings)
    assert "uneven: 'healthy' has 22 examples and 'ill' 2" in warnings
    for i in (20, 21):
        (tmp_path / "healthy" / f"{i}.png").unlink()
    assert data.describe(tmp_path, "source").warnings == ()  # ten times as many is still usual


IMAGES = np.zeros((6, 4, 5), np.uint8)
VECTORS = np.zeros((6, 2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x_train": None, "images": IMAGES}, ["found: y_train, images", "needed: x_train"]),
        ({"x": IMAGES}, ["both x_train and x"]),
        ({"y_train": np.arange(5) % 3}, ["6 examples and 5 labels"]),
        ({"y_train": np.array([0, 1, -1, 0, 1, 1])}, ["label -1", "from 0"]),
        ({"y_train": np.array([0, 1, 2**40, 0, 1, 1])}, ["label 1099511627776"]),
        ({"y_train": np.zeros(6)}, ["float64", "int64"]),
        ({"y_train": np.zeros((6, 3), np.int64)}, [r"\(6, 3\)", "one integer per example"]),
        ({"y_train": np.array(["a"] * 6, dtype=object)}, ["y_train", "Python objects"]),
        ({"classes": np.array(["a", "b"])}, ["label 2", "names 2 classes"]),
        ({"classes": np.array(["a", "b", "b"])}, ["each different"]),
        ({"classes": np.array([1, 2, 3])}, ["one string per class"]),
        ({"x_test": IMAGES, "y_test": np.arange(6)}, ["class 5", "0, 1, 2"]),
        ({"x_test": IMAGES, "y_test": np.arange(5) % 3}, ["6 examples and 5 labels in y_test"]),
        ({"x_test": VECTORS, "y_test": np.zeros(6, int)}, ["same is needed in both"]),
        ({"x_train": VECTORS, "x_test": np.zeros((6, 3)), "y_test": np.zeros(6, int)}, ["x_test"]),
    ],
)
def test_source_arrays_that_are_refused(
    tmp_path: Path, changed: dict[str, Any], words: list[str]
) -> None:
    refused(npz(tmp_path / "site.npz", arrays(**changed)), "source", *words)


SPARSE = csr(np.eye(6, 9), "x_train")


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({"x_train": IMAGES.astype(float)}, [r"float64 \(6, 4, 5\)", "uint8"]),
        ({"x_train": np.zeros((6, 3, 4, 5), np.uint8)}, [r"\(6, 3, 4, 5\)", r"\(N, H, W, 3\)"]),
        ({"x_train": np.zeros(6, np.uint8)}, [r"uint8 \(6,\)"]),
        ({"x_train": np.zeros((6, 2), complex)}, ["complex128"]),
        ({"x_train": np.zeros((6, 2), "U3")}, ["<U3"]),
        ({"x_train": np.zeros((0, 2))}, ["is empty"]),
        ({"x_train": np.array([[None, 1]] * 6, dtype=object)}, ["Python objects"]),
        ({"x_train": VECTORS + np.array([[0, 0]] * 4 + [[0, np.inf]] * 2)}, ["2 rows", "row 4"]),
        ({"x_train": VECTORS - np.inf}, ["not finite in 6 rows", "row 0"]),
        ({"x_train": VECTORS + 1e300}, ["not finite", "too large for single precision"]),
        (SPARSE | {"x_train_indptr": None}, ["no x_train_indptr", "four pieces"]),
        (SPARSE | {"x_train_shape": np.array([6])}, ["two positive integers"]),
        (SPARSE | {"x_train_shape": np.array([6, 5])}, ["from 0 to 5, but there are 5 columns"]),
        (SPARSE | {"x_train_indptr": np.arange(6)}, ["6 entries, but 6 rows need 7"]),
        (SPARSE | {"x_train_data": np.ones(7)}, ["7 entries, indices 6"]),
        (SPARSE | {"x_train_data": np.ones((6, 1))}, ["one-dimensional"]),
        (SPARSE | {"x_train_data": np.full(6, np.inf)}, ["not finite"]),
        (SPARSE | {"x_train_data": np.full(6, "a")}, ["not numbers"]),
        (SPARSE | {"x_train_data": np.array([None] * 6)}, ["Python objects"]),
        (SPARSE | {"x_train_indices": np.zeros(6)}, ["not integers"]),
        (SPARSE | {"x_train_indptr": np.array([0, 2, 1, 3, 4, 5, 6], np.uint8)}, ["goes down"]),
        (SPARSE | {"x_train_indptr": np.array([1, 1, 2, 3, 4, 5, 6])}, ["from 1 to 6"]),
    ],
)
def test_arrays_that_neither_role_can_use(
    tmp_path: Path, x: dict[str, Any], words: list[str], role: data.Role
) -> None:
    refused(npz(tmp_path / "site.npz", {**arrays(x_train=None), **x}), role, *words)


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "empty", "one array"])
def test_damaged_npz_files_are_named(tmp_path: Path, damage: str) -> None:
    path = npz(tmp_path / "site.npz", arrays())
    whole = path.read_bytes()
    if damage == "one array":
        with path.open("wb") as file:
            np.save(file, IMAGES)
    else:
        middle = whole.index(bytes(range(50, 60)))  # pixels; the checksum then fails
        changed = whole[:middle] + b"\xff" + whole[middle + 1 :]
        damaged = {"cut": whole[:-30], "flipped": changed, "text": b"not a zip", "empty": b""}
        path.write_bytes(damaged[damage])
    refused(path, "target", "is one array" if damage == "one array" else "cannot be read", "savez")


# One shape for all sites


def labelled(x: torch.Tensor, classes: int = 3) -> data.Labelled:
    return data.Labelled(x, torch.arange(len(x)) % classes, tuple(map(str, range(classes))))


def test_conform_colour_to_grayscale_is_luma() -> None:
    colours = torch.tensor([RED, (0, 255, 0), (0, 0, 255), (255, 255, 255), (10, 20, 30)])
    x = colours.to(torch.uint8)[:, :, None, None].expand(-1, -1, 2, 3)
    gray = data.conform(labelled(x), 1, 0)
    assert gray.shape == (1, 2, 3) and gray.x.dtype == torch.uint8
    # 0.299 R + 0.587 G + 0.114 B: 76.2, 149.7, 29.1, 255, and 2.99 + 11.74 + 3.42 = 18.15
    assert gray.x[:, 0, 1, 2].tolist() == [76, 150, 29, 255, 18]
    assert torch.equal(gray.y, torch.tensor([0, 1, 2, 0, 1]))


def test_conform_luma_is_the_one_files_are_read_with(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    as_read = data.load_source(tmp_path, channels=1)
    assert torch.equal(as_read.x, data.conform(data.load_source(tmp_path), 1, 0).x)


def test_conform_grayscale_to_colour_repeats() -> None:
    x = torch.arange(24, dtype=torch.uint8).reshape(2, 1, 3, 4)
    colour = data.conform(data.Unlabelled(x), 3, 0)
    assert type(colour) is data.Unlabelled and colour.shape == (3, 3, 4)
    assert all(torch.equal(colour.x[:, [c]], x) for c in range(3))


def test_conform_resizes_with_antialiasing_and_stretches() -> None:
    # Columns 0, 255, 0, 255, ... halve to gray; without antialiasing they could stay stripes.
    x = (torch.arange(32) % 2 * 255).to(torch.uint8).expand(1, 1, 8, 32).contiguous()
    small = data.conform(data.Unlabelled(x), 0, 4)
    assert small.shape == (1, 4, 4)
    assert ((small.x.float() - 127.5).abs() < 10).all()
    ramp = torch.tensor([[[[10, 10, 90, 90]] * 4]], dtype=torch.uint8)
    assert data.conform(data.Unlabelled(ramp), 0, 2).x[0, 0, 0].tolist() in ([21, 79], [20, 80])


def test_conform_refuses_vectors_and_odd_channels(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vectors of 5 numbers"):
        data.conform(data.Unlabelled(torch.zeros(2, 5)), 0, 28)
    with pytest.raises(DataError, match="cannot get 2"):
        data.conform(labelled(torch.zeros(2, 3, 4, 4, dtype=torch.uint8)), 2, 0)
    path = npz(tmp_path / "a.npz", arrays())
    assert data.load_source(path, channels=3, size=7).shape == (3, 7, 7)
    assert data.load_target(path, channels=3, size=7).shape == (3, 7, 7)


# Poisoned labels


@pytest.mark.parametrize(("percent", "flips"), [(0, 0), (1, 2), (33.3, 67), (50, 100), (100, 200)])
def test_poison_flips_exactly_so_many(percent: float, flips: int) -> None:
    clean = labelled(torch.zeros(200, 2))
    before = clean.y.clone()
    bad = data.poison(clean, percent, torch.Generator().manual_seed(1))
    assert int((bad.y != clean.y).sum()) == flips
    assert torch.equal(clean.y, before) and bad.x is clean.x
    assert int(bad.y.min()) >= 0 and int(bad.y.max()) <= 2


def test_poison_draws_uniformly_among_the_other_classes_and_repeats() -> None:
    clean = labelled(torch.zeros(3000, 1), classes=4)
    bad = data.poison(clean, 100, torch.Generator().manual_seed(0))
    table = torch.zeros(4, 4).index_put_((clean.y, bad.y), torch.tensor(1.0), accumulate=True)
    assert (table.diag() == 0).all()
    others = table[~torch.eye(4, dtype=torch.bool)]
    assert (others - 250).abs().max() < 65  # 5 standard deviations of 750 draws of 1/3
    again = data.poison(clean, 100, torch.Generator().manual_seed(0))
    assert torch.equal(bad.y, again.y)
    with pytest.raises(ConfigError, match="from 0 to 100"):
        data.poison(clean, 101, torch.Generator())
    with pytest.raises(DataError, match="one class only"):
        data.poison(labelled(torch.zeros(3, 1), classes=1), 50, torch.Generator())


# Showing the data


def test_check_prints_a_table_or_json(tmp_path: Path) -> None:
    folder(tmp_path, {"train/[a]/1.png": 1, "train/b/1.png": RED, "test/b/1.png": 2})
    words = ("data", "check", tmp_path, "--min-images", 2)
    shown = call(*words).stdout
    assert "[a]: 1, b: 1" in shown and "warning:" in shown
    told = "means over these unlabelled images"
    assert told in call(*words, "--role", "target").stdout and told not in shown
    found = json.loads(call(*words, "--role", "target", "--json").stdout)
    assert (found["role"], found["train"], found["test"]) == ("target", 2, 1)
    assert found["shape"] == [3, 4, 4] and found["counts"] == {}
    assert call("data", "check", tmp_path / "nowhere", code=1).output.startswith("error: ")


@pytest.mark.parametrize("role", ["source", "target"])
def test_show_writes_a_picture(tmp_path: Path, role: str) -> None:
    folder(tmp_path / "site", {"a/1.png": RED, "b/1.png": 3, "b/2.png": 200})
    picture(tmp_path / "site" / "b" / "3.png", 1, (9, 5))  # of another size
    out = tmp_path / "sheet.png"
    call("data", "show", tmp_path / "site", "--role", role, "--out", out, "--per-class", 2)
    with Image.open(out) as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
    assert (pixels == RED).all(axis=1).mean() > 0.05


def test_show_refuses_vectors_and_places_it_cannot_write(tmp_path: Path) -> None:
    assert repr(labelled(torch.full((2, 5), 7.0))) == "Labelled(2 x (5,))"  # and no values
    with pytest.raises(DataError, match="no picture to show"):
        contact_sheet(labelled(torch.zeros(3, 5)), tmp_path / "a.png")
    images = labelled(torch.zeros(3, 1, 4, 4, dtype=torch.uint8))
    with pytest.raises(RunError, match="cannot be written"):
        contact_sheet(images, tmp_path / "nowhere" / "a.png")
