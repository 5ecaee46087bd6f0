"""`fedda export`: a file that describes itself and gives the model's answers without fedda."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedda import models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import ModelError
from fedda.models import export
from tests.command_lines import call

CLASSES = ("cat", "dog", 'Ä, "b"')
MLP = ModelConfig(name="mlp", hidden="4")
slow = pytest.mark.slow
nightly = pytest.mark.nightly("fedda/models", "fedda/cli/export.py")
FAMILIES: list[Any] = [
    pytest.param(MLP, (5,), id="vectors"),
    pytest.param(MLP, (1, 4, 4), id="mlp"),
    pytest.param(ModelConfig(name="digit-cnn"), (1, 8, 8), id="digit-cnn"),
    pytest.param(ModelConfig(name="lenet"), (3, 16, 20), id="lenet"),
    pytest.param(ModelConfig(name="resnet18"), (3, 32, 32), id="resnet18"),
    pytest.param(ModelConfig(name="resnet18"), (1, 20, 30), id="resnet18-gray"),
    pytest.param(ModelConfig(name="alexnet"), (3, 63, 70), id="alexnet"),
]


def families(in_the_gate: str) -> list[Any]:
    """All of them, the others than one for the night."""
    return [
        pytest.param(*each.values, id=each.id, marks=slow if each.id == in_the_gate else nightly)
        for each in FAMILIES
    ]


def saved(
    path: Path, config: ModelConfig = MLP, shape: tuple[int, ...] = (5,), seed: int = 3
) -> Path:
    """Save a model whose BatchNorm layers have seen data, so that their statistics matter."""
    model = models.build(config, shape, len(CLASSES), seed=seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.rand(8, *shape, generator=random))
    models.save(path, model, config=config, inputs=Inputs(shape), classes=CLASSES)
    return path


def inputs(shape: tuple[int, ...], n: int) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(n))


def run_onnx(path: Path, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run an ONNX file as the help text shows it."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (entrance,), (exit_,) = session.get_inputs(), session.get_outputs()
    assert (entrance.name, exit_.name) == ("x", "probabilities")
    assert (entrance.shape, exit_.shape) == (["batch", *x.shape[1:]], ["batch", len(CLASSES)])
    about = json.loads(session.get_modelmeta().custom_metadata_map["fedda"])
    return torch.from_numpy(session.run(["probabilities"], {"x": x.numpy()})[0]), about


def check(read: Callable[..., Any], path: Path, source: Path, config: ModelConfig) -> None:
    model, meta = models.load(source)
    for n in (1, 2, 7):
        x = inputs(meta.shape, n)
        found, about = read(path, x)
        torch.testing.assert_close(found, models.predict(model, x), atol=1e-5, rtol=1e-4)
    assert about["classes"] == list(CLASSES)
    assert about["shape"] == list(meta.shape)
    assert about["model"] == config.name
    assert about["range"] == ([0, 1] if len(meta.shape) == 3 else None)


@pytest.mark.parametrize(("config", "shape"), families("digit-cnn"))
def test_onnx_gives_the_models_answers(
    tmp_path: Path, config: ModelConfig, shape: tuple[int, ...]
) -> None:
    source = saved(tmp_path / "model.safetensors", config, shape)
    done = export.export(source, tmp_path / "model.onnx")
    assert done.difference < 1e-5
    check(run_onnx, done.path, source, config)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.safetensors"]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda y: y + 2e-4, "0.0002"),
        (lambda y: y * float("nan"), "nan"),
        (lambda y: y[:, :2], "inf"),
        (lambda y: y.flip(1), "by up to"),
    ],
    ids=["a little", "not a number", "a class less", "classes in another order"],
)
def test_a_file_with_other_answers_is_deleted_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, word: str
) -> None:
    source, out = saved(tmp_path / "model.safetensors"), tmp_path / "model.onnx"
    out.write_text("an earlier one")
    model = export.Classifier(models.load(source)[0])
    wrong = (
        lambda program, path, about: path.write_text(about),
        lambda path: (lambda x: spoil(model(x)) if path.is_file() else None, ""),
    )
    monkeypatch.setattr(export, "_write", wrong[0])
    monkeypatch.setattr(export, "_read", wrong[1])
    monkeypatch.setattr(torch.export, "export", lambda *args, **more: None)
    with pytest.raises(ModelError, match=f"other probabilities than the model.*{word}"):
        export.export(source, out)
    assert out.read_text() == "an earlier one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.safetensors"]


def refused(*words: object) -> str:
    done = call("export", *words, code=1)
    assert isinstance(done.exception, SystemExit), done.output
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make the folder of a finished run with two methods and two seeds."""
    folder = tmp_path / "run"
    for seed, name in enumerate(("kd3a-4", "kd3a-5", "fedavg-4", "fedavg-5")):
        (folder / name).mkdir(parents=True)
        saved(folder / name / "model.safetensors", seed=seed)
    saved(folder / "model.safetensors", seed=0)
    (folder / "config.json").write_text(json.dumps({"method": "kd3a", "run.seeds": "4,5"}))
    return folder


CHOICES = {"": 0, "--seed 5": 1, "--method fedavg": 2, "--method fedavg --seed 5": 3}
CHOICES |= {"--method kd3a --seed 4": 0}


@pytest.mark.parametrize(("words", "seed"), CHOICES.items())
def test_a_runs_trainings_can_be_chosen(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: str, seed: int
) -> None:
    asked: list[Path] = []

    def note(source: Path, out: Path) -> export.Exported:
        asked.append(source)
        return export.Exported(out, 0.0)

    monkeypatch.setattr(export, "export", note)
    done = call("export", run, "--out", "a.onnx", *words.split())
    assert done.stdout.startswith("a.onnx: checked, largest")
    assert asked[0].read_bytes() == saved(run / "expected.safetensors", seed=seed).read_bytes()


def test_invalid_commands_are_refused_with_a_reason(run: Path, tmp_path: Path) -> None:
    model = run / "model.safetensors"
    assert "must end in .onnx" in refused(run, "--out", "a.pt2")
    assert "leave them out, or give the folder" in refused(model, "--seed", 4)
    assert "fedavg-9 has no model.safetensors" in refused(run, "--method", "fedavg", "--seed", 9)
    assert "fedavg-4, fedavg-5, kd3a-4, kd3a-5" in refused(run, "--seed", 9)
    (tmp_path / "empty").mkdir()
    assert "none has yet" in refused(tmp_path / "empty")
    assert f"one run, such as {run}." in refused(tmp_path)
    assert "Cannot read" in refused(tmp_path / "no.safetensors")
    (tmp_path / "file").touch()
    assert "where a folder is needed" in refused(run, "--out", tmp_path / "file" / "a.onnx")
    (run / "config.json").unlink()
    assert "give both --method and --seed" in refused(run, "--seed", 4)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_gives_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    shown = refused(run)
    assert package in shown and "pip install 'fedda[export]'" in shown
    assert not (run / "model.onnx").exists()
