"""The library: the numbers of the command line, data and networks of a program, no trace left."""

import gc
import json
import logging
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedda
from clients import fedavg
from fedda import plugins
from fedda.cli.predict import rows as predicted
from fedda.data import Reading, naming
from fedda.errors import (
    ConfigError,
    DataError,
    FeddaError,
    ModelError,
    QuorumError,
    RunError,
    WireError,
)
from fedda.library import simulated
from fedda.library.outcome import Results
from fedda.library.own_data import folder_of
from fedda.models.answers import answers
from fedda.settings import as_arguments
from tests.command_lines import call
from tests.patience import PATIENCE
from tests.test_imports import loaded
from tests.test_run import timeless

ROOT = Path(__file__).parents[1]
NOTEBOOKS = [ROOT / "examples" / "library.ipynb", *(ROOT / "examples/gallery").glob("*.ipynb")]
FEW: dict[str, Any] = {"rounds": 2, "input_size": 8, "model_name": "mlp", "model_hidden": "16"}
FEW |= {"model_dropout": 0.0, "train_batch_size": 10, "train_steps": 0, "quiet": True}
WORDS = ["-c", "rounds=2", "-c", "input.size=8", "-c", "model.name=mlp", "-c", "model.hidden=16"]
WORDS += ["-c", "train.batch-size=10", "-c", "train.steps=0", "-c", "model.dropout=0"]


def site(seed: int, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Images of 8 x 8 whose brightness is their class -> bytes (n, 8, 8), labels (n,)."""
    draws = np.random.default_rng(seed)
    y = np.arange(n) % 3
    x = (80 * y)[:, None, None] + draws.integers(0, 60, (n, 8, 8))
    return x.astype(np.uint8), y


def sites() -> dict[str, Any]:
    """Two sources, and a target without labels but with a labelled test."""
    return {"a": site(1), "b": site(2), "t": (site(3)[0], None, site(4, 12))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same sites as .npz files."""
    root = tmp_path / "given"
    root.mkdir()
    x, (x_test, y_test) = site(3)[0], site(4, 12)
    for name, seed in (("a", 1), ("b", 2)):
        x_, y_ = site(seed)
        np.savez(root / f"{name}.npz", x=x_, y=y_)
    np.savez(root / "t.npz", x_train=x, x_test=x_test, y_test=y_test)
    return root


@pytest.fixture(scope="module")
def finished() -> fedda.Run:
    """A run over arrays."""
    return fedda.simulate(sites(), target="t", seeds=2, **FEW)


def same(one: Results, other: Any) -> None:
    assert timeless(one.raw) == timeless(other)


@pytest.mark.slow
def test_a_run_gives_the_numbers_of_the_command_line_to_the_last_bit(
    folder: Path, tmp_path: Path, signal_handlers: None
) -> None:
    """In one process, twice in a row, on the folder and on the same arrays."""
    words = ("--simulate", folder, "--target", "t", "--dir", tmp_path / "runs")
    call("run", "kd3a", *words, *WORDS)
    theirs = json.loads((tmp_path / "runs" / "kd3a" / "results.json").read_text())
    model = (tmp_path / "runs" / "kd3a" / "model.safetensors").read_bytes()
    for data in (folder, sites()):
        torch.manual_seed(99)  # what a program drew before must not matter
        ours = fedda.simulate(data, target="t", dir=tmp_path / type(data).__name__ / "kd3a", **FEW)
        same(ours.results, theirs)
        assert (ours.folder / "model.safetensors").read_bytes() == model


class Impatient:
    """A display that interrupts the run after a round, as Ctrl-C does."""

    def __init__(self, config: Any, **how: Any) -> None:
        pass

    def __enter__(self) -> "Impatient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            raise KeyboardInterrupt


def test_a_run_goes_on_only_with_the_data_it_began_with(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about: dict[str, Any] = {"target": "t", "dir": tmp_path / "r", **FEW}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(simulated, "Display", Impatient)
        fedda.simulate(folder, **{**about, "quiet": False})
    x, y = site(5)
    np.savez(folder / "b.npz", x_train=x, y_train=y)
    with pytest.raises(RunError, match=r"The data of b have changed since .*/r was begun; put"):
        fedda.simulate(folder, resume=True, **about)


@pytest.mark.nightly("fedda/library")
def test_compare_gives_the_numbers_of_single_runs(tmp_path: Path, finished: fedda.Run) -> None:
    found = fedda.compare(sites(), ["kd3a"], target="t", seeds=2, dir=tmp_path / "c", **FEW)
    ours = {(s.variant, s.seed): s.last for s in found.scores}
    theirs = {(t.method, t.seed): t.accuracy for t in finished.results.trainings}
    assert ours == {("KD3A" if m == "kd3a" else "FedAvg", s): a for (m, s), a in theirs.items()}
    assert found.failures == {}
    assert set(found.accuracies) == {"FedAvg", "KD3A"}
    mean = sum(t.accuracy or 0 for t in finished.results.of("kd3a")) / 2
    assert found.accuracies["KD3A"]["t"] == pytest.approx(mean)
    assert found.run("KD3A", "t", 1).results.trainings[0].accuracy == ours["KD3A", 1]
    with pytest.raises(ConfigError, match="its variants are FedAvg, KD3A"):
        found.run("kd3a", "t", 0)
    more = fedda.compare(sites(), ["kd3a"], target="t", seeds=3, dir=tmp_path / "c", **FEW)
    assert len(more.scores) == 6 and all(score in more.scores for score in found.scores)
    with pytest.raises(RunError, match="other data"):
        fedda.compare({**sites(), "a": site(9)}, ["kd3a"], "t", dir=tmp_path / "c", **FEW)


def state() -> dict[str, Any]:
    """What a program can see of this process's settings."""
    loggers = {
        name: (each.level, each.propagate, tuple(each.handlers))
        for name in ("", "flwr", "fedda", "fedda.site")
        for each in [logging.getLogger(name)]
    }
    return {
        "environment": dict(os.environ),
        "loggers": loggers,
        "threads": torch.get_num_threads(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
        "models": dict(plugins.installed("models")),
        "folder": os.getcwd(),
    }


@pytest.mark.nightly("fedda/library")
def test_a_run_leaves_the_process_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fedda.simulate(sites(), target="t", **FEW)  # imports what it needs
        begun = state()
        fedda.simulate(sites(), target="t", network=small, **own())
        fedda.compare(sites(), ["fedavg"], target="t", seeds=1, **FEW)
        with pytest.raises(FeddaError):
            fedda.simulate(sites(), target="nobody", **FEW)
        assert state() == begun
    finally:
        torch.set_num_threads(before)


def test_a_temporary_folder_goes_with_its_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = fedda.simulate(sites(), target="t", baseline="none", **FEW)
    model = run.model
    assert list(tmp_path.glob("fedda-*")) == [run.folder.parent]
    del run
    gc.collect()
    assert not list(tmp_path.glob("fedda-*"))
    assert len(model.predict(site(5)[0])) == 30
    with pytest.raises(FeddaError):
        fedda.simulate(sites(), target="nobody", **FEW)
    assert not list(tmp_path.glob("fedda-*"))


@pytest.mark.slow
def test_importing_fedda_loads_next_to_nothing() -> None:
    found = loaded("fedda; dir(fedda); fedda.__all__")
    assert "fedda.halves" in found
    assert not found & {"torch", "numpy", "flwr", "pydantic", "typer", "fedda.library", "server"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"run_dir": "x"}, "give dir"),
        ({"run_seeds": "1"}, "give seeds"),
        ({"run_start_from": "x"}, "give start_from"),
        ({"seeds": ()}, "seeds is"),
        ({"seeds": (-1,)}, "seeds is"),
        ({"resume": True}, "give it as dir"),
        ({"train_lr": "much"}, "train.lr is 'much'"),
        ({"threads": "many"}, "threads is 'many'"),
        ({"method": "kd4a"}, "no method 'kd4a'"),
        ({"preset": "papers"}, "no preset 'papers'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fedda.simulate(sites(), target="t", **{**FEW, **given})


class Pairs(torch.utils.data.Dataset):
    """A dataset as torchvision's are: floats (1, H, W) in [0, 1] and a number."""

    def __init__(self, x: np.ndarray, y: np.ndarray, classes: tuple[str, ...] = ()) -> None:
        self.x, self.y = x, y
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.x[i].astype(np.float32) / 255)[None], int(self.y[i])


def test_arrays_tensors_and_datasets_give_the_same_numbers(
    tmp_path: Path, finished: fedda.Run
) -> None:
    (xa, ya), (xb, yb), (xt, _), test = site(1), site(2), site(3), site(4, 12)
    given = {
        "a": Pairs(xa, ya),
        "b": (torch.from_numpy(xb)[:, None], torch.from_numpy(yb)),
        "t": (Pairs(xt, np.zeros(30)), Pairs(*test)),
    }
    run = fedda.simulate(given, target="t", seeds=2, dir=tmp_path / "run", **FEW)
    same(run.results, finished.results.raw)
    with np.load(tmp_path / "run" / "data" / "t.npz") as file:
        assert sorted(file.files) == ["classes", "x_test", "x_train", "y_test"]


def test_a_site_can_be_a_folder(folder: Path, finished: fedda.Run) -> None:
    given = {**sites(), "a": folder / "a.npz"}
    same(fedda.simulate(given, target="t", seeds=2, **FEW).results, finished.results.raw)


X = np.zeros((4, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "give a folder of sites, or a dict"),
        ({}, "give a folder of sites, or a dict"),
        ({"a/b": (X, None)}, "cannot be a site's name"),
        ({"a": X}, r"give \(x, y\)"),
        ({"a": (X, [0, 1])}, r"y of a is int64 \(2,\) for 4 examples"),
        ({"a": (X, [0.5] * 4)}, "the label '0.5' in place 0, a measurement"),
        ({"a": (X, [-1, 0, 1, 2])}, "the label '-1' in place 0"),
        ({"a": (X, [0, 1, 2, 10**9])}, "y of a has the label 1000000000: .* at most 65536 of them"),
        ({"a": (X, [0, 1, 2, 10**30])}, "y of a has the label 1000000000000000"),
        ({"a": (X - 0.5, None)}, "before any normalisation"),
        ({"a": (X.astype(float) + np.nan, None)}, "before any normalisation"),
        ({"a": (np.zeros((4, 8, 8, 5)), None)}, "1 or 3 colours"),
        ({"a": (np.array(["x"]), None)}, "give images as"),
        ({"a": (X, [0] * 4), "b": (X, ["x"] * 4)}, "others number them"),
        ({"a": (X, ["x"] * 4), "b": (X, None, (X, [0] * 4))}, "others number them"),
        ({"a": (X, ["01"] * 4), "b": (X, [1] * 4)}, "others number them"),
        ({"a": (X, ["x"] * 4), "b": (X, ["X"] * 4)}, "differ in more than case"),
        ({"a": "nowhere"}, "give an existing folder"),
        ({"a": Pairs(X[:0], X[:0])}, "is empty"),
    ],
)
def test_data_that_cannot_be_used_are_refused_in_a_sentence(
    tmp_path: Path, given: Any, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        folder_of(given, tmp_path / "data")


def test_a_number_too_large_for_single_precision_is_refused_in_a_sentence() -> None:
    """And numpy warns of none: warnings are errors here."""
    x = np.ones((30, 2))
    x[7, 1] = 1e39
    given = {**sites(), "a": (x, site(1)[1])}
    with pytest.raises(DataError, match=r"is row 7: .* too large for single precision"):
        fedda.simulate(given, target="t", **FEW)


@pytest.mark.contrib
def test_an_error_calls_sites_and_settings_as_the_program_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(0).normal(size=(30, 3))
    x[4, 1] = np.nan
    given = {name: (x, np.arange(30) % 3) for name in "ab"} | {"t": (x, None)}
    fix = 'or train with input_missing="mean", median or indicator'
    with pytest.raises(DataError, match=f"^the data of a has missing values .* {fix}$"):
        fedda.simulate(given, target="t", dir=tmp_path / "r", **{**FEW, "quiet": False})
    assert str(tmp_path) not in capsys.readouterr().err
    with pytest.raises(RunError, match=r"^data has no domain 'u', it has a, b, t"):
        fedda.simulate(given, target="u", **FEW)
    texts = {"n": x[:, 0].round(), "sex": ["f", "m"] * 15}
    given = {name: (texts, np.arange(30) % 3) for name in "ab"} | {"t": (texts, None)}
    fix = r'as input_categories="sex=f\|m"; .* with columns="values=age\+weight"$'
    with pytest.raises(DataError, match=f"^the data of a has texts in sex, .* {fix}"):
        fedda.compare(given, ["kd3a"], target="t", seeds=1, **FEW)


def test_options_of_a_command_line_become_arguments() -> None:
    for text, found in {
        "train with -c input.missing=mean, median or indicator": 'with input_missing="mean", med',
        "set -c train.lr-end=1e-05.": "set train_lr_end=1e-05.",
        naming.option("input.categories", "a=it's|b;c"): 'input_categories="a=it\'s|b;c"',
        "give --columns drop= names": "give --columns drop= names",
        "more: --rounds 67, or train.steps": "more: rounds=67, or train.steps",
        "network (--preset photos)": 'network (preset="photos")',
        "which --gray-bits and a window do": "which gray_bits and a window do",
        "or pass over such files with --skip-broken": "such files with skip_broken=True",
        "--name, or go on by fedda run --resume /a/b": "dir, or go on by resume=True",
        "its --state-dir, --min-images": "its --state-dir, --min-images",
        "with --columns path=file,label=diagnosis, or": 'columns="path=file,label=diagnosis", or',
    }.items():
        assert found in as_arguments(text)


def small(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(shape)), 16), nn.BatchNorm1d(16), nn.ReLU()
    )


def own(**changes: Any) -> dict[str, Any]:
    few = {k: v for k, v in FEW.items() if k not in ("model_name", "model_hidden")}
    return few | changes


def test_a_network_of_ones_own_gives_the_numbers_of_the_same_built_in_one(
    tmp_path: Path, finished: fedda.Run
) -> None:
    """`small` makes the layers of `mlp` with sizes 16, in the same order."""
    run = fedda.simulate(sites(), target="t", seeds=2, dir=tmp_path / "r", network=small, **own())
    for ours, theirs in zip(run.results.trainings, finished.results.trainings, strict=True):
        assert (ours.accuracies, ours.losses) == (theirs.accuracies, theirs.losses)
        assert (ours.weights, ours.refined) == (theirs.weights, theirs.refined)
    assert run.results.raw["config"]["model.name"] == "own:small"
    x = site(5)[0]
    assert run.model.predict(x) == finished.model.predict(x)
    again = fedda.load(tmp_path / "r", network=small).model
    assert again.predict(x) == run.model.predict(x)
    with pytest.raises(ModelError, match=r"own:small' was a .*load\(dir, network="):
        fedda.load(tmp_path / "r").model  # noqa: B018
    assert "own:small" not in plugins.installed("models")


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        width = int(np.prod(shape))
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x.flatten(1)).relu()).relu()


def test_a_network_with_tied_weights_is_kept_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"target": "t", "network": Tied, **own()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(simulated, "Display", Impatient)
        fedda.simulate(sites(), dir=tmp_path / "r", **{**given, "quiet": False})
    run = fedda.simulate(sites(), dir=tmp_path / "r", resume=True, **given)
    whole = fedda.simulate(sites(), **given)
    x, y = site(4, 12)
    p = whole.model.probabilities(x)
    for model in (run.model, fedda.load(tmp_path / "r", network=Tied).model):
        assert np.array_equal(model.probabilities(x), p)
    named = dict(run.model.network.named_parameters())
    assert "encoder.b.weight" not in named, "they are tied still"
    right = np.array(run.model.predict(x)) == y.astype(str)
    assert right.mean() == pytest.approx(run.results.accuracy)
    other = fedda.simulate(sites(), **{**given, "method": "feddadil", "rounds": 2})
    assert other.results.accuracy is not None  # its target keeps the encoder in a file of its own


class Pair(nn.Flatten):
    """Gives two things."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input.mean()


ONE = small((1, 8, 8))


@pytest.mark.parametrize(
    ("network", "changes", "error", "text"),
    [
        (ONE, {}, ConfigError, "give a function that takes the shape"),
        (lambda shape: ONE, {}, ModelError, "same module twice"),
        (lambda shape: 3, {}, ModelError, "gave a int"),
        (lambda shape: nn.Conv2d(1, 2, 3), {}, ModelError, "one row of features per input"),
        (lambda shape: Pair(), {}, ModelError, r"gives a tuple for two inputs; .* one row of"),
        (lambda shape: nn.Linear(3, 2), {}, ModelError, "does not take inputs of shape"),
        (small, {"engine": "ray"}, ConfigError, "engine='ray' starts other ones"),
        (small, {"model_name": "mlp"}, ConfigError, "give network"),
    ],
)
def test_networks_that_cannot_be_used_are_refused_in_a_sentence(
    network: Any, changes: dict[str, Any], error: type[FeddaError], text: str
) -> None:
    with pytest.raises(error, match=text):
        fedda.simulate(sites(), target="t", network=network, **own(**changes))


def fails(client: Any) -> Any:
    return {}["nokey"]


def fails_otherwise_later(client: Any) -> Any:
    client.site.tries = getattr(client.site, "tries", 0) + 1
    return None if client.site.tries == 1 else fails(client)


@pytest.mark.parametrize(
    ("train", "cause", "text", "traces"),
    [
        (fails, KeyError, "'nokey'", 1),
        (lambda client: None, WireError, "train of .*Source returned a NoneType; it must", 0),
        (lambda client: {"loss": torch.tensor(0.5), "steps": 1}, WireError, "is a Tensor; give", 0),
        (fails_otherwise_later, WireError, "returned a NoneType", 1),
    ],
)
def test_a_failure_of_a_site_comes_with_the_run_s_error(
    train: Any,
    cause: type[Exception],
    text: str,
    traces: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fedavg.Source, "train", train)
    place = r"at \S+\.py:\d+ \(in \w+\) " if cause is KeyError else ""
    what = rf"a failed {place}with {cause.__name__}: .*{text}"
    with pytest.raises(QuorumError, match=what) as raised:
        fedda.simulate(sites(), target="t", method="fedavg", **FEW)
    assert isinstance(raised.value.__cause__, cause)
    whole = [record for record in caplog.records if record.exc_info]
    assert len(whole) == 2 * traces, "each site's once, of three tries"


def test_a_model_predicts_what_the_command_line_predicts(finished: fedda.Run, folder: Path) -> None:
    model, cpu = finished.folder / "model.safetensors", torch.device("cpu")
    _, *rows = predicted(*answers(model, folder / "a.npz", 7, cpu, Reading()))
    x = site(1)[0]
    for given in (x, torch.from_numpy(x)[:, None], x / 255, folder / "a.npz"):
        assert finished.model.predict(given, batch=7) == [row[1] for row in rows]
    p = finished.model.probabilities(x)
    assert p.shape == (30, 3) and np.allclose(p.sum(axis=1), 1)
    with pytest.raises(DataError, match="one image or several"):
        finished.model.predict(np.zeros((3, 5)))


def test_the_model_of_one_training(finished: fedda.Run) -> None:
    x = site(5)[0]
    first = finished.model.probabilities(x)
    assert np.array_equal(finished.model_of(seed=0).probabilities(x), first)
    assert not np.array_equal(finished.model_of(seed=1).probabilities(x), first)
    assert not np.array_equal(finished.model_of(method="fedavg").probabilities(x), first)
    with pytest.raises(ConfigError, match="no such training"):
        finished.model_of(seed=7)


def test_a_model_that_stayed_at_its_target_is_found_there() -> None:
    run = fedda.simulate(sites(), target="t", method="shot", **FEW)
    assert "adapted" in run.results.raw["trainings"]["shot"][0]
    x, plain = site(5)[0], run.model_of(method="fedavg")
    assert not np.array_equal(run.model.probabilities(x), plain.probabilities(x))


@pytest.mark.nightly("docs/library.md", "fedda/__init__.py", "fedda/library")
def test_the_pages_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedda.data.digits import build

    monkeypatch.chdir(tmp_path)
    build(Path("digits"), train=30, test=20)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.S)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "library.md", "exec"), names)
    assert set(names["found"].accuracies) == {"FedAvg", "KD3A", "KD3A, vote=hard"}


@pytest.mark.nightly("examples/library.ipynb", "examples/gallery", "fedda/library")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_outputs_are_kept(path: Path, tmp_path: Path) -> None:
    client, formats = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    notebook = formats.read(path, as_version=4)
    if any('preset="photos"' in cell.source for cell in notebook.cells):
        pytest.importorskip("efficientnet_lite_pytorch")
    if any("sentence_transformers" in cell.source for cell in notebook.cells):
        pytest.importorskip("sentence_transformers")
    kept = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    client.NotebookClient(
        notebook, timeout=int(PATIENCE), resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    found = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert [len(each) for each in found] == [len(each) for each in kept]
    assert not [o for each in found for o in each if o.output_type == "error"]
