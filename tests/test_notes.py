"""The notes that sites take for themselves: correct, harmless, and never sent."""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from clients.site import notes
from clients.site.memory import Site
from fedda import data, models
from fedda.errors import ConfigError
from fedda.halves import load
from fedda.settings import RunConfig, Task
from server.ledger import PHASES
from tests.local_grid import FAST, TESTED, Node, ScriptedGrid, run
from tests.test_run import timeless

CLASSES = ["0", "1", "2", "3"]


def with_state_dir(nodes: list[Node], folder: Path, **more: Any) -> list[Node]:
    return [node | {"state-dir": str(folder)} | more for node in nodes]


def read_note(folder: Path, site: str, training: str, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / site / "notes" / training / name, allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="module")
def noted_run(domains: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of KD3A and FedAvg with notes -> a folder with `state` and `runs`."""
    folder = tmp_path_factory.mktemp("notes")
    run(
        with_state_dir(domains, folder / "state"),
        {"run.dir": str(folder / "runs"), "run.baseline": "fedavg", "wire.dtype": "float32"},
    )
    yield folder


# ---- content -----------------------------------------------------------------------------------


def naive(model: models.Model, x: Tensor) -> np.ndarray:
    """Compute the features one image at a time."""
    model.eval()
    with torch.no_grad():
        return np.stack([model.features(image[None].float() / 255)[0].numpy() for image in x])


def final(noted_run: Path, method: str) -> models.Model:
    return models.load(noted_run / "runs" / "run" / f"{method}-0" / "model.safetensors")[0]


def node(domains: list[Node], name: str) -> Node:
    return next(n for n in domains if n["name"] == name)


@pytest.mark.parametrize("method", ["fedavg", "kd3a"])
def test_a_sources_first_features_are_those_of_the_model_it_received(
    domains: list[Node], noted_run: Path, method: str
) -> None:
    first = read_note(noted_run / "state", "anna", f"run.{method}-0", notes.FIRST)
    own = data.load_source(node(domains, "anna")["data"])
    config = RunConfig.parse(FAST)
    network = models.build(config.model, own.shape, 4, seed=0)
    assert first["images"].tolist() == list(range(40))  # fewer than the largest number of images
    assert first["features"] == pytest.approx(naive(network, own.x), abs=2e-3)
    assert first["labels"].tolist() == own.y.tolist()
    assert (int(first["round"]), str(first["model"])) == (1, "received")
    last = read_note(noted_run / "state", "anna", f"run.{method}-0", notes.LAST)
    assert int(last["round"]) == 2
    assert not np.allclose(last["features"], first["features"], atol=2e-3)


@pytest.mark.parametrize("method", ["fedavg", "kd3a"])
def test_the_targets_last_features_are_those_of_the_tested_model(
    domains: list[Node], noted_run: Path, method: str
) -> None:
    last = read_note(noted_run / "state", "town", f"run.{method}-0", notes.LAST)
    path, network = node(domains, "town")["data"], final(noted_run, method)
    own, test = data.load_target(path), data.load_evaluation(path, classes=CLASSES)
    assert test is not None
    assert last["features"] == pytest.approx(naive(network, own.x), abs=2e-3)
    assert last["test_features"] == pytest.approx(naive(network, test.x), abs=2e-3)
    assert last["test_labels"].tolist() == test.y.tolist()
    assert (int(last["round"]), str(last["model"])) == (2, "tested")
    # FedAvg asks the target only for tests; KD3A's first request asks it to train.
    first = read_note(noted_run / "state", "town", f"run.{method}-0", notes.FIRST)
    assert str(first["model"]) == {"fedavg": "tested", "kd3a": "received"}[method]
    assert int(first["round"]) == 1


def test_no_label_of_a_targets_training_is_noted(noted_run: Path) -> None:
    targets, sources = (list((noted_run / "state" / s).rglob("*.npz")) for s in ("town", "anna"))
    # The first and the last of two methods; the target has its last step's besides.
    assert (len(targets), len(sources)) == (6, 4)
    for path in targets:
        with np.load(path) as file:
            assert "labels" not in file.files
            tested = "model" in file.files and str(file["model"]) == "tested"
            assert ("test_labels" in file.files) is tested
    for path in sources:
        with np.load(path) as file:
            assert "labels" in file.files and "test_labels" not in file.files


@pytest.mark.parametrize("method", ["fedavg", "kd3a"])
def test_the_confusion_matrix_counts_the_last_test(
    domains: list[Node], noted_run: Path, method: str
) -> None:
    path = noted_run / "state" / "town" / "notes" / f"run.{method}-0" / notes.CONFUSION
    table = json.loads(path.read_text())
    test = data.load_evaluation(node(domains, "town")["data"], classes=CLASSES)
    assert test is not None
    network = final(noted_run, method).eval()
    counts = [[0] * 4 for _ in range(4)]
    for image, label in zip(test.x, test.y.tolist(), strict=True):
        counts[label][int(network(image[None].float() / 255).argmax())] += 1
    assert table["counts"] == counts
    assert (table["classes"], table["round"], table["site"]) == (CLASSES, 2, "town")
    results = json.loads((noted_run / "runs" / "run" / "results.json").read_text())
    accuracy = results["trainings"][method][0]["final_accuracy"]
    assert np.trace(np.array(counts)) / TESTED == pytest.approx(accuracy)
    assert not (
        noted_run / "state" / "anna" / "notes" / f"run.{method}-0" / notes.CONFUSION
    ).exists()


# ---- harmless ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "kd3a"])
def test_notes_change_no_bit_and_send_no_byte(
    domains: list[Node], tmp_path: Path, method: str
) -> None:
    def once(name: str, **more: Any) -> tuple[Any, Any, list[bytes]]:
        nodes = with_state_dir(domains, tmp_path / name / "state", **more)
        grid = ScriptedGrid(nodes)
        settings = {"method": method, "run.dir": str(tmp_path / name), "train.momentum": 0.9}
        results, _ = run(nodes, settings, grid=grid)
        model = (tmp_path / name / "run" / "model.safetensors").read_bytes()
        crossed = [c.__dict__ for c in grid.crossed]
        arrays = [
            array.data
            for message in [*grid.requests, *grid.replies]
            for record in message.content.array_records.values()
            for array in record.values()
        ]
        return timeless(results), crossed, [model, *arrays]

    with_notes, without = once("with"), once("without", notes=False)
    assert with_notes == without
    assert list((tmp_path / "with").rglob(notes.LAST))
    assert not list((tmp_path / "without").rglob("notes"))


class Drawing(nn.Module):
    """A model that draws random numbers in any mode, with layers in different modes."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(), nn.BatchNorm1d(2)
        self.norm.eval()
        self.width = 2
        self.modes: list[bool] = []

    def features(self, x: Tensor) -> Tensor:
        self.modes.append(self.dropout.training)
        return self.norm(x + torch.randn(x.shape))


@dataclass
class NotedRequest:
    """A request, as `notes` needs it."""

    task: Any
    round: int = 1
    comes_first: bool = True

    @property
    def is_last(self) -> bool:
        return self.round == self.task.rounds


def drawing(folder: Path) -> tuple[Any, Any]:
    """Return a client and its request, as `notes` needs them."""
    site = SimpleNamespace(
        name="anna",
        state_dir=folder,
        device=torch.device("cpu"),
        notes=True,
        noted="",
        role="source",
    )
    x, y = torch.rand(9, 2), torch.arange(9) % 2
    facts = {"run": "r", "method": "m", "seed": 0, "training": "r.m-0", "rounds": 3}
    task = SimpleNamespace(**facts, names=("0", "1"))
    request = NotedRequest(task)
    client = SimpleNamespace(
        site=site,
        request=request,
        data=data.Labelled(x, y, ("0", "1")),
        model=Drawing(),
        as_inputs=lambda images: images,
        trains=True,
    )
    return client, request


def test_notes_leave_random_numbers_and_modes_as_they_were(tmp_path: Path) -> None:
    client, _ = drawing(tmp_path)
    before = torch.get_rng_state()
    seconds = notes.received(client)
    assert seconds > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert client.model.modes == [False]
    assert client.model.dropout.training and not client.model.norm.training
    assert (tmp_path / "anna" / "notes" / "r.m-0" / notes.FIRST).is_file()


def test_a_new_run_of_the_same_name_takes_the_old_notes_away(tmp_path: Path) -> None:
    client, request = drawing(tmp_path)
    request.round = 3
    notes.received(client)
    folder = tmp_path / "anna" / "notes" / "r.m-0"
    # A source that was not drawn in round 1 notes its first request all the same.
    assert {p.name for p in folder.iterdir()} == {notes.FIRST, notes.LAST, notes.PICTURE}
    with np.load(folder / notes.FIRST) as file:
        assert int(file["round"]) == 3
    request.round = 1
    notes.received(client)
    assert {p.name for p in folder.iterdir()} == {notes.FIRST}


@pytest.mark.parametrize("trouble", ["full disk", "no folder", "no random state"])
def test_a_note_that_fails_is_logged_and_the_round_goes_on(
    domains: list[Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    if trouble == "full disk":

        def full(file: Any, **arrays: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(notes.np, "savez", full)
    elif trouble == "no random state":
        fork = torch.random.fork_rng

        def failing(*gpus: Any, **others: Any) -> Any:
            if gpus:  # as notes call it
                raise RuntimeError("the device is gone")
            return fork(**others)

        monkeypatch.setattr(torch.random, "fork_rng", failing)
    else:
        (tmp_path / "state").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING, "fedda.site"):
        results, _ = run(
            with_state_dir(domains, tmp_path / "state"), {"run.dir": str(tmp_path / "runs")}
        )
    assert results["events"] == [] and len(results["trainings"]["kd3a"][0]["rounds"]) == 2
    assert "the round goes on" in caplog.text
    left = [p for p in (tmp_path / "state").rglob("*") if p.name.startswith(".")]
    assert left == []


def test_a_server_with_many_runs_cannot_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, request = drawing(tmp_path / "count")
    monkeypatch.setattr(notes, "KEPT", 3)
    place = tmp_path / "count" / "anna" / "notes"
    for age, name in enumerate(f"run{i}" for i in range(6)):
        request.task.training = f"{name}.m-0"
        notes.received(client)
        os.utime(place / f"{name}.m-0", (1e9 + age, 1e9 + age))
    assert {p.name for p in place.iterdir()} == {f"run{i}.m-0" for i in (3, 4, 5)}

    client, request = drawing(tmp_path / "bytes")
    place = tmp_path / "bytes" / "anna" / "notes"
    for age, name in enumerate(("old", "kept", "new")):
        request.task.training = f"{name}.m-0"
        if name == "new":
            size = sum(p.stat().st_size for p in (place / "kept.m-0").iterdir())
            monkeypatch.setattr(notes, "ROOM", int(2.5 * size))
            (place / "old.m-0" / "own.txt").write_text("the site's own")
            (place / "copy").mkdir()
            (place / "copy" / "first.npz").write_text("the site's own, too")
            os.utime(place / "copy", (1, 1))
            os.utime(place / "old.m-0", (1e9, 1e9))
        notes.received(client)
        os.utime(place / f"{name}.m-0", (1e9 + age, 1e9 + age))
    left = {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()}
    assert left == {"old.m-0/own.txt", "copy/first.npz", "kept.m-0/first.npz", "new.m-0/first.npz"}


def test_a_run_cannot_name_a_place_outside_the_notes(domains: list[Node], tmp_path: Path) -> None:
    """The folder's name is a single part of a path, whatever name a task has."""
    for name in ("..", ".", "a..", "...."):
        task = RunConfig.parse(FAST).task("kd3a", 0, (1, 8, 8), CLASSES, 4)
        renamed = Task.parse(task.flat() | {"run": name})
        site = SimpleNamespace(name="anna", state_dir=tmp_path)
        request = NotedRequest(renamed)
        written = notes.Notes(SimpleNamespace(site=site, request=request))  # type: ignore[arg-type]
        assert written.folder.resolve().parent == tmp_path.resolve() / "anna" / "notes"
    for name in ("../x", "a/b", "a\x00b", "", "a\nb", "a\n"):
        with pytest.raises(ConfigError):
            Task.parse(task.flat() | {"run": name})


def test_a_site_takes_no_notes_without_a_folder_or_if_switched_off(tmp_path: Path) -> None:
    node = {"role": "source", "name": "a", "data": str(tmp_path)}
    place = {"state-dir": str(tmp_path)}
    assert [Site(node | more).notes for more in ({}, place, place | {"notes": False})] == [
        *(False, True, False)
    ]


# ---- which sites take notes --------------------------------------------------------------------


def test_the_client_can_switch_notes_off_and_gives_its_policy(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def serve(app: Any, *, node_config: Any, **more: Any) -> None:
        seen.append(node_config)

    monkeypatch.setattr(load("clients", "node.resident"), "serve", serve)
    module = import_module("fedda.cli.client")  # fedda.cli calls the command by the same name
    monkeypatch.setattr(module, "_logging", lambda file: None)
    words = ["--role", "source", "--data", domains[0]["data"], "--superlink", "h:1", "--insecure"]
    (tmp_path / "policy.toml").write_text("[budget]\ntests = 1\n")
    words += ["--state-dir", str(tmp_path), "--policy", str(tmp_path / "policy.toml")]
    words += ["--min-images", "16"]
    for more in ([], ["--no-notes"]):
        done = CliRunner().invoke(module.app, [*words, *more])
        assert done.exit_code == 0, done.output
    assert [config["notes"] for config in seen] == [True, False]
    assert all(json.loads(config["policy"])["budget"]["tests"] == 1 for config in seen)


# ---- where the time goes -----------------------------------------------------------------------


def test_a_round_says_where_its_time_went(noted_run: Path) -> None:
    results = json.loads((noted_run / "runs" / "run" / "results.json").read_text())
    for method, trained in (("fedavg", {"anna", "bert", "carl"}), ("kd3a", set())):
        for entry in results["trainings"][method][0]["rounds"]:
            phases = entry["phases"]
            assert tuple(phases) == PHASES
            assert phases["train"] > 0 and phases["test"] > 0 and phases["checkpoint"] > 0
            inside = sum(s for p, s in phases.items() if p != "checkpoint")
            assert inside <= entry["seconds"] + 0.003  # since the seconds are rounded
            assert set(entry["site_seconds"]) == (trained or {"anna", "bert", "carl", "town"})
