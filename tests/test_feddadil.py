"""FedDaDiL's rounds: atoms cross both ways, coordinates stay, and the target fits heads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file

from clients.shared.dictionary import Dictionary
from clients.site.memory import Site, resident
from fedda import data, models, records
from fedda.algorithms import feddadil
from fedda.cli.predict import rows as predicted
from fedda.config.inputs import Inputs
from fedda.errors import Code, ConfigError
from fedda.maths.mixture import Mixture
from fedda.models.answers import answers
from fedda.settings import RunConfig
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind
from server import run as server_run
from server.journal import Journal
from server.start import first_model
from strategies.feddadil import FedDaDiL
from tests.local_grid import FAST, Bench, Node, ScriptedGrid, changed, run, stop_after

pytestmark = pytest.mark.usefixtures("fresh_sites")

SITES = ["anna", "bert", "carl", "town"]
NIGHTLY = pytest.mark.nightly(
    *(f"{folder}/feddadil.py" for folder in ("fedda/algorithms", "clients", "strategies"))
)


def stateful(domains: list[Node], folder: Path) -> list[Node]:
    return [{**n, "state-dir": str(folder)} for n in domains]


def received(bench: Bench, name: str, kind: str = "train") -> list[dict[str, Arrays]]:
    """Return the arrays that a site received, request by request."""
    to = bench.grid.id_of(name)
    asked = [q for q in bench.grid.requests if q.metadata.dst_node_id == to]
    found = [q for q in asked if q.metadata.message_type == kind]
    return [{n: p.unpack() for n, p in records.read(q.content)[0].items()} for q in found]


def sent_back(bench: Bench, name: str) -> list[Arrays]:
    """Return the atoms that a site sent back."""
    of = bench.grid.id_of(name)
    found = [r for r in bench.grid.replies if r.metadata.src_node_id == of and r.has_content()]
    arrays = [records.read(r.content)[0] for r in found]
    return [a["atoms"].unpack() for a in arrays if "atoms" in a]


def dictionary_of(node: Node) -> Dictionary:
    """Return the dictionary that a site of this process keeps in memory."""
    (workspace,) = resident(tuple(sorted(node.items())))._workspaces.values()
    return workspace.held["dictionary"]


def test_a_round_averages_the_sites_versions_index_by_index(domains: list[Node]) -> None:
    bench = Bench(domains, "feddadil")
    start = bench.model
    model, numbers = bench.round()
    versions = [sent_back(bench, name)[-1] for name in SITES]
    kept = bench.strategy.memory.arrays["atoms"].unpack()
    for name in "zy":
        np.testing.assert_allclose(
            kept[name], np.mean([v[name] for v in versions], axis=0), rtol=1e-5, atol=1e-7
        )
        assert not np.array_equal(versions[0][name], versions[1][name])
    assert bench.strategy.weights == dict.fromkeys(SITES, 0.25)
    assert set(numbers) == {"loss", *(f"reconstruction/{name}" for name in SITES)}
    assert all(np.array_equal(model[n], start[n]) for n in start)  # the encoder does not change


def test_stage_1_is_fedavg_bit_for_bit(domains: list[Node]) -> None:
    """This holds for all rounds of stage 1; the dictionary starts from its last model."""
    half: dict[str, Any] = {"rounds": 4, "feddadil.encoder-share": 0.5}
    bench, plain = Bench(domains, "feddadil", **half), Bench(domains, "fedavg", rounds=4)
    for server_round in (1, 2):
        found, wanted = bench.round(server_round)[0], plain.round(server_round)[0]
        assert all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)
    assert not received(bench, "town") and "atoms" not in bench.strategy.memory.arrays
    bench.round(3)
    assert set(received(bench, "town")[0]) == {"model", "atoms"}
    assert [set(sent) for sent in received(bench, "anna")] == [
        {"model"},
        {"model"},
        {"model", "atoms"},
    ]


def test_a_restarted_site_without_a_disk_gets_the_encoder_again_and_says_that_it_begins_anew(
    domains: list[Node], caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(domains, "feddadil")
    bench.round(1)
    assert "coordinates" not in caplog.text
    resident.cache_clear()  # clears the memory of all sites
    bench.round(2)
    assert "no coordinates of round 1 are left; drawn anew" in caplog.text
    assert set(bench.strategy.weights) == set(SITES)
    sent = received(bench, "town")
    assert [set(arrays) for arrays in sent] == [{"model", "atoms"}, {"atoms"}, {"model", "atoms"}]
    assert {n[:2] for n in bench.notices} == {("failed", name) for name in SITES}


# ---- coordinates -------------------------------------------------------------------------------


def test_coordinates_never_leave_a_site(domains: list[Node], tmp_path: Path) -> None:
    """No array and no number from a site contains them, in any order or precision."""
    nodes = stateful(domains, tmp_path)
    settings = {"feddadil.lr-coordinates": 0.3, "feddadil.atoms": 4, "method": "feddadil"}
    grid = ScriptedGrid(nodes)
    results, _ = run(nodes, settings | {"run.dir": str(tmp_path / "runs")}, grid=grid)
    assert results["events"] == []
    files = sorted(tmp_path.rglob("*.coordinates.safetensors"))
    assert len(files) == 8  # two rounds of four sites
    secrets = [load_file(path)["alpha"].numpy() for path in files]
    assert all(a.shape == (4,) and a.sum() == pytest.approx(1) for a in secrets)
    layout = {"z": (4, 24, 16), "y": (4, 24, 4)}
    for reply in grid.replies:
        arrays, tables = records.read(reply.content)
        told = tables.get("metrics", {}).values()  # numbers, and tables of whole ones
        numbers = [float(n) for each in told for n in (each if isinstance(each, list) else [each])]
        assert not has(numbers, secrets)
        for packed in arrays.values():
            assert {e.name: e.shape for e in packed.manifest.entries} == layout
            values = packed.unpack()
            assert not has(np.concatenate([values["z"].ravel(), values["y"].ravel()]), secrets)
            for alpha in secrets:
                assert alpha.tobytes() not in packed.buffer
    assert has([0.5, *secrets[3]], secrets)  # the check does find coordinates


def has(values: Any, secrets: list[np.ndarray]) -> bool:
    """Return whether values contain all parts of a site's coordinates, apart from parts 0 and 1."""
    values = np.asarray(values)
    found = []
    for alpha in secrets:
        parts = alpha[(alpha > 1e-4) & (alpha < 1 - 1e-4)]
        near = [bool((np.abs(values - part) < 1e-7).any()) for part in parts]
        found.append(bool(near) and all(near))
    return any(found)


@pytest.mark.parametrize(("optimizer", "revealed"), [("sgd", True), ("adam", False)])
def test_lengths_of_the_atoms_moves_reveal_coordinates(
    domains: list[Node], optimizer: str, revealed: bool
) -> None:
    """The documentation warns of this: no reply contains them, but the server can compute them."""
    bench = Bench(domains, "feddadil", **{"feddadil.optimizer": optimizer})
    bench.round()
    for node in domains:
        sent = received(bench, node["name"])[-1]["atoms"]["z"]
        back = sent_back(bench, node["name"])[-1]["z"]
        moves = np.linalg.norm((back - sent).reshape(3, -1), axis=1)
        alpha = dictionary_of(node).coordinates(1).numpy()
        assert (np.abs(moves / moves.sum() - alpha).max() < 0.03) == revealed


@pytest.mark.slow
def test_coordinates_survive_a_restart(domains: list[Node], tmp_path: Path) -> None:
    """A run whose sites restart after every round gives the same bits as one without restarts."""

    def train(folder: Path, restart: bool) -> tuple[Arrays, dict[str, bytes]]:
        resident.cache_clear()
        bench = Bench(stateful(domains, folder), "feddadil", rounds=3)
        for server_round in (1, 2, 3):
            bench.round(server_round)
            if restart:
                resident.cache_clear()
        assert bench.notices == []  # no site had to ask for the encoder
        assert [set(sent) for sent in received(bench, "anna")][1:] == [{"atoms"}] * 2
        last = sorted(folder.rglob("*.3.coordinates.safetensors"))
        coordinates = {p.parent.name: load_file(p)["alpha"].numpy().tobytes() for p in last}
        return bench.strategy.memory.arrays["atoms"].unpack(), coordinates

    kept, first = train(tmp_path / "a", restart=False)
    again, second = train(tmp_path / "b", restart=True)
    assert first == second and set(first) == set(SITES)
    assert len(set(first.values())) == len(SITES)  # all sites have different coordinates
    assert all(np.array_equal(kept[n], again[n]) for n in kept)


@pytest.mark.parametrize("disk", [False, True])
def test_coordinates_are_kept_while_a_site_misses_rounds(
    domains: list[Node], tmp_path: Path, caplog: pytest.LogCaptureFixture, disk: bool
) -> None:
    """If a later round is requested twice, both times start from the same coordinates."""
    nodes = stateful(domains, tmp_path) if disk else domains
    bench = Bench(nodes, "feddadil", rounds=5)
    bench.round(1)
    anna = dictionary_of(nodes[0])
    alpha = anna.coordinates(1)
    assert not alpha.equal(feddadil.first_coordinates(3, torch.Generator().manual_seed(0)))
    bench.grid.offline = {"anna"}
    for server_round in (2, 3):
        bench.round(server_round)
    bench.grid.offline = set()
    assert anna.coordinates(3).equal(alpha)
    if disk:
        resident.cache_clear()
    (request,) = [q for q in bench.begin(4) if q.metadata.dst_node_id == bench.grid.id_of("anna")]
    replies = [records.read(bench.grid.call(request).content)[0]["atoms"] for _ in range(2)]
    assert replies[0].buffer == replies[1].buffer
    again = dictionary_of(nodes[0])
    assert again.coordinates(3).equal(alpha) and not again.coordinates(4).equal(alpha)
    assert "drawn anew" not in caplog.text


@pytest.mark.parametrize("value", [np.nan, -0.2, 0.7])
def test_a_site_refuses_atoms_whose_labels_are_no_probabilities(
    domains: list[Node], value: float
) -> None:
    bench = Bench(domains, "feddadil")
    request = bench.begin()[0]
    arrays, tables = records.read(request.content)
    atoms = {n: a.copy() for n, a in arrays["atoms"].unpack().items()}
    atoms["y"][1, 2, 3] = value
    forged = arrays | {"atoms": packing.pack(atoms, Kind.ATOMS)}
    request.content = records.write(forged, **tables)
    code = bench.grid.call(request).error.code
    assert code == (Code.NOT_FINITE if np.isnan(value) else Code.WIRE)


def test_a_site_that_has_left_is_not_asked_again(domains: list[Node]) -> None:
    def leave(request: Message, reply: Message) -> list[Message]:
        bench.grid.offline = {"bert"}
        return []

    bench = Bench(domains, "feddadil", {"bert": leave}, **{"wait.train": 3})
    assert isinstance(bench.strategy, FedDaDiL)
    bench.strategy.has_encoder.update(bench.grid.nodes)
    bench.round()
    assert len(received(bench, "bert")) == 1 and len(received(bench, "anna")) == 2


# ---- what a site does --------------------------------------------------------------------------


@NIGHTLY
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "lr": 0.05},
        {"scaling": "dimension"},
        {"scaling": "none"},
        {"balanced": False},
        {"batch-size": 0},
        {"batch-size": 7, "epochs": 3},
        {"travel": "batch"},
        {"atoms": 1},
        {"entropy": 0.1, "fixed-points": 2},
        {"predict": "ensemble"},
        {"target-pace": 0.0},
        {"mean": "examples"},
        {"mean": "random", "batch-size": 0},
        {"head-anchor": "encoder"},
        {"wire.dtype": "float16"},
        {"model.name": "identity", "model.hidden": ""},
    ],
    ids=str,
)
def test_a_round_works_with_every_choice_of_settings(
    domains: list[Node], runs: dict[str, str], settings: dict[str, Any]
) -> None:
    full = {k if "." in k else f"feddadil.{k}": v for k, v in settings.items()}
    results, _ = run(domains, runs | full | {"method": "feddadil"})
    assert results["events"] == []
    for entry in results["trainings"]["feddadil"][0]["rounds"]:
        assert np.isfinite(entry["loss"])
        counts = entry[f"accuracy-{settings.get('predict', 'reconstruction')}"]
        assert entry["accuracy"] == counts


def test_mini_batches_are_balanced_where_there_are_labels(domains: list[Node]) -> None:
    site = Site(domains[0])
    task = RunConfig.parse(FAST | {"method": "feddadil"}).task(
        "feddadil", 0, (1, 8, 8), tuple("abcd"), 4
    )
    examples = site.training(Inputs((1, 8, 8)))
    assert isinstance(examples, data.Labelled)
    made = Dictionary(site, task, site.workspace(task).model, examples)
    labels = torch.eye(4)[examples.y]
    draws = torch.Generator().manual_seed(0)
    for n in (8, 10, 100):
        i = made.draw(n, labels, draws)
        counts = labels[i].sum(dim=0)
        assert len(i) == n and counts.max() - counts.min() <= 1
    assert len(made.draw(30, None, draws).unique()) == 30
    assert made.draw(100, None, draws).bincount().tolist() == pytest.approx([2.5] * 40, abs=0.5)


def test_a_site_with_too_few_examples_sends_no_atoms(domains: list[Node]) -> None:
    nodes = [n | {"min-images": 41} if n["name"] == "anna" else n for n in domains]
    bench = Bench(nodes, "feddadil", train__batch_size=41)
    bench.round()
    assert [n for n in bench.notices if n[1] == "anna"] == [("failed", "anna", Code.CONFIG.public)]
    assert set(bench.strategy.weights) == {"bert", "carl", "town"}


@pytest.mark.parametrize("case", ["far", "labels", "shape"])
def test_atoms_that_no_honest_site_sends_are_refused(domains: list[Node], case: str) -> None:
    def forge(request: Message, reply: Message) -> list[Message]:
        atoms = {n: a.copy() for n, a in records.read(reply.content)[0]["atoms"].unpack().items()}
        if case == "far":
            atoms["z"] *= 100
        elif case == "labels":
            atoms["y"] -= 0.5
        else:
            atoms["z"] = atoms["z"][:, :5]
        return [changed(request, reply, arrays={"atoms": packing.pack(atoms, Kind.ATOMS)})]

    bench = Bench(domains, "feddadil", {"bert": forge})
    bench.round()
    words = {"far": "max-change", "labels": "not probabilities", "shape": "not this run's atoms"}
    assert [words[case] in text for what, _, text in bench.notices if what == "refused"] == [True]
    assert set(bench.strategy.weights) == {"anna", "carl", "town"}


# ---- heads, results, prediction ----------------------------------------------------------------


@NIGHTLY
def test_heads_are_tested_in_every_round_and_saved_models_predict_the_same(
    domains: list[Node], tmp_path: Path
) -> None:
    nodes = stateful(domains, tmp_path / "state")
    settings = {"method": "feddadil", "rounds": 6, "feddadil.encoder-share": 0.5}
    results, _ = run(nodes, settings | {"run.dir": str(tmp_path)})
    entries = results["trainings"]["feddadil"][0]["rounds"]
    heads = {f"accuracy-{h}" for h in ("reconstruction", "ensemble", "encoder")}
    assert [heads <= set(e) for e in entries] == [False] * 3 + [True] * 3
    assert {e["accuracy-encoder"] for e in entries[3:]} == {entries[2]["accuracy"]}
    assert results["trainings"]["feddadil"][0]["selected_round"] > 3

    folder = tmp_path / "state" / "town" / "models" / "run.feddadil-0"
    tests = data.load_evaluation(nodes[-1]["data"], classes=tuple("0123"))
    assert tests is not None
    for kind, count in (("reconstruction", 1), ("ensemble", 3)):
        model, about = models.load(folder / f"{kind}.safetensors")
        assert isinstance(model.head, Mixture) and model.head.heads == count
        p = models.predict(model, tests.x)
        accuracy = float((p.argmax(dim=1) == tests.y).double().mean())
        assert accuracy == pytest.approx(entries[-1][f"accuracy-{kind}"])
        model, site = folder / f"{kind}.safetensors", Path(nodes[-1]["data"])
        rows = list(predicted(*answers(model, site, 16, torch.device("cpu"), data.Reading())))
        assert len(rows) > len(p) and about.classes == tuple("0123")
    plain, _ = models.load(tmp_path / "run" / "model.safetensors")
    p = models.predict(plain, tests.x)
    accuracy = float((p.argmax(dim=1) == tests.y).double().mean())
    assert accuracy == pytest.approx(entries[-1]["accuracy-encoder"])


@NIGHTLY
def test_the_encoder_can_come_from_a_finished_run(domains: list[Node], tmp_path: Path) -> None:
    base = {"run.dir": str(tmp_path), "run.name": "first", "method": "fedavg", "rounds": 3}
    run(domains, base)
    grid = ScriptedGrid(domains)
    own = {"run.name": "second", "method": "feddadil", "run.start-from": str(tmp_path / "first")}
    results, _ = run(domains, base | own | {"feddadil.encoder-share": 0.5}, grid=grid)
    files = [tmp_path / name / "model.safetensors" for name in ("first", "second")]
    assert files[0].read_bytes() == files[1].read_bytes()
    entries = results["trainings"]["feddadil"][0]["rounds"]
    assert all("accuracy-encoder" in entry for entry in entries)  # all rounds train the dictionary
    assert not [q for q in grid.requests if str(tmp_path) in str(q.content.get("task"))]
    other = RunConfig.parse(FAST | own | {"model.hidden": "17"})
    with pytest.raises(ConfigError, match="has hidden layers '16', but this run has '17'"):
        first_model(other, other.task("feddadil", 0, (1, 8, 8), tuple("0123"), 4))


@NIGHTLY
def test_a_resumed_run_gives_the_numbers_of_an_uninterrupted_one(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = stateful(domains, tmp_path / "state")
    settings = {"method": "feddadil", "rounds": 4, "feddadil.encoder-share": 0.25}
    whole = run(nodes, settings | {"run.dir": str(tmp_path / "a")})[0]
    begun = settings | {"run.dir": str(tmp_path / "b")}
    with pytest.raises(KeyboardInterrupt):
        run(nodes, begun, stop_after(3))
    resident.cache_clear()
    config = RunConfig.parse(FAST | begun | {"run.resume": True})
    again = server_run.execute(config, ScriptedGrid(nodes), Journal())
    of = [r["trainings"]["feddadil"][0]["rounds"][-1] for r in (whole, again)]
    assert of[0]["loss"] == of[1]["loss"] and of[0]["test_loss"] == of[1]["test_loss"]
