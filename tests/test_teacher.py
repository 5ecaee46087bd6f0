"""A target's own teacher: what it may be, what it does, and that nobody hears of it."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from clients.site.teacher import Teacher, checked
from fedda import data, models
from fedda.algorithms import shot
from fedda.cli import app
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.data import Reading
from fedda.errors import FeddaError
from fedda.models.export import export
from tests.local_grid import CLASSES, EXAMPLES, Node, ScriptedGrid, make_domains, run

NAMES = tuple(map(str, range(CLASSES)))
CPU = torch.device("cpu")


def truth(n: int = EXAMPLES["town"]) -> Tensor:
    """What a teacher says that knows the target's classes (tests.local_grid: row % classes)."""
    return 0.97 * torch.eye(CLASSES)[torch.arange(n) % CLASSES] + 0.03 / CLASSES


def write(path: Path, p: Tensor, classes: Any = NAMES, names: list[str] | None = None) -> Path:
    names = names or [f"x_train/{i}" for i in range(len(p))]
    if path.suffix == ".npz":
        np.savez(path, p=p.numpy(), classes=np.array(classes), names=np.array(names))
        return path
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", *(f"p_{name}" for name in classes)])
        table.writerows([name, *row] for name, row in zip(names, p.tolist(), strict=True))
    return path


def sites(root: Path, teacher: Path | None) -> list[Node]:
    return [
        node | ({"teacher": str(teacher)} if teacher and node["role"] == "target" else {})
        for node in make_domains(root)
    ]


def trained(
    root: Path, teacher: Path | None, method: str, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    chosen = {"method": method, "run.dir": str(root)} | (settings or {})
    results, _ = run(sites(root, teacher), chosen)
    assert not results["events"], results["events"]
    return results["trainings"][method][0]


HEIRS = pytest.mark.nightly("clients/site/teacher.py", "clients/shot.py", "fedda/contrib/methods")


@pytest.mark.parametrize(
    "method", ["kd3a", *(pytest.param(m, marks=HEIRS) for m in ("shot", "decision", "comda"))]
)
def test_a_method_hears_a_good_teacher(method: str, tmp_path: Path) -> None:
    """Sources with mostly wrong labels teach nothing; a teacher that knows the classes helps."""
    settings = {"rounds": 10, "run.refine": "none"}
    if method != "kd3a":
        settings[f"{method}.epochs"] = 4
    file = write(tmp_path / "old.csv", truth())
    last = []
    for teacher in (None, file):
        nodes = [
            node | ({"poison": 80} if node["role"] == "source" else {})
            for node in sites(tmp_path, teacher)
        ]
        chosen = {"method": method, "run.dir": str(tmp_path), "run.name": str(len(last))}
        results, _ = run(nodes, chosen | settings)
        last.append(results["trainings"][method][0]["final_accuracy"])
    assert last[0] < 0.3
    assert last[1] > last[0] + 0.3


def test_the_last_step_of_any_method_hears_it(tmp_path: Path) -> None:
    settings = {"rounds": 1, "train.lr": 0.005, "run.refine": "careful"}
    file = write(tmp_path / "old.csv", truth())
    without = trained(tmp_path / "without", None, "fedavg", settings)
    heard = trained(tmp_path / "with", file, "fedavg", settings)
    assert heard["rounds"][-1]["accuracy"] == without["rounds"][-1]["accuracy"]
    assert heard["refined"]["accuracy"] > without["refined"]["accuracy"] + 0.1


@pytest.mark.parametrize("method", ["kd3a", "shot"])
def test_nobody_hears_of_it(method: str, tmp_path: Path) -> None:
    """The same messages with the same arrays and numbers cross, with a teacher and without."""

    def crossed(teacher: Path | None) -> list[Any]:
        root = tmp_path / str(teacher is None)
        root.mkdir()
        grid = ScriptedGrid(nodes := sites(root, teacher))
        run(nodes, {"method": method, "run.dir": str(root), "run.name": "run"}, grid=grid)
        return [(c.way, c.site, c.kind, c.arrays, c.numbers, c.hop, c.error) for c in grid.crossed]

    plain, taught = crossed(None), crossed(write(tmp_path / "old.csv", truth()))
    assert plain and plain == taught


def test_one_of_other_classes_is_named_at_the_site_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "old.csv", truth(), ("0", "1", "2", "cat"))
    with caplog.at_level(logging.ERROR, "fedda.site"):
        odd = trained(tmp_path / "odd", file, "kd3a")
    said = [r.getMessage() for r in caplog.records if "teacher is not heard" in r.getMessage()]
    assert len(said) == 1 and "cat" in said[0] and "give a teacher of the same classes" in said[0]
    assert odd["final_accuracy"] == trained(tmp_path / "none", None, "kd3a")["final_accuracy"]


@pytest.mark.parametrize("shift", [0, 1])
def test_rows_in_another_order_are_said_at_the_site(
    shift: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file whose rows have numbers alone fits any data of as many examples."""
    file = write(tmp_path / "old.csv", truth().roll(shift, dims=0))
    with caplog.at_level(logging.WARNING, "fedda.site"):
        trained(tmp_path / "run", file, "fedavg", {"rounds": 4})
    said = [r.getMessage() for r in caplog.records if "in another order" in r.getMessage()]
    assert len(said) == shift and all("for 0% of the images" in text for text in said)


# ---- files -------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of images whose training order is shuffled."""
    draws = np.random.default_rng(0)
    for i in range(30):
        path = tmp_path / "clinic" / ("cat", "dog")[i % 2] / f"{'=' * (i == 3)}{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return tmp_path / "clinic"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = ModelConfig(name="digit-cnn")
    made = models.build(config, (1, 8, 8), 2, seed=3)
    path = tmp_path / "old.safetensors"
    models.save(path, made, config=config, inputs=Inputs((1, 8, 8)), classes=("dog", "cat"))
    return path


def answered(file: Path, folder: Path, classes: tuple[str, ...] = ("cat", "dog")) -> Tensor:
    said = Teacher(file, folder, Reading(), CPU).answers(classes, torch.arange(30), 30)
    assert said is not None
    return said


def test_every_kind_of_file_says_the_same_of_the_same_images(
    pictures: Path, model: Path, tmp_path: Path
) -> None:
    network, _ = models.load(model)
    wanted = models.predict(network, data.load_target(pictures).x)[:, [1, 0]]
    table = tmp_path / "old.csv"
    done = CliRunner().invoke(app, ["predict", str(model), str(pictures), "--out", str(table)])
    assert done.exit_code == 0, done.output
    names = data.names(pictures)
    rows = write(tmp_path / "old.npz", wanted, ("cat", "dog"), names)
    exported = export(model, tmp_path / "old.onnx").path
    for file in (model, table, rows, exported):
        torch.testing.assert_close(answered(file, pictures), wanted, atol=1e-5, rtol=0)
    other = CliRunner().invoke(app, ["predict", str(exported), str(pictures)])
    lines = [text.splitlines()[1:] for text in (table.read_text(), other.stdout)]
    for one, two in zip(*lines, strict=True):
        a, b = one.split(","), two.split(",")
        assert a[:2] == b[:2]
        np.testing.assert_allclose([*map(float, a[3:])], [*map(float, b[3:])], rtol=1e-4)
    chosen = Teacher(table, pictures, Reading(), CPU).answers(("dog", "cat"), torch.tensor([4]), 30)
    assert chosen is not None
    torch.testing.assert_close(chosen, wanted[[4]][:, [1, 0]], atol=1e-5, rtol=0)


def test_rows_of_arrays_need_no_names(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 6), dtype=np.float32)
    np.savez(tmp_path / "t.npz", x_train=x, x_test=x[:3], y_test=[0, 1, 0])
    p = torch.rand(20, 2).softmax(dim=1)
    np.savez(tmp_path / "old.npz", p=p.numpy(), classes=["a", "b"])
    said = Teacher(tmp_path / "old.npz", tmp_path / "t.npz", Reading(), CPU).check()
    torch.testing.assert_close(said[1], p)


def spoilt(kind: str, folder: Path, tmp_path: Path) -> Path:
    names = data.names(folder)
    p = torch.full((30, 2), 0.5)
    match kind:
        case "rows":
            return write(tmp_path / "t.csv", p[:28], ("cat", "dog"), names[:28])
        case "scores":
            p[7] = torch.tensor([-3.0, 8.0])
            return write(tmp_path / "t.csv", p, ("cat", "dog"), names)
        case "no number":
            p[7, 0] = torch.nan
            return write(tmp_path / "t.npz", p, ("cat", "dog"), names)
        case "columns":
            (tmp_path / "t.csv").write_text("image,cat,dog\n1,.5,.5\n")
        case "text":
            (tmp_path / "t.csv").write_text("file,p_cat,p_dog\na,much,little\n")
        case "nameless":
            np.savez(tmp_path / "t.npz", p=p.numpy(), classes=["cat", "dog"])
            return tmp_path / "t.npz"
        case "width":
            return write(tmp_path / "t.npz", p, ("cat", "dog", "bird"), names)
        case "pickle":
            np.savez(tmp_path / "t.npz", p=p.numpy(), classes=np.array(["cat", None]))
            return tmp_path / "t.npz"
        case "ending":
            (tmp_path / "t.bin").write_bytes(b"x")
            return tmp_path / "t.bin"
        case "model":
            (tmp_path / "t.safetensors").write_bytes(b"x")
            return tmp_path / "t.safetensors"
        case "onnx":
            (tmp_path / "t.onnx").write_bytes(b"x")
            return tmp_path / "t.onnx"
        case "cut off":
            whole = write(tmp_path / "t.csv", p, ("cat", "dog"), names).read_text()
            (tmp_path / "t.csv").write_text(whole.rpartition(",")[0])
        case "empty":
            (tmp_path / "t.csv").write_bytes(b"")
        case "twice":
            return write(tmp_path / "t.csv", p[[*range(30), 3]], ("cat", "dog"), [*names, names[4]])
        case "archive" | "no archive" | "array":
            with (tmp_path / "t.npz").open("wb") as file:
                np.save(file, p.numpy()) if kind == "array" else None
                file.write(b"PK\x03\x04 cut off" if kind == "archive" else b"")
            return tmp_path / "t.npz"
    return tmp_path / "t.csv"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("rows", "says nothing of 2 of the 30 examples"),
        ("scores", "write probabilities, not scores"),
        ("no number", "write probabilities, not scores"),
        ("columns", "its columns are image, cat, dog"),
        ("text", "cannot be read as class probabilities"),
        ("nameless", "it lacks `names`"),
        ("width", "p is (30, 2) for 3 classes"),
        ("pickle", "cannot be read as class probabilities"),
        ("ending", "is no teacher: give class probabilities (.csv, .npz) or a model"),
        ("model", "t.safetensors"),
        ("onnx", "cannot be read as a model of fedda's"),
        ("cut off", "line 31 has 2 of 3 columns"),
        ("empty", "its columns are none"),
        ("twice", "has several rows of"),
        ("archive", "cannot be read as class probabilities"),
        ("no archive", "cannot be read as class probabilities"),
        ("array", "cannot be read as class probabilities"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    kind: str, text: str, pictures: Path, tmp_path: Path
) -> None:
    file = spoilt(kind, pictures, tmp_path)
    with pytest.raises(FeddaError) as refusal:
        checked(file, "target", pictures, Reading(), CPU)
    assert text in str(refusal.value) and file.name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_simulated_run_takes_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    make_domains(tmp_path / "data")
    file, place = write(tmp_path / "old.csv", truth()), tmp_path / "runs"

    def simulated(name: str, targets: str, *more: str) -> Any:
        words = ["run", "fedavg", "--simulate", str(tmp_path / "data"), "--target", targets]
        words += ["--dir", str(place), "--name", name, "--rounds", "3", "-c", "model.name=mlp"]
        words += ["-c", "model.hidden=16", "-c", "train.steps=0"]
        return CliRunner().invoke(app, [*words, *more])

    assert simulated("plain", "town").exit_code == 0
    assert simulated("taught", "town", "--teacher", str(file)).exit_code == 0
    plain, taught = (
        json.loads((place / name / "results.json").read_text())["trainings"]["fedavg"][0]
        for name in ("plain", "taught")
    )
    assert taught["final_accuracy"] == plain["final_accuracy"]
    assert taught["refined"]["accuracy"] > plain["refined"]["accuracy"]
    write(file, truth(40))
    short = simulated("short", "town", "--teacher", str(file))
    assert short.exit_code == 1 and "says nothing of 8 of the 48 examples" in short.output
    assert not (place / "short").exists()
    other = simulated(
        "other", "town", "--teacher", str(write(file, truth(), ("0", "1", "2", "cat")))
    )
    assert other.exit_code == 1 and "give a teacher of the same classes" in other.output
    both = simulated("both", "town,carl", "--teacher", str(file))
    assert both.exit_code == 1 and "is the teacher of one target, and the run has 2" in both.output


def test_a_prior_of_even_chances_changes_nothing_and_a_sure_one_decides() -> None:
    p = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    torch.testing.assert_close(shot.with_prior(p, torch.full((2, 2), 0.5)), p)
    found = shot.with_prior(p, torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    # .6 x .05 to .4 x .95, and .05 to .95: no class is ruled out
    torch.testing.assert_close(found, torch.tensor([[0.03 / 0.41, 0.38 / 0.41], [0.05, 0.95]]))
