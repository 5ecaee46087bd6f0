"""One domain rotated into many: clockwise, on each image's background, no image in two domains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedda.data.digits import build as build_digits
from fedda.data.rotate import build, deal, rotate
from fedda.errors import DataError
from tests.command_lines import call

ANGLES = (0, 30, 90)


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_digits(tmp_path_factory.mktemp("digits"), train=60, test=40)[0].parent


def arrays(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "data.npz") as file:
        return dict(file)


@pytest.mark.parametrize("angle", [0, 90, 180, 270, -90, 450])
def test_quarter_turns_are_numpys_clockwise(angle: int) -> None:
    x = random_images(3, 3, 8, 8)
    expected = np.rot90(x, -angle // 90, axes=(2, 3))
    assert np.array_equal(rotate(torch.from_numpy(x), angle).numpy(), expected)


@pytest.mark.parametrize("angle", [15, 45, 100, 200, 290, -30])
def test_pixels_are_those_of_a_naive_loop(angle: int) -> None:
    """Each pixel is turned back about the middle and interpolated from the four around it."""
    x = random_images(2, 3, 6, 6)
    turned = rotate(torch.from_numpy(x), angle).numpy()
    c, s, middle = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle)), 2.5
    for n, channel in np.ndindex(2, 3):
        image = x[n, channel].astype(float)
        border = np.concatenate([image[0], image[-1], image[1:-1, 0], image[1:-1, -1]])
        ground = np.sort(border)[(len(border) - 1) // 2]
        for row, column in np.ndindex(6, 6):
            right, down = column - middle, row - middle
            across, along = c * right + s * down + middle, -s * right + c * down + middle
            value = 0.0
            for r, q in np.ndindex(2, 2):
                i, j = int(np.floor(along)) + r, int(np.floor(across)) + q
                weight = (1 - abs(along - i)) * (1 - abs(across - j))
                value += weight * (image[i, j] if 0 <= i < 6 and 0 <= j < 6 else ground)
            assert abs(turned[n, channel, row, column] - value) <= 0.5 + 1e-3


def test_no_image_is_dealt_twice_and_none_is_left_out() -> None:
    y = torch.tensor([0] * 7 + [1] * 4 + [2] * 3)
    heaps = deal(y, 3, np.random.default_rng(0))
    assert sorted(np.concatenate(heaps).tolist()) == list(range(14))
    assert sorted(map(len, heaps)) == [4, 5, 5]
    for heap in heaps:
        assert set(y[heap].tolist()) == {0, 1, 2}


def test_domains_share_no_image_and_have_all_classes(digits: Path, tmp_path: Path) -> None:
    done = build(digits, tmp_path / "out", ANGLES)
    assert (done[0].path.parent.name, done[0].train, done[0].test) == ("0", 20, 14)
    before = arrays(digits)
    for split, count in (("train", 60), ("test", 40)):
        labels = {image.tobytes(): y for image, y in zip(*_half(before, split), strict=True)}
        rest = dict(labels)
        for angle in (0, 90):  # can be turned back exactly
            x, y = _half(arrays(tmp_path / "out" / str(angle)), split)
            back = np.rot90(x, angle // 90, axes=(1, 2))
            for image, label in zip(back, y, strict=True):
                assert rest.pop(image.tobytes()) == label
            assert set(y.tolist()) == set(range(10))
        x, y = _half(arrays(tmp_path / "out" / "30"), split)
        assert len(x) == len(rest) and sum(rest.values()) == y.sum()
        left = np.stack([np.frombuffer(k, np.uint8).reshape(1, 16, 16) for k in rest])
        again = {image.tobytes() for image in rotate(torch.from_numpy(left), 30).numpy()}
        assert {image.tobytes() for image in x} == again
        assert len(labels) == count


def _half(content: dict[str, np.ndarray], split: str) -> tuple[np.ndarray, np.ndarray]:
    return content[f"x_{split}"], content[f"y_{split}"]


def test_a_target_keeps_no_training_label(digits: Path, tmp_path: Path) -> None:
    build(digits, tmp_path / "out", ANGLES, role="target")
    written = arrays(tmp_path / "out" / "30")
    assert sorted(written) == ["classes", "x_test", "x_train", "y_test"]
    flat = tmp_path / "flat.npz"
    np.savez(flat, x=random_images(9, 5, 5, 3))
    build(flat, tmp_path / "more", ANGLES, role="target")
    written = arrays(tmp_path / "more" / "90")
    assert {k: v.shape for k, v in written.items()} == {"x_train": (3, 5, 5, 3)}


def test_a_folder_of_images_in_colour_is_rotated(tmp_path: Path) -> None:
    for i in range(6):
        file = tmp_path / "in" / ("cat", "dog")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_images(8 + i, 10, 3)).save(file)
    with pytest.raises(DataError, match=r"several sizes.* --size"):
        build(tmp_path / "in", tmp_path / "out", ANGLES)
    assert not (tmp_path / "out").exists()
    build(tmp_path / "in", tmp_path / "out", ANGLES, size=8)
    written = arrays(tmp_path / "out" / "30")
    assert written["x_train"].shape == (2, 8, 8, 3)
    assert written["classes"].tolist() == ["cat", "dog"]
    assert sorted(written["y_train"].tolist()) == [0, 1]
    assert "x_test" not in written


def test_what_cannot_be_turned_is_refused(tmp_path: Path) -> None:
    vectors, oblong, few = (tmp_path / f"{n}.npz" for n in ("vectors", "oblong", "few"))
    np.savez(vectors, x=np.zeros((4, 3), np.float32), y=np.arange(4) % 2)
    np.savez(oblong, x=random_images(6, 4, 5), y=np.arange(6) % 2)
    np.savez(few, x=random_images(5, 4, 4), y=np.array([0, 0, 0, 1, 1]))
    for source, text in (
        (vectors, "vectors of 3 numbers, but only images can be turned"),
        (oblong, r"images of 5x4 pixels, but only square ones .* --size"),
        (few, r"too few training images in .* for 3 angles \(1: 2\)"),
        (tmp_path / "gone", "does not exist"),
    ):
        with pytest.raises(DataError, match=text):
            build(source, tmp_path / "out", ANGLES)
    assert not (tmp_path / "out").exists()
    build(few, tmp_path / "out", ANGLES, everywhere=True)


def test_nothing_is_overwritten_and_nothing_left_half_done(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.md").write_text("mine")
    with pytest.raises(DataError, match="is not empty, and nothing is overwritten"):
        build(digits, tmp_path / "full", ANGLES)
    (tmp_path / "empty").mkdir()
    save = np.savez_compressed

    def fails(file: Path, **content: Any) -> None:
        if file.parent.name == "30":
            raise OSError(28, "No space left on device", str(file))
        save(file, **content)

    monkeypatch.setattr(np, "savez_compressed", fails)
    for name in ("empty", "new"):
        with pytest.raises(OSError, match="No space left"):
            build(digits, tmp_path / name, ANGLES)
    assert list((tmp_path / "empty").iterdir()) == []
    assert not (tmp_path / "new").exists()


def test_the_command_rotates_and_refuses_wrong_angles(digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = call("data", "rotate", digits, out, "--angles", "0,-90")
    assert shown.stdout.splitlines() == [
        f"{out / angle / 'data.npz'}: 30 training, 20 test" for angle in ("0", "270")
    ]
    for angles, text in (("0,x", "whole numbers"), (",", "whole numbers"), ("9,9", "twice")):
        shown = call("data", "rotate", digits, tmp_path / "o", "--angles", angles, code=1)
        assert text in shown.stderr
