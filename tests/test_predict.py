"""`fedda predict`: every example of a site once, in order, with the model's own probabilities."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedda import models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.data import batches
from fedda.data.form import conform_images
from fedda.errors import DataError
from tests.command_lines import call

RNG = np.random.default_rng(0)
CLASSES = ("cat", "dog", "file")
CNN, MLP = ModelConfig(name="digit-cnn"), ModelConfig(name="mlp", hidden="4")


def saved(path: Path, config: ModelConfig = CNN, shape: tuple[int, ...] = (1, 8, 8)) -> Path:
    model = models.build(config, shape, len(CLASSES), seed=3)
    models.save(path, model, config=config, inputs=Inputs(shape), classes=CLASSES)
    return path


def picture(path: Path, size: int = 8, colour: bool = False) -> np.ndarray:
    """Write a random PNG -> its pixels as (channels, size, size)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = RNG.integers(0, 256, (size, size, 3) if colour else (size, size), dtype=np.uint8)
    Image.fromarray(x).save(path)
    return x.transpose(2, 0, 1) if colour else x[None]


def run(*arguments: object) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(call("predict", *arguments).stdout)))


def refused(*arguments: object) -> str:
    result = call("predict", *arguments, code=1)
    assert not result.stdout and result.stderr.startswith("error: ")
    return result.stderr


def check(rows: list[dict[str, str]], model: Path, x: torch.Tensor) -> None:
    """Check that the rows hold the model's probabilities for x, in x's order."""
    p = models.predict(models.load(model)[0], x)
    assert len(rows) == len(x)
    for row, expected in zip(rows, p, strict=True):
        assert list(row) == ["file", "class", "probability", "p_cat", "p_dog", "p_file"]
        probabilities = [float(row[f"p_{name}"]) for name in CLASSES]
        assert probabilities == pytest.approx(expected.tolist(), rel=1e-4)
        assert row["class"] == CLASSES[int(expected.argmax())]
        assert float(row["probability"]) == max(probabilities)


def test_rows_are_the_images_of_a_flat_folder_by_name(tmp_path: Path) -> None:
    model = saved(tmp_path / "model.safetensors")
    pixels = {name: picture(tmp_path / "data" / name) for name in ("c.png", "a.png", "b,1.png")}
    (tmp_path / "data" / "notes.txt").touch()
    rows = run(model, tmp_path / "data", "--batch", 2, "--device", "cpu")
    assert [row["file"] for row in rows] == ["a.png", "b,1.png", "c.png"]
    check(rows, model, torch.from_numpy(np.stack([pixels[n] for n in sorted(pixels)])))
    assert len({row["p_cat"] for row in rows}) == 3  # three different images


def test_every_folder_is_read_and_images_come_to_the_models_shape(tmp_path: Path) -> None:
    model = saved(tmp_path / "model.safetensors")
    data = tmp_path / "data"
    names = ["train/1.png", "train/cat/0.png", "test/cat/9.png", "test/dog/5.png", "train/.x.png"]
    pixels = {name: picture(data / name, size=12, colour=True) for name in names}
    rows = run(model, data)
    order = ["test/cat/9.png", "test/dog/5.png", "train/1.png", "train/cat/0.png"]
    assert [row["file"] for row in rows] == order
    x = torch.from_numpy(np.stack([pixels[name] for name in order]))
    names_, examples, _ = next(batches(data, (3, 12, 12), 10))
    assert names_ == order
    assert torch.equal(examples.x, x)
    for batch, (_, small, _) in enumerate(batches(data, (1, 8, 8), 1)):
        # Pillow and torch round differently when they resize.
        exact = conform_images(x[batch : batch + 1], 1, 8)
        assert (small.x.int() - exact.int()).abs().max() <= 2


def test_a_runs_folder_and_vectors_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    model = saved(tmp_path / "run" / "model.safetensors", MLP, (5,))
    x = RNG.normal(size=(4, 5)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    check(run(tmp_path / "run", tmp_path / "x.npz"), model, torch.from_numpy(x))


def test_out_is_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    model, out = saved(tmp_path / "model.safetensors"), tmp_path / "out.csv"
    for name in ("a.png", "b.png"):
        picture(tmp_path / "data" / name)
    arguments = (model, tmp_path / "data", "--out", out, "--batch", 1)
    assert call("predict", *arguments).stdout == f"{out}: 2 predictions\n"
    written = out.read_bytes()
    names = [line.partition(",")[0] for line in out.read_text().splitlines()]
    assert names == ["file", "a.png", "b.png"]
    (tmp_path / "data" / "b.png").write_bytes(b"no image")
    assert "b.png cannot be read" in refused(*arguments)
    assert out.read_bytes() == written
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "model.safetensors", "out.csv"]


def test_what_does_not_fit_is_refused_with_a_reason(tmp_path: Path) -> None:
    images, vectors = saved(tmp_path / "cnn.safetensors"), tmp_path / "mlp.safetensors"
    saved(vectors, MLP, (5,))
    np.savez(tmp_path / "six.npz", x=np.zeros((2, 6)))
    np.savez(tmp_path / "other.npz", z=np.zeros((2, 6)))
    picture(tmp_path / "data" / "a.png")
    (tmp_path / "empty").mkdir()
    assert "vectors of 6 numbers, but the model takes vectors of 5 numbers" in refused(
        vectors, tmp_path / "six.npz"
    )
    assert "vectors of 6 numbers, but the model takes images" in refused(
        images, tmp_path / "six.npz"
    )
    assert "images, but the model takes vectors of 5" in refused(vectors, tmp_path / "data")
    assert "empty holds no images" in refused(images, tmp_path / "empty")
    assert "has no examples; found: z" in refused(images, tmp_path / "other.npz")
    assert "nowhere does not exist" in refused(images, tmp_path / "nowhere")
    assert "empty holds no model.safetensors" in refused(tmp_path / "empty", tmp_path / "data")
    assert "Cannot read" in refused(tmp_path / "no.safetensors", tmp_path / "data")
    assert "is not a device" in refused(images, tmp_path / "data", "--device", "abacus")


def test_images_are_not_resized_for_a_model_whose_images_are_not_square(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", size=8)
    with pytest.raises(DataError, match=r"an image is 1x8x8 .* takes 1x8x6"):
        list(batches(tmp_path, (1, 8, 6), 1))


def test_a_run_whose_model_has_not_adapted_says_where_the_adapted_one_is(tmp_path: Path) -> None:
    picture(tmp_path / "data" / "a.png")
    saved(tmp_path / "model.safetensors")
    adapted = {"site": "town", "file": "town/pair.dils-0.model.safetensors"}
    (tmp_path / "results.json").write_text(
        json.dumps({"trainings": {"dils": [{"target": "town", "adapted": adapted}]}})
    )
    for model in (tmp_path, tmp_path / "model.safetensors"):
        result = call("predict", model, tmp_path / "data")
        assert "town/pair.dils-0.model.safetensors" in result.stderr
        assert result.stdout.startswith("file,class,")
