"""The literature's benchmarks: every published layout, from its files to a site's training data."""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat
from scipy.sparse import csc_matrix, csr_array

from fedda import data
from fedda.contrib.benchmarks import feature_files, reviews
from fedda.contrib.benchmarks.common import Options
from fedda.contrib.benchmarks.digit_five import pixels
from fedda.contrib.benchmarks.registry import BENCHMARKS, import_benchmark
from fedda.contrib.benchmarks.spectrograms import mel_bank, to_bytes
from fedda.contrib.benchmarks.splits import stratified
from fedda.errors import ConfigError, DataError
from fedda.settings import RunConfig, presets
from server.journal import Journal
from server.simulation import folders, simulate
from tests import benchmarks_data as make
from tests.command_lines import call

Build = Callable[[Path], Path]  # makes a benchmark's folder
Change = Callable[[Path], object]


@pytest.fixture(autouse=True)
def few_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "TRAIN", 8)


def arrays(site: Path) -> dict[str, np.ndarray]:
    with np.load(site / "data.npz") as file:
        return dict(file)


def names(folder: Path) -> list[str]:
    """Return all files below the folder, as half/class/name."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def brought(build: Build, name: str, root: Path, **options: Any) -> Path:
    """Make a small copy of a benchmark and import it -> the folder OUT."""
    import_benchmark(name, build(root / "source"), root / "out", Options(**options))
    return root / "out"


def refused(build: Build, name: str, root: Path, error: type[Exception], **options: Any) -> str:
    """Check that an import fails and leaves no file -> its message."""
    source = build(root / "source")
    with pytest.raises(error) as caught:
        import_benchmark(name, source, root / "out", Options(**options))
    assert not (root / "out").exists()
    return str(caught.value)


def after(build: Build, change: Change) -> Build:
    """Return a builder of the layout that then makes a change in it."""

    def built(root: Path) -> Path:
        build(root)
        change(root)
        return root

    return built


@pytest.mark.parametrize("layout", make.LAYOUTS)
def test_a_layout_becomes_sites_that_fedda_reads(layout: str, tmp_path: Path) -> None:
    name, build, domains, train, test, n_classes = make.LAYOUTS[layout]
    seen: list[tuple[int, int]] = []
    source, out = build(tmp_path / "source"), tmp_path / "out"
    done = import_benchmark(name, source, out, progress=lambda *step: seen.append(step))
    assert done.counts == dict.fromkeys(domains.split(), (train, test))
    assert sorted(p.name for p in out.iterdir()) == sorted([*domains.split(), "benchmark.json"])
    record = json.loads((out / "benchmark.json").read_text())
    assert record["benchmark"] == name and record["split"] == done.split and "{" not in done.split
    assert [step for step, _ in seen] == list(range(1, seen[0][1] + 1))

    shapes, classes = set(), set()
    for domain in domains.split():
        labelled = data.load_source(out / domain)
        unlabelled = data.load_target(out / domain)
        tested = data.load_evaluation(out / domain)
        assert tested is not None
        assert (len(labelled), len(unlabelled), len(tested)) == (train, train, test)
        assert tested.classes == labelled.classes and len(labelled.y.unique()) == n_classes
        assert not data.describe(out / domain, "source").warnings
        shapes.add((labelled.kind, len(labelled.shape)))
        classes.add(labelled.classes)
        # The same examples, and no array that could contain a label.
        assert [f.name for f in fields(unlabelled)] == ["x"]
        assert sorted(unlabelled.x.sum(dim=tuple(range(1, unlabelled.x.ndim))).tolist()) == sorted(
            labelled.x.sum(dim=tuple(range(1, labelled.x.ndim))).tolist()
        )
    assert len(shapes) == len(classes) == 1
    assert len(classes.pop()) == n_classes


def test_every_benchmark_has_a_test_layout_and_is_named_in_the_help() -> None:
    assert {name for name, *_ in make.LAYOUTS.values()} == set(BENCHMARKS)
    text = call("data", "import", "--help", columns=200).output
    assert all(name in text for name in BENCHMARKS)
    for benchmark in BENCHMARKS.values():
        assert benchmark.url.startswith("http") and benchmark.used_by and benchmark.layout


@pytest.mark.parametrize("layout", ["digit5", "office31", "surf", "mnist", "recordings"])
def test_the_seed_determines_all_random_draws(layout: str, tmp_path: Path) -> None:
    name, build, *_ = make.LAYOUTS[layout]
    source = build(tmp_path / "source")
    found = []
    for i, seed in enumerate((3, 3, 4)):
        out = tmp_path / str(i)
        import_benchmark(name, source, out, Options(seed=seed))
        sites = [site for site in sorted(out.iterdir()) if site.is_dir()]
        if (sites[0] / "data.npz").exists():
            found.append([arrays(site)["x_train"].tobytes() for site in sites])
        else:
            found.append([names(site) for site in sites])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("domain", make.DIGITS.split())
def test_digits_keep_their_pixels_and_labels(domain: str, tmp_path: Path) -> None:
    """Image i has i in its first pixel and the digit i % 10, in whatever order of axes."""
    found = arrays(brought(make.digit5, "digit5", tmp_path) / domain)
    side, colour, seed = {
        "mnist": (32, False, 0),
        "mnist-m": (28, True, 3),
        "svhn": (32, True, 5),
        "syn": (32, True, 5),
        "usps": (28, False, 6),
    }[domain]
    for split, n in (("train", make.N_TRAIN), ("test", make.N_TEST)):
        x, y = found[f"x_{split}"], found[f"y_{split}"]
        assert x.dtype == np.uint8 and x.shape == (n, side, side, *((3,) if colour else ()))
        number = x.reshape(n, -1)[:, 0]
        assert sorted(number) == list(range(n)) and (y == number % 10).all()
        if split == "train" or domain in ("svhn", "syn"):
            whole = make.digit_images(n, side, 3 if colour else 1, seed)
            assert (x == whole[number].reshape(x.shape)).all()


def test_pixels_by_hand() -> None:
    assert pixels(np.array([[[[0.0, 0.5, 1.0]]]]), "NCHW", "x").tolist() == [[[0, 128, 255]]]
    assert pixels(np.array([[[0.0, 200.0]]]), "NHW", "x").tolist() == [[[0, 200]]]
    x = np.arange(2 * 4 * 3 * 5).reshape(2, 4, 3, 5)  # H, W, C, N
    assert (pixels(x, "HWCN", "x")[4, 1, 2] == x[1, 2, :, 4]).all()
    for bad, words in (([[[-1.0]]], "go from -1.0"), ([[[300]]], "to 300"), ([[[np.nan]]], "nan")):
        with pytest.raises(DataError, match=words):
            pixels(np.array(bad), "NHW", "x")


@pytest.mark.parametrize("how", ["link", "symlink", "copy"])
def test_image_files_are_linked_or_copied_unchanged(how: Any, tmp_path: Path) -> None:
    out = brought(make.office31, "office31", tmp_path, files=how)
    image = out / "dslr" / "train" / "mug" / names(out / "dslr" / "train" / "mug")[0]
    original = tmp_path / f"source/domain_adaptation_images/dslr/images/mug/{image.name}"
    assert image.read_bytes() == original.read_bytes()
    assert image.is_symlink() == (how == "symlink")
    assert os.path.samefile(image, original) == (how != "copy")


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.9])
def test_stratified_against_counting(share: float) -> None:
    y = np.array([0] * 1 + [1] * 2 + [2] * 7 + [3] * 40)
    y = np.random.default_rng(1).permutation(y)
    test = stratified(y, share, np.random.default_rng(0))
    for c, n in enumerate((1, 2, 7, 40)):
        wanted = 0 if n == 1 else max(1, min(n - 1, round(n * share)))
        chosen = [label for label, its in zip(y, test, strict=True) if its]
        assert chosen.count(c) == wanted


def test_published_lists_determine_the_split(tmp_path: Path) -> None:
    out = brought(make.pacs, "pacs", tmp_path)
    train, test = (names(out / "photo" / half / "guitar") for half in ("train", "test"))
    assert (train, test) == (["0000.png", "0001.png", "0002.png"], ["0003.png"])
    y = data.load_source(out / "photo").y
    assert y.tolist() == [c for c in range(7) for _ in range(3)]


def test_features_keep_their_labels_counted_from_0(tmp_path: Path) -> None:
    found = arrays(brought(make.surf, "office-caltech10", tmp_path, features=3) / "caltech")
    for split in ("train", "test"):
        assert found[f"x_{split}"].shape[1] == 3 and found[f"x_{split}"].dtype == np.float32
        assert (found[f"x_{split}"][:, 0] == found[f"y_{split}"]).all()
    assert found["classes"].tolist() == [*make.OFFICE10]


def test_features_may_be_sparse_and_have_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(root: Path) -> Path:
        for file in make.surf(root).glob("*_SURF_L10.mat"):
            its = loadmat(file)
            savemat(file, {"Xt": csc_matrix(its["fts"]), "Yt": its["labels"]})
        return root

    found, plain = (
        brought(its, "office-caltech10", tmp_path / its.__name__) for its in (other, make.surf)
    )
    for name, array in arrays(plain / "caltech").items():
        assert (arrays(found / "caltech")[name] == array).all()
    monkeypatch.setattr(feature_files, "_DENSE", 40 * 2 * 4)
    two = Options(features=2)
    import_benchmark("office-caltech10", found.parent / "source", tmp_path / "two", two)
    text = refused(other, "office-caltech10", tmp_path / "big", DataError)
    assert "amazon_SURF_L10.mat has sparse features (40, 6), 960 B when dense" in text


@pytest.mark.parametrize("layout", ["svmlight", "svmlight-1", "amazon.npz", "amazon.mat"])
def test_reviews_keep_their_words_and_labels(layout: str, tmp_path: Path) -> None:
    name, build, domains, *_ = make.LAYOUTS[layout]
    out = brought(build, name, tmp_path, features=5)
    for seed, domain in enumerate(domains.split()):
        found = arrays(out / domain)
        numbers = []
        for split in ("train", "test"):
            pieces = tuple(found[f"x_{split}_{piece}"] for piece in ("data", "indices", "indptr"))
            x = csr_array(pieces, shape=found[f"x_{split}_shape"].tolist()).toarray()
            number = x[:, 0].astype(int) - 1
            of = 6 if split == "test" and layout.startswith("svm") else 12
            assert (x == make.counts(of, 7, seed)[number, :5]).all()
            assert (found[f"y_{split}"] == number % 2).all()
            numbers.append(number.tolist())
        if layout.startswith("amazon"):
            assert sorted(numbers[0] + numbers[1]) == list(range(12))


@pytest.mark.parametrize(("mels", "n_fft", "rate"), [(3, 16, 8000), (40, 512, 16000)])
def test_mel_bank_against_loops(mels: int, n_fft: int, rate: int) -> None:
    twin = torch.tensor(make.mel_bank_twin(mels, n_fft, rate), dtype=torch.float64)
    torch.testing.assert_close(mel_bank(mels, n_fft, rate), twin, rtol=1e-9, atol=1e-9)


def test_each_microphones_range_is_scaled_to_bytes(tmp_path: Path) -> None:
    assert to_bytes(np.array([-9.0, 0, 1, 2, 9]), 0, 2).tolist() == [0, 0, 128, 255, 255]
    assert to_bytes(np.array([3.0]), 3, 3).tolist() == [0]
    found = arrays(brought(make.spectrograms, "mic2mic-like", tmp_path) / "Voice")
    x, y = found["x_train"], found["y_train"]
    assert x.dtype == np.uint8 and x.min() == 0 and x.max() == 255
    means = [x[y == c].mean() for c in range(3)]
    assert means[0] < 85 < means[1] < 170 < means[2]  # class c had values between c and c + 1


def test_what_lies_in_class_folders_and_is_not_read_is_said(tmp_path: Path) -> None:
    source, out = make.office31(tmp_path / "source"), tmp_path / "out"
    mug = source / MUG
    for name in ("a.gif", "b.jfif", "c", "d.jpe", ".DS_Store", "Thumbs.db", "._e.png"):
        (mug / name).write_bytes(b"x")
    make.picture(mug / "more" / "f.png", 1)
    make.picture(mug.parent / "g.png", 1)
    note, _ = import_benchmark("office31", source, out).notes
    where = "dslr: 6 items passed over (images/g.png, images/mug/more, images/mug/a.gif and 3 more)"
    assert where in note and ".bmp" in note
    source, out = make.recordings(tmp_path / "sounds"), tmp_path / "heard"
    (source / "USB/yes/0.flac").touch()
    (note,) = import_benchmark("mic2mic-like", source, out).notes
    assert "USB: 1 item passed over (yes/0.flac): only .npy, .wav files" in note


def test_classes_keep_letters_of_all_alphabets(tmp_path: Path) -> None:
    cat, dog, ue = "\u732b", "\u72d7", "\u00fc"  # an umlaut may also be written as two letters
    for domain in ("amazon", "dslr", "webcam"):
        names_ = (cat, dog, "Kase", "u\u0308" if domain == "dslr" else ue)
        make.class_folders(tmp_path / "source" / domain, names_)
    done = import_benchmark("office31", tmp_path / "source", tmp_path / "out")
    assert done.classes == 4 and {p.name for p in (done.out / "dslr/train").iterdir()} == {
        *(cat, dog, "Kase", ue)
    }


def test_folders_that_are_no_class_are_counted(tmp_path: Path) -> None:
    source = make.office_caltech(tmp_path / "source")
    make.picture(source / "Caltech10/BACKGROUND/a.png", 1)
    (note,) = import_benchmark("office-caltech10", source, tmp_path / "out").notes
    assert note.startswith("1 folder passed over, not a class of Office-Caltech10 (BACKGROUND")


@pytest.mark.parametrize("seed", range(4))
def test_an_image_of_two_classes_is_in_one_half(seed: int, tmp_path: Path) -> None:
    source, out = make.imageclef(tmp_path / "source"), tmp_path / "out"
    file = source / "list" / "pList.txt"
    file.write_text(file.read_text() + "p/1_0.JPEG 7\np/2_1.JPEG 8\np/3_0.JPEG 3\n")
    assert import_benchmark("imageclef", source, out, Options(seed=seed)).notes == (
        "p: 2 images listed under two classes",
    )
    train, test = ([p.name for p in (out / "p" / half).rglob("*.*")] for half in ("train", "test"))
    assert not {*train} & {*test} and len(train + test) == 38


def in_other_places(root: Path) -> Path:
    """Lists with a folder before the domain, which has a capital on disk."""
    make.pacs(root)
    for file in (root / "pacs_label").glob("photo_*.txt"):
        file.write_text(re.sub("(?m)^", "PACS/", file.read_text()[:-1]))
    (root / "kfold" / "photo").rename(root / "kfold" / "Photo")
    (root / "kfold" / "sketch").rename(root / "kfold" / "Sketch")
    return root


def test_lists_may_write_the_path_of_a_domain_otherwise(tmp_path: Path) -> None:
    out = brought(in_other_places, "pacs", tmp_path)
    for domain in ("photo", "sketch", "cartoon"):
        assert len(names(out / domain / "train")) == 21

    def gone(root: Path) -> None:
        (root / "kfold/Photo/dog/0000.png").unlink()

    text = refused(after(in_other_places, gone), "pacs", tmp_path / "x", DataError)
    assert "PACS/photo/dog/0000.png" in text and "kfold/Photo/dog/0000.png" in text


def test_of_several_lists_the_one_is_read_whose_images_are_there(tmp_path: Path) -> None:
    def both(root: Path) -> Path:
        make.imageclef(root)
        for file in (root / "list").iterdir():
            away = re.sub("(?m)^", "/data/image-clef/", file.read_text()[:-1])
            (root / f"{file.name[0]}_list.txt").write_text(away)
        return root

    assert names(brought(both, "imageclef", tmp_path / "a") / "b") == names(
        brought(make.imageclef, "imageclef", tmp_path / "b") / "b"
    )
    for i, text in enumerate(("b/none.png 0\n", "b/000.aeroplane-101/0_0.JPEG 0\n")):
        one = after(both, put("b_list.txt", text.encode()))
        two = after(one, put("list/bList.txt", text.encode()))
        text = refused(two, "imageclef", tmp_path / f"c{i}", DataError)
        assert f"2 lists of b ({tmp_path}/c{i}/source/b_list.txt, " in text
        assert "list/bList.txt), and the first image of" in text and f"{2 * i} of them" in text


@pytest.mark.parametrize(("layout", "file"), [
    ("digit5", "usps_28x28.mat"), ("mnist", "train-labels.idx1-ubyte"),
    ("svmlight", "dvd_test.svmlight"), ("amazon.npz", "amazon.npz"),
])  # fmt: skip
def test_a_file_in_two_folders_is_refused(layout: str, file: str, tmp_path: Path) -> None:
    name, build, *_ = make.LAYOUTS[layout]
    twice = after(build, lambda r: (make.write_list(r / "old" / file, []), None))
    text = refused(twice, name, tmp_path, DataError)
    assert f"{file} is in 2 folders ({tmp_path}/source, {tmp_path}/source/old)" in text


def test_a_value_of_all_domains_reviews_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    def change(root: Path) -> None:
        with np.load(root / "amazon.npz") as file:
            its = dict(file)
        np.savez(root / "amazon.npz", **its | {"xx_data": its["xx_data"] * np.nan})

    text = refused(after(make.coordinates, change), "amazon-review", tmp_path, DataError)
    assert "xx in" in text and "not finite" in text


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("digit5", "--preset digit5"),
        ("svmlight", "--preset amazon-review"),
        ("surf", "--preset vectors"),  # that of its name has a network for images
        ("caltech", "--preset photos"),
        ("recordings", "-c input.size=101 -c input.channels=1"),
        ("mnist", ""),
    ],
)
def test_a_preset_is_proposed_where_the_benchmark_has_one(
    layout: str, settings: str, tmp_path: Path
) -> None:
    name, build, *_ = make.LAYOUTS[layout]
    done = import_benchmark(name, build(tmp_path / "source"), tmp_path / "out")
    assert " ".join(done.settings) == settings


def put(file: str, content: Any) -> Change:
    """Replace a file: its bytes, the arrays of a .mat file, or the array of an .npy file."""

    def change(root: Path) -> None:
        if isinstance(content, bytes):
            (root / file).write_bytes(content)
        elif isinstance(content, dict):
            savemat(root / file, content)
        else:
            np.save(root / file, content)

    return change


def zipped(file: str) -> Change:
    return lambda root: (root / file).rename(root / f"{file}.zip")


def edited(old: str, new: str) -> Change:
    def change(root: Path) -> None:
        text = (root / LIST).read_text()
        assert old in text
        (root / LIST).write_text(text.replace(old, new))

    return change


def slower_microphone(root: Path) -> None:
    for file in (root / "USB").rglob("*.wav"):
        make.sound(file, 440, rate=4000)


def eight_bits(root: Path) -> None:
    file = root / "USB" / "yes" / "0.wav"
    head = bytearray(file.read_bytes())
    head[34] = 8  # bits per sample
    file.write_bytes(head)


X, Y = make.digit_images(20, 32, 3, 0).transpose(1, 2, 3, 0), np.arange(20)[:, None] % 10
MISSING = [
    ("svhn_test_32x32.mat", ["has no svhn_test_32x32.mat for svhn"]),
    ("usps_28x28.mat", ["has no usps_28x28.mat for usps (unpack it first: usps_28x28.mat.zip)"]),
]
DIGITS: list[tuple[Any, list[str]]] = [
    ({"X": X, "y": Y + 2}, ["goes from 2 to 11", "10 for 0"]),
    ({"X": X, "y": Y[:9]}, ["20 images and 9 labels"]),
    ({"X": X, "y": Y + 0.5}, ["one whole number"]),
    ({"X": X, "y": np.ones((20, 10))}, ["one 1 per row"]),
    ({"images": X, "y": Y}, ["holds images (32, 32, 3, 20), y (20, 1)", "needed: X and y"]),
    ({"X": X[0], "y": Y}, ["axes H, W, C, N"]),
    ({"X": X, "y": Y * 0}, ["no training example of the class 1"]),
    (b"MATLAB 5.0 MAT-file, damaged", ["cannot be read as a .mat"]),
    (b"", ["cannot be read as a .mat"]),
]
MUG = "domain_adaptation_images/dslr/images/mug"
LAYOUT = ["published at http", "amazon/images/<class>"]  # where it is, and how
FOLDERS: list[tuple[Change, list[str]]] = [
    (lambda r: shutil.rmtree((r / MUG).parents[1]), ["no folder for dslr", *LAYOUT]),
    (lambda r: shutil.rmtree((r / MUG).parents[2]), ["no folder for amazon, dslr", *LAYOUT]),
    (lambda r: shutil.rmtree(r / MUG), ["dslr has no images of mug"]),
    (lambda r: [file.unlink() for file in (r / MUG).iterdir()], ["mug holds no images", *LAYOUT]),
    (lambda r: shutil.rmtree((r / MUG).parent), ["dslr holds no class folders", *LAYOUT]),
    (
        lambda r: make.picture((r / MUG).parent / "Mug_" / "0.png", 1),
        ["dslr has", "'Mug_' and 'mug'"],
    ),
    (lambda r: make.picture((r / MUG).parents[2] / "DSLR" / "0.png", 1), ["for dslr (DSLR, dslr)"]),
]
LIST = "pacs_label/photo_train_kfold.txt"
LISTS: list[tuple[Change, list[str]]] = [
    (edited("photo/dog/0001.png 1", "photo/dog/0001.png 8"), ["line 2", "label 8", "1 to 7"]),
    (edited("photo/dog/0001.png 1", "photo/dog/0001.png 0"), ["line 2", "label 0", "1 to 7"]),
    (edited("photo/dog/0001.png 1", "photo/dog/0001.png 3"), ["line 2", "line 7", "giraffe"]),
    (edited("photo/dog/0002.png", "photo/dog/none.png"), ["line 3", "photo/dog/none.png"]),
    (edited("photo/dog/0002.png", "/etc/passwd"), ["line 3", "no path below"]),
    (edited("photo/dog/0002.png", "photo/../../x.png"), ["line 3", "no path below"]),
    (edited("photo/dog/0002.png", "photo/dog/2.txt"), ["line 3", "is no image"]),
    (edited("photo/dog/0001.png 1", "photo/dog/0001.png"), ["line 2", "path and label"]),
    (put(LIST, b"\n"), ["names no images"]),
    (put(LIST, b"\xff\x00"), ["cannot be read"]),
    (lambda r: (r / LIST).unlink(), ["photo_train_kfold.txt", "--test-share", "published at"]),
]
FEATURES: list[tuple[Any, list[str]]] = [
    ({"fts": np.zeros((4, 2)), "labels": np.arange(4) * 5}, ["go from 0 to 15", "1 to 10"]),
    ({"fts": np.zeros((4, 2)), "labels": np.arange(3)}, ["(4, 2) and 3 labels"]),
    ({"x": np.zeros((4, 2)), "labels": np.arange(4)}, ["holds x (4, 2)", "fts, feas or Xt"]),
    ({"fts": np.full((4, 6), np.nan), "labels": np.arange(4)}, ["row 1 that is not finite"]),
    ({"fts": np.zeros((4, 5)), "labels": np.arange(4)}, ["5 columns", "amazon_SURF_L10.mat has 6"]),
]
IDX: list[tuple[str, bytes, list[str]]] = [
    ("train-labels.idx1-ubyte", b"\0\0\x08\x03", ["begins with 00000803", "00000801"]),
    ("train-labels.idx1-ubyte", make.idx(np.zeros(9)), ["240 images", "9 labels"]),
    ("train-labels.idx1-ubyte", make.idx(np.full(240, 11)), ["the label 11"]),
    ("train-labels.idx1-ubyte", make.idx(np.zeros(9))[:-1], ["8 bytes for 9"]),
    ("t10k-images-idx3-ubyte.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], ["cannot be read"]),
    ("t10k-images-idx3-ubyte.gz", b"", ["begins with :"]),
]
WAVES, ARRAYS, VOICE = make.recordings, make.spectrograms, "Voice/train/go/0.npy"
SOUNDS: list[tuple[Build, Change, list[str]]] = [
    (WAVES, lambda r: make.sound(r / "USB/yes/9.wav", 440, 4000), ["9.wav", "4000", "8000"]),
    (WAVES, slower_microphone, ["ReSpeaker", "8000", "USB", "4000"]),
    (WAVES, eight_bits, ["0.wav", "16-bit"]),
    (WAVES, put("USB/yes/0.wav", b"RIFF"), ["0.wav", "cannot be read"]),
    (WAVES, lambda r: shutil.rmtree(r / "USB/yes"), ["USB has no", "yes"]),
    (ARRAYS, put(VOICE, np.full((10, 12), np.nan)), ["0.npy", "finite"]),
    (ARRAYS, put(VOICE, np.zeros((3, 3))), ["one shape"]),
    (ARRAYS, put("Voice/test/go/0.npy", b"no"), ["0.npy", "numpy.save"]),
    (make.office31, lambda r: None, ["no .npy or .wav", "published at"]),
]
SVHN, DSLR = "svhn_train_32x32.mat", "dslr_SURF_L10.mat"
WRONG: list[tuple[str, Build, Change, list[str]]] = [
    *(("digit5", make.digit5, put(SVHN, its), ["svhn", *words]) for its, words in DIGITS),
    *(("digit5", make.digit5, zipped(file), words) for file, words in MISSING),
    *(("office31", make.office31, change, words) for change, words in FOLDERS),
    *(("pacs", make.pacs, change, ["photo", *words]) for change, words in LISTS),
    *(("office-caltech10", make.surf, put(DSLR, its), [DSLR, *words]) for its, words in FEATURES),
    *(("rotated-mnist", make.mnist, put(file, its), [file, *words]) for file, its, words in IDX),
    *(("mic2mic-like", build, change, words) for build, change, words in SOUNDS),
]


@pytest.mark.parametrize(("name", "build", "change", "words"), WRONG)
def test_what_is_wrong_is_named(
    name: str, build: Build, change: Change, words: list[str], tmp_path: Path
) -> None:
    text = refused(after(build, change), name, tmp_path, DataError)
    assert all(word in text for word in words), text


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    source, out = make.office31(tmp_path / "source"), tmp_path / "out"
    for name, words in ((".unfinished", "did not end"), ("mine", "mine")):
        (out / name).mkdir(parents=True)
        with pytest.raises(DataError, match=f"not empty.*{words}"):
            import_benchmark("office31", source, out)
        assert [p.name for p in out.iterdir()] == [name]
        (out / name).rmdir()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DataError, match="is a file"):
        import_benchmark("office31", source, file)
    with pytest.raises(DataError, match="folder to read from"):
        import_benchmark("office31", source, source)


@pytest.mark.parametrize(
    "failure", [DataError("a reason"), KeyboardInterrupt(), OSError(28, "full")]
)
def test_nothing_is_left_of_an_import_that_fails(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails halfway: into an existing empty folder, and into a new one inside SOURCE."""
    source = make.digit5(tmp_path / "source")
    before = {p: p.stat().st_mtime_ns for p in source.iterdir()}
    save = np.savez_compressed

    def fail(path: Path, **given: Any) -> None:
        if path.parent.name == "svhn":
            raise failure
        save(path, **given)

    monkeypatch.setattr(np, "savez_compressed", fail)
    there, new = tmp_path / "there", source / "new"
    there.mkdir()
    for out in (there, new):
        with pytest.raises(type(failure)):
            import_benchmark("digit5", source, out)
    assert there.is_dir() and not list(there.iterdir()) and not new.exists()
    assert {p: p.stat().st_mtime_ns for p in source.iterdir()} == before
    monkeypatch.undo()
    import_benchmark("digit5", source, new)
    assert len(list(new.iterdir())) == 6


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digit5", {"transductive": True}, ["Digit-Five takes no --transductive", "--limit"]),
        ("office31", {"angles": (1,)}, ["takes no --angles"]),
        ("office31", {"test_share": 1.0}, ["--test-share is 1.0"]),
        ("office31", {"test_share": 0.3, "transductive": True}, ["leave out --test-share"]),
        ("office31", {"domains": ("amazn",)}, ["no domain 'amazn'", "amazon, dslr, webcam"]),
        ("office-caltech10", {"features": 3}, ["no columns for --features"]),
    ],
)
def test_options_without_an_effect_are_refused(
    name: str, options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    error = DataError if "features" in options else ConfigError
    text = refused(make.office_caltech, name, tmp_path, error, **options)
    assert all(word in text for word in words), text


def test_the_command_imports(tmp_path: Path) -> None:
    source, out = make.mnist(tmp_path / "source"), tmp_path / "out"
    few = ("--angles", "0,45", "--limit", 60)
    done = call("data", "import", "rotated-mnist", source, out, *few)
    assert "10 classes; MNIST's training digits train" in done.output
    assert f"fedda run kd3a --simulate {out} --target 0" in done.output.replace("\n", "")
    assert re.search(r"45\W+60\W+60", done.output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("imagenet", "S", "O"), "no benchmark 'imagenet': choose from digit5"),
        (("pacs", "nowhere", "O"), "nowhere is not a folder; needed for PACS"),
        (("rotated-mnist", "S", "O", "--angles", "0,x"), "whole numbers"),
    ],
)
def test_the_command_refuses_with_one_sentence(words: tuple[str, ...], message: str) -> None:
    done = call("data", "import", *words, code=1)
    assert done.output.startswith("error: ") and message in done.output


def test_the_list_of_benchmarks() -> None:
    everything = call("data", "benchmarks").output
    for benchmark in BENCHMARKS.values():
        assert f"{benchmark.name}: {benchmark.title}" in everything
        assert benchmark.url.split()[0] in everything
    assert max(map(len, everything.splitlines())) < 160
    one = call("data", "benchmarks", "pacs").output
    assert "art_painting, cartoon" in one and "Digit-Five" not in one
    call("data", "benchmarks", "none", code=1)


@pytest.mark.nightly("fedda/contrib/benchmarks")
@pytest.mark.parametrize(
    ("layout", "target"),
    [
        *(("digit5", "svhn"), ("office31", "webcam"), ("svmlight", "kitchen")),
        *(("mnist", "90"), ("surf", "dslr"), ("recordings", "USB")),
    ],
)
def test_a_run_over_an_import(layout: str, target: str, tmp_path: Path) -> None:
    """The run has the settings that the command proposes; photographs go to a small network."""
    name, build, domains, *_ = make.LAYOUTS[layout]
    enough = Options(transductive=layout == "surf")  # vectors are scaled by 40 or more
    done = import_benchmark(name, build(tmp_path / "source"), tmp_path / "out", enough)
    said = done.settings
    if layout == "office31":
        assert said == ("--preset", "photos")
        said = ("-c", "input.size=16")
    its = presets.settings("kd3a", said[1:]) if "--preset" in said else {}
    words = (word.split("=") for word in said if "=" in word)
    proposed = its | {name: int(value) if value.isdigit() else value for name, value in words}
    flat = {"method": "kd3a", "rounds": 1, "train.batch-size": 4, "run.dir": str(tmp_path / "runs")}
    config = RunConfig.parse(proposed | flat | {"train.steps": 1})
    results = simulate(config, folders(done.out, target, {}), Journal(), "process")
    (only,) = results["trainings"]["kd3a"]
    assert len(only["rounds"]) == 1 and len(results["sites"]) == len(domains.split())
