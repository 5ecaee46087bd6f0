"""The embedded digits: reproducible, balanced, and no pen digit occurs in two places."""

from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedda.data import digits, synthetic
from fedda.errors import DataError

TRAIN, TEST = 30, 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digits.build(tmp_path_factory.mktemp("digits"), train=TRAIN, test=TEST)


@pytest.mark.parametrize("d", range(len(digits.DOMAINS)), ids=digits.DOMAINS)
def test_shapes_types_and_balance(files: list[Path], d: int):
    colour = (3,) if digits.DOMAINS[d] in ("blended", "street") else ()
    with np.load(files[d]) as arrays:
        assert set(arrays) == {"x_train", "y_train", "x_test", "y_test"}
        for split, count in (("train", TRAIN), ("test", TEST)):
            x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
            assert (x.dtype, y.dtype) == (np.uint8, np.int64)
            assert x.shape == (count, digits.SIDE, digits.SIDE, *colour)
            assert np.bincount(y).tolist() == [count // digits.CLASSES] * digits.CLASSES
            # No image is blank, and no two are equal.
            assert x.reshape(count, -1).std(axis=1).min() > 5
            assert len({image.tobytes() for image in x}) == count


def test_domains_may_differ_in_size(tmp_path: Path):
    sizes = {"handwritten": 10, "blended": 20, "fonts": 40, "street": 10}
    for file in digits.build(tmp_path, train=sizes, test=10):
        with np.load(file) as arrays:
            assert len(arrays["x_train"]) == len(arrays["y_train"]) == sizes[file.parent.name]


def test_the_same_seed_gives_the_same_bytes(files: list[Path], tmp_path: Path):
    again = digits.build(tmp_path / "again", train=TRAIN, test=TEST)
    assert [f.read_bytes() for f in again] == [f.read_bytes() for f in files]
    assert [(f.parent.name, f.name) for f in files] == [(d, "data.npz") for d in digits.DOMAINS]
    for old, new in zip(files, digits.build(tmp_path, seed=1, train=TRAIN, test=TEST), strict=True):
        with np.load(old) as a, np.load(new) as b:
            assert not np.array_equal(a["x_train"], b["x_train"])


@pytest.mark.parametrize("seed", [0, 7])
def test_no_pen_digit_and_no_font_is_used_twice(seed: int):
    assert not set(digits.SERIF) & set(digits.SANS)
    dealt = digits.handwritten_ids(seed)
    assert set(dealt) == {(d, s) for d in ("handwritten", "blended") for s in ("train", "test")}
    rows = {pot: np.concatenate(pieces).tolist() for pot, pieces in dealt.items()}
    for one, other in combinations(rows, 2):
        assert not set(rows[one]) & set(rows[other]), f"{one} and {other} share pen digits"
    assert sorted(chain.from_iterable(rows.values())) == list(range(1797))
    _, target = load_digits(return_X_y=True)
    for pieces in dealt.values():
        for c, piece in enumerate(pieces):
            assert len(piece) >= 30
            assert set(target[piece]) == {c}


def test_only_selected_digits_are_drawn(monkeypatch: pytest.MonkeyPatch):
    pen, _ = digits.pen_digits()
    allowed = {
        pen[i].tobytes() for i in np.concatenate(digits.handwritten_ids(0)["blended", "test"])
    }
    drawn: list[bytes] = []
    enlarge = digits._enlarge

    def spy(image: digits.Unit):
        drawn.append(image.tobytes())
        return enlarge(image)

    monkeypatch.setattr(digits, "_enlarge", spy)
    labels = np.arange(40) % digits.CLASSES
    digits.draw("blended", "test", labels, np.random.default_rng(0), seed=0)
    assert len(drawn) == 40
    assert set(drawn) <= allowed


def test_coloured_numbers_are_balanced_repeatable_and_all_different(tmp_path: Path) -> None:
    with np.load(synthetic.build(tmp_path, train=40, test=20)) as arrays:
        first = dict(arrays)
    for split, count in (("train", 40), ("test", 20)):
        x, y = first[f"x_{split}"], first[f"y_{split}"]
        assert x.shape == (count, 32, 32, 3)
        assert x.dtype == np.uint8
        assert np.bincount(y).tolist() == [count // 10] * 10
        assert x.reshape(count, -1).std(axis=1).min() > 5
    every = [image.tobytes() for s in ("train", "test") for image in first[f"x_{s}"]]
    assert len(set(every)) == 60
    with np.load(synthetic.build(tmp_path, train=40, test=20)) as again:
        assert all(np.array_equal(again[name], first[name]) for name in first)
    with np.load(synthetic.build(tmp_path, train=40, test=20, seed=1, size=16)) as other:
        assert other["x_train"].shape == (40, 16, 16, 3)


def test_the_digit_in_the_middle_is_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each number the label's digit is at the centre, whatever stands beside it."""
    font = synthetic.ImageFont.truetype(synthetic.font_files(None)[0], 100)
    for digits_ in (["7"], ["1", "7"], ["7", "1"], ["1", "7", "8"]):
        at = digits_.index("7")
        placed = dict(synthetic._places(digits_, at, font, 2))
        left, _, right, _ = font.getbbox("7")
        assert placed["7"][0] + (left + right) / 2 == pytest.approx(synthetic.LARGE)


def test_a_folder_without_fonts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \.ttf or \.otf file"):
        synthetic.font_files(tmp_path)
