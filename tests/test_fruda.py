"""FRUDA over sites in this process: a chain of targets, what crosses, and what goes wrong."""

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from clients.site.memory import resident
from fedda import models, records
from fedda.adversarial.discriminators import Discriminator
from fedda.algorithms import mdan
from fedda.algorithms.fruda import soft_maximum
from fedda.data import load_source, load_target
from fedda.errors import ConfigError, ExchangeError, QuorumError, WireError
from fedda.exchange.in_process import LocalStream
from fedda.halves import load_half
from fedda.maths import ocs
from fedda.results import read
from fedda.results.progress import Display
from fedda.settings import RunConfig
from fedda.train import generator, seed_for
from server.journal import Event, Journal, Listener
from server.simulation import simulate
from tests.local_grid import (
    CLASSES,
    ONE_STEP,
    PLAIN,
    SIDE,
    Node,
    Script,
    ScriptedGrid,
    changed,
    make_domains,
    reshaped,
    run,
    times,
)
from tests.reference import ocs as twin
from tests.reference import windows
from tests.test_targets import stop_in

SHIFTS = {"home": 0.0, "near": 1.0, "far": 2.0, "aside": -1.0}
CHAIN = PLAIN | ONE_STEP | {"method": "fruda", "rounds": 15}
CHAIN |= {"run.name": "chain", "run.baseline": ""}
CHAIN |= {"model.name": "mlp", "model.hidden": "16", "train.batch-size": 20, "train.lr": 0.5}
CHAIN |= {"fruda.sequence": "near,far,aside", "fruda.pretrain": 6, "fruda.epochs": 4}
CHAIN |= {"fruda.lr": 0.003, "fruda.measure.steps": 60, "track.tensorboard": False}
SHORT = {"rounds": 4, "fruda.pretrain": 1, "fruda.epochs": 1, "fruda.measure.steps": 5}


def make_line(root: Path) -> list[Node]:
    """Make three classes of points in a plane; the domains are shifted along a line."""
    nodes = []
    for place, (name, shift) in enumerate(SHIFTS.items()):
        rng, arrays = np.random.default_rng(place), {}
        for part, n in (("train", 120), ("test", 60)):
            y = np.arange(n) % 3
            turn = 2 * np.pi / 3 * y
            x = np.stack([np.cos(turn) + shift, np.sin(turn)], 1) + rng.normal(0, 0.15, (n, 2))
            arrays |= {f"x_{part}": x.astype(np.float32), f"y_{part}": y}
        role = "source" if name == "home" else "target"
        if role == "target":
            del arrays["y_train"]
        np.savez(root / f"{name}.npz", **arrays)
        node = {"role": role, "name": name, "data": str(root / f"{name}.npz"), "threads": 1}
        nodes.append(node | {"reproducible": True, "min-images": 2, "min-examples": 1})
    return nodes


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    return make_line(tmp_path_factory.mktemp("line"))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    """Three sources and one target."""
    return make_domains(tmp_path_factory.mktemp("several"))


def train(
    nodes: list[Node], folder: Path, *listeners: Listener, **settings: Any
) -> list[dict[str, Any]]:
    """Run a chain -> its trainings' entries in results.json."""
    flat = CHAIN | {"run.dir": str(folder)} | settings
    journal = Journal(None, *listeners)
    return simulate(RunConfig.parse(flat), nodes, journal, "process")["trainings"]["fruda"]


def by_target(trainings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {training["target"]: training for training in trainings}


def row(training: Mapping[str, Any], name: str) -> dict[str, Any]:
    (found,) = (row for row in training["selection"]["candidates"] if row["name"] == name)
    return found


@pytest.fixture(scope="module")
def chain(
    line: list[Node], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, Any]], list[Event]]:
    events: list[Event] = []
    trainings = train(line, tmp_path_factory.mktemp("chain"), events.append)
    assert [training["target"] for training in trainings] == ["near", "far", "aside"]
    return by_target(trainings), events


def test_each_target_adapts_from_the_nearest_that_is_good(chain: Any) -> None:
    """`far` is two steps from the source and one from `near`, which has adapted before."""
    trainings, _ = chain
    found = {name: training["selection"]["collaborator"] for name, training in trainings.items()}
    assert found == {"near": "home", "far": "near", "aside": "home"}
    for training in trainings.values():
        chosen = training["selection"]["collaborator"]
        bounds = {row["name"]: row["bound"] for row in training["selection"]["candidates"]}
        assert chosen == min(bounds, key=lambda name: bounds[name])
        assert training["final_accuracy"] > 0.95


def test_the_distances_are_those_of_the_line(chain: Any) -> None:
    trainings, _ = chain
    rows = {name: t["selection"]["candidates"] for name, t in trainings.items()}
    names = {name: [row["name"] for row in its] for name, its in rows.items()}
    assert names == {"near": ["home"], "far": ["home", "near"], "aside": ["home", "near", "far"]}
    w1 = {row["name"]: row["w1"] for row in rows["aside"]}
    assert w1["home"] < w1["near"] < w1["far"]
    far = row(trainings["far"], "home"), row(trainings["far"], "near")
    assert far[0]["w1"] > 1.5 * far[1]["w1"] > 0
    assert all(0 < r["w1-error"] < r["w1"] / 2 for r in far)


def test_errors_are_carried_forward_along_the_chain(chain: Any) -> None:
    trainings, _ = chain
    for name, training in trainings.items():
        chosen = row(training, training["selection"]["collaborator"])
        after = training["selection"]["after"]
        eps, theta = chosen["eps"], chosen["theta"]
        bounds = (eps + 2 * theta * after["w1"], after["moved"] + eps + 2 * theta * chosen["w1"])
        assert after["eps"] == pytest.approx(min(1.0, *bounds))
        assert 0 < after["moved"] < 1  # the adaptation changed answers
        assert after["w1"] < chosen["w1"] / 4  # the adaptation brought the domains together
        if name != "aside":
            assert row(trainings["aside"], name)["eps"] == after["eps"]
        assert chosen["bound"] == pytest.approx(
            2**0.5 * (chosen["eps"] + 2 * chosen["theta"] * chosen["w1"])
        )
    assert trainings["near"]["selection"]["after"]["eps"] > row(trainings["near"], "home")["eps"]


def test_the_journal_says_who_trained_was_selected_and_what_came_of_it(chain: Any) -> None:
    """The sources train in the first training alone."""
    trainings, events = chain
    begun = [(e["target"], e["rounds"]) for e in events if e["event"] == "training"]
    assert begun == [("near", 15), ("far", 9), ("aside", 9)]
    assert [len(training["rounds"]) for training in trainings.values()] == [15, 9, 9]
    selected = [e for e in events if e["event"] == "selected"]
    chosen = [(e["target"], e["collaborator"]) for e in selected]
    assert chosen == [("near", "home"), ("far", "near"), ("aside", "home")]
    assert selected[1]["candidates"] == trainings["far"]["selection"]["candidates"]
    adapted = {e["target"]: e["eps"] for e in events if e["event"] == "adapted"}
    assert adapted == {name: t["selection"]["after"]["eps"] for name, t in trainings.items()}


def test_the_servers_model_is_the_targets(chain: Any) -> None:
    trainings, _ = chain
    sites = Path(trainings["far"]["model"]).parents[1] / "sites"
    for name, training in trainings.items():
        own = load_file(sites / name / f"chain.fruda-0-{name}.model.safetensors")
        server = load_file(training["model"])
        assert all(torch.equal(own[tensor], server[tensor]) for tensor in own)


def loaded(nodes: list[Node]) -> dict[str, Any]:
    """The data of three sources and one target."""
    return {n["name"]: LOAD[n["role"]](n["data"]) for n in nodes}


LOAD = {"source": load_source, "target": load_target}


@pytest.mark.parametrize("p", [1, 2])
def test_sites_measure_what_one_loop_with_all_data_does(
    several: list[Node], tmp_path: Path, p: int
) -> None:
    steps, lr, betas = 7, 0.03, (0.4, 0.9)
    flat = {
        "method": "fruda", "rounds": 1, "run.name": "m", "run.dir": str(tmp_path),
        "model.name": "mlp", "model.hidden": "16", "train.batch-size": 16, "fruda.pretrain": 0,
        "fruda.measure.steps": steps, "fruda.measure.lr": lr, "fruda.measure.sizes": "8",
        "fruda.measure.beta1": betas[0], "fruda.measure.beta2": betas[1], "exchange.p": p,
        "exchange.min-examples": 1, "exchange.expose-features": True, "exchange.clip": 1e9,
        "track.tensorboard": False, "run.baseline": "",
    }  # fmt: skip
    config = RunConfig.parse(flat)
    results = simulate(config, [n | {"threads": 1} for n in several], Journal(), "process")
    (training,) = results["trainings"]["fruda"]
    start = models.build(config.model, (1, SIDE, SIDE), CLASSES, seed=0).eval()
    data = loaded(several)
    with torch.no_grad():
        z = {name: start.features(d.x.float() / 255) for name, d in data.items()}
    batch = {}
    for name in z:
        blocks = windows.blocks(len(z[name]), name, 2)
        parts = windows.batches(blocks, 16, p, seed_for(0, name), steps * p)
        own = (parts[i * p : (i + 1) * p] for i in range(steps))
        batch[name] = [torch.cat([z[name][part] for part in some]) for some in own]
    for name in ("anna", "bert", "carl"):
        DI = Discriminator(16, (8,), seed_for(0, f"critic/{name}"))
        pairs = list(zip(batch[name], batch["town"], strict=True))
        twin.critic(DI, pairs, lr, betas)
        with torch.no_grad():
            halves = [ocs.halves(DI(z[s]), generator(0, s, 1, "halves")) for s in (name, "town")]
            whole = twin.w1(DI(z[name]).tolist(), DI(z["town"]).tolist())
            p_y = start(data[name].x.float() / 255).softmax(dim=1)
        W1, error = ocs.wasserstein(*halves)
        found = row(training, name)
        # What a site tells is rounded to steps of .01.
        assert found["w1"] == pytest.approx(W1, abs=0.011)
        assert found["w1"] == pytest.approx(max(0.0, whole), abs=0.011)  # halves of equal size
        assert found["w1-error"] == pytest.approx(error, abs=0.011)
        eps = twin.l1_error(p_y.tolist(), data[name].y.tolist())  # type: ignore[union-attr]
        assert found["eps"] == pytest.approx(eps, abs=0.0051)
        assert found["theta"] == pytest.approx(ocs.theta_of(start.head.weight.detach()), rel=5e-3)
    assert max(row(training, name)["w1"] for name in ("anna", "bert", "carl")) > 0.01


def test_the_number_of_candidates_changes_no_measurement(several: list[Node], runs_in: Any) -> None:
    """All critics train at once, each as if it were alone."""
    together = runs_in(several)
    alone = runs_in([n for n in several if n["name"] in ("bert", "town")])
    mine, theirs = row(together, "bert"), row(alone, "bert")
    assert {k: v for k, v in mine.items() if k != "chosen"} == {
        k: v for k, v in theirs.items() if k != "chosen"
    }


@pytest.fixture
def runs_in(tmp_path: Path) -> Any:
    """Return a function that runs FRUDA over sites in this process -> its one training."""

    def begin(nodes: list[Node], script: Mapping[str, Script] | None = None, **more: Any) -> Any:
        resident.cache_clear()
        place = {"run.dir": str(tmp_path), "run.name": f"run{len(list(tmp_path.iterdir()))}"}
        settings = {"method": "fruda", "run.baseline": "", "rounds": 1, "run.expect": len(nodes)}
        results, events = run(nodes, settings | place | more, script=script)
        (training,) = results["trainings"]["fruda"]
        return training | {"troubles": [e for e in events if e["event"] == "trouble"]}

    return begin


@pytest.mark.parametrize("selector", ["ocs", "source", "random", "pad"])
def test_every_selector_chooses_a_candidate(
    several: list[Node], runs_in: Any, selector: str
) -> None:
    training = runs_in(several, **{"fruda.select": selector, "fruda.measure.steps": 20})
    selection = training["selection"]
    assert selection["selector"] == selector
    (chosen,) = (r for r in selection["candidates"] if r["chosen"])
    assert chosen["name"] == selection["collaborator"]
    if selector == "pad":
        assert "bound" not in chosen and 0 <= chosen["pad"] <= 2
        assert chosen["pad"] == min(r["pad"] for r in selection["candidates"])
        assert len({r["pad"] for r in selection["candidates"]}) > 1
    elif selector != "random":
        assert chosen["bound"] == min(r["bound"] for r in selection["candidates"])


def test_with_all_sites_compute_the_same_as_one_loop_with_all_data(
    several: list[Node], tmp_path: Path
) -> None:
    lr, lr_DI, gamma, betas = 0.003, 0.02, 3.0, (0.4, 0.9)
    flat = PLAIN | {
        "guard.max-update": 0.0,
        "method": "fruda", "rounds": 2, "run.name": "m", "run.dir": str(tmp_path),
        "model.name": "mlp", "model.hidden": "16", "train.batch-size": 16, "fruda.pretrain": 0,
        "fruda.select": "all", "fruda.gamma": gamma, "fruda.epochs": 1, "fruda.lr": lr,
        "fruda.measure.steps": 5, "fruda.keep": "adapted", "fruda.discriminator.lr": lr_DI,
        "fruda.discriminator.sizes": "8", "fruda.discriminator.optimizer": "sgd",
        "fruda.discriminator.momentum": 0.0, "fruda.beta1": betas[0], "fruda.beta2": betas[1],
        "exchange.p": 1, "exchange.min-examples": 1, "exchange.expose-features": True,
        "exchange.clip": 1e9, "track.tensorboard": False, "run.baseline": "",
    }  # fmt: skip
    config = RunConfig.parse(flat)
    nodes = [n | {"threads": 1} for n in several]
    results = simulate(config, nodes, Journal(), "process")
    (training,) = results["trainings"]["fruda"]
    assert all(r["chosen"] for r in training["selection"]["candidates"])
    assert set(training["rounds"][-1]["weights"].values()) == {1 / 3}
    (kept,) = (tmp_path / "m" / "sites" / "town").glob("*.2.method.safetensors")
    found, names = load_file(kept), ("anna", "bert", "carl")

    S = models.build(config.model, (1, SIDE, SIDE), CLASSES, seed=0).eval()
    T = models.build(config.model, (1, SIDE, SIDE), CLASSES, seed=0).train()
    moves_T = torch.optim.Adam(T.encoder.parameters(), lr=lr, betas=betas)
    DI = {n: Discriminator(16, (8,), seed_for(0, f"discriminator/{n}")) for n in names}
    data = loaded(several)
    steps = int(found["discriminator/anna/sync/steps"])
    read = {
        name: windows.batches(windows.blocks(len(d), name, 2), 16, 1, seed_for(0, name), steps)
        for name, d in data.items()
    }
    weights = []
    for i in range(steps):
        x = {name: data[name].x[read[name][i]].float() / 255 for name in data}
        z_T, m = T.features(x["town"]), {}
        for name in names:
            v_S, v_T = DI[name](S.features(x[name]).detach()), DI[name](z_T)
            m[name] = -torch.log(torch.sigmoid(v_T)).mean()
            half_S = -torch.log(torch.sigmoid(v_S)).mean()
            half_T = -torch.log(1 - torch.sigmoid(DI[name](z_T.detach()))).mean()
            g = torch.autograd.grad((half_S + half_T) / 2, list(DI[name].parameters()))
            m[name] = m[name], g
        total = torch.stack([torch.exp(gamma * loss) for loss, _ in m.values()]).mean()
        moves_T.zero_grad()
        (torch.log(total) / gamma).backward()
        moves_T.step()
        for name, (loss, g) in m.items():
            weights.append((torch.exp(gamma * loss) / total).item() / len(names))
            with torch.no_grad():
                for w, part in zip(DI[name].parameters(), g, strict=True):
                    w -= lr_DI * part
    assert max(weights) > 0.34 > min(weights)  # the maximum was of different losses
    for name in names:
        for key, value in DI[name].state_dict().items():
            mine = found[f"discriminator/{name}/discriminator/{key}"]
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=5e-6)
    # A bias before BatchNorm has no gradient but rounding, which Adam magnifies; in training mode
    # it changes no feature.
    adapted = models.build(config.model, (1, SIDE, SIDE), CLASSES, seed=0)
    state = {k.removeprefix("model/module/"): v for k, v in found.items()}
    adapted.load_state_dict({k: state[k] for k in adapted.state_dict()})
    x = data["town"].x.float() / 255
    with torch.no_grad():
        mine, wanted, before = (n.train().features(x) for n in (adapted, T, S))
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    assert (mine - before).abs().max() > 1e-2


def test_the_soft_maximum_by_hand_and_its_weights_are_mdans() -> None:
    """(1 + 3) / 2 = 2; of equal losses it is the loss, and of one candidate its own."""
    m = torch.tensor([0.0, math.log(3)], dtype=torch.float64, requires_grad=True)
    assert soft_maximum(m, 1.0).item() == pytest.approx(math.log(2))
    assert float(soft_maximum(torch.tensor([0.7, 0.7, 0.7]), 10.0)) == pytest.approx(0.7)
    (g,) = torch.autograd.grad(soft_maximum(m, 1.0), m)
    assert g.tolist() == pytest.approx([1 / 4, 3 / 4])
    assert g.tolist() == pytest.approx(mdan.weights(m.detach(), 1.0).tolist())


def asked_to_adapt(grid: ScriptedGrid, target: str) -> set[str]:
    """The sites that take part in the adaptation of a target."""
    return {
        str(grid.nodes[q.metadata.dst_node_id]["name"])
        for q in grid.requests
        if q.metadata.message_type == "train"
        and (q.content["step"]["hop"], q.content["task"]["target"]) == ("adapt", target)
    }


@pytest.mark.nightly("clients/fruda.py", "strategies/fruda.py")
def test_with_all_every_candidate_takes_part_and_an_adapted_target_helps(
    line: list[Node], tmp_path: Path
) -> None:
    grid = ScriptedGrid(line)
    place = {"run.dir": str(tmp_path), "run.expect": 4, "fruda.select": "all"}
    results, _ = run(line, CHAIN | SHORT | place, grid=grid)
    among = ["home", "near", "far", "aside"]
    for place_of, target in enumerate(among[1:], start=1):
        assert asked_to_adapt(grid, target) == set(among[: place_of + 1])
    assert {t["selection"]["collaborator"] for t in results["trainings"]["fruda"]} == {"home"}


CRITIC = {"first", "second", "clipped", "seconds"}
ABOUT = {f"{what}/home" for what in ("first", "second", "theta", "mean", "mean-slack")}
SUMMED = {"loss", "steps", "seconds", "discriminator-loss", "discriminator-accuracy", "clipped"}


def test_after_the_choice_only_the_pair_is_asked_and_only_the_listed_crosses(
    line: list[Node], tmp_path: Path
) -> None:
    grid = ScriptedGrid(line)
    place = {"run.dir": str(tmp_path), "run.expect": 4}
    run(line, CHAIN | SHORT | place | {"fruda.select": "source"}, grid=grid)
    seen: dict[tuple[str, str], tuple[dict[str, str], set[str]]] = {}
    asked: dict[str, set[str]] = {}
    for c in grid.crossed:
        if c.kind != "train":
            continue
        asked.setdefault(c.hop, set()).add(c.site)
        if c.way == "from":
            part = "target" if c.site != "home" else "home"
            seen.setdefault((c.hop, part), (c.arrays, c.numbers))
    assert asked["train"] == {"home"}
    assert asked["select"] == set(SHIFTS) and asked["adapt"] == asked["measure"] == set(SHIFTS)
    for target in ("near", "far", "aside"):
        assert asked_to_adapt(grid, target) == {"home", target}
    assert seen["select", "home"] == ({}, CRITIC | {"error"})
    assert seen["adapt", "home"] == ({}, SUMMED - {"loss"})
    assert seen["adapt", "target"] == ({}, SUMMED)
    assert seen["measure", "home"] == ({}, CRITIC)
    assert seen["measure", "target"] == (
        {"model": "model"},
        ABOUT | {"infomax-before", "infomax-after", "kept", "moved", "clipped", "seconds"},
    )


def test_an_adapted_target_that_helps_another_sends_no_error(
    line: list[Node], tmp_path: Path
) -> None:
    grid = ScriptedGrid(line)
    settings = CHAIN | SHORT | {"run.dir": str(tmp_path), "run.expect": 4}
    run(line, settings | {"fruda.sequence": "near,far"}, grid=grid)
    helped = ("near", "from", "select")
    found = [c.numbers for c in grid.crossed if (c.site, c.way, c.hop) == helped and not c.arrays]
    assert CRITIC in found
    assert not any("error" in numbers for numbers in found)
    sites = {grid.nodes[q.metadata.dst_node_id]["name"] for q in grid.requests
             if q.metadata.message_type == "train"}  # fmt: skip
    assert sites == {"home", "near", "far"}  # `aside` is not in the sequence


def claim(**numbers: float) -> Script:
    """Return a script that changes numbers of a site's reply to `select`."""

    def script(request: Any, reply: Any) -> list[Any]:
        selects = request.content["step"]["hop"] == "select"
        return [changed(request, reply, numbers=numbers)] if selects else [reply]

    return script


def test_a_candidate_that_claims_no_error_is_believed(several: list[Node], runs_in: Any) -> None:
    honest = runs_in(several)["selection"]
    last = max(honest["candidates"], key=lambda r: r["bound"])["name"]
    assert last != honest["collaborator"]
    lied = runs_in(several, {last: claim(error=0.0)})["selection"]
    assert lied["collaborator"] == last


def lowered(hop: str, by: float) -> Script:
    """Return a script in which a site says that its critic's mean is so much lower."""

    def script(request: Any, reply: Any) -> list[Any]:
        if request.content["step"]["hop"] != hop:
            return [reply]
        told = records.read(reply.content)[1]["metrics"]
        numbers = {half: told[half] - by for half in ("first", "second")}
        return [changed(request, reply, numbers=numbers)]

    return script


LONG: dict[str, Any] = {"fruda.measure.steps": 40}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_candidate_that_lies_about_its_critics_mean_is_left_out(
    several: list[Node], runs_in: Any, overlap: bool
) -> None:
    """By its own words it would be the nearest, and so the collaborator."""
    more = LONG | {"exchange.overlap": overlap}
    honest = runs_in(several, **more)
    assert not honest["troubles"] and len(honest["selection"]["candidates"]) == 3
    last = max(honest["selection"]["candidates"], key=lambda r: r["bound"])
    lied = runs_in(several, {last["name"]: lowered("select", last["w1"])}, **more)
    assert last["name"] not in [r["name"] for r in lied["selection"]["candidates"]]
    assert lied["selection"]["collaborator"] == honest["selection"]["collaborator"]
    (said,) = lied["troubles"]
    assert (said["what"], said["site"]) == ("refused", last["name"])
    why = r"it says \S+ is its critic's mean, but its gradients say \S+; it is no candidate"
    assert re.fullmatch(why, said["text"])


def test_after_the_adaptation_a_collaborators_gradients_count_more_than_its_words(
    line: list[Node], tmp_path: Path
) -> None:
    """A lie there would make the target's own error look small to later targets."""
    settings = CHAIN | {"rounds": 9, "fruda.pretrain": 4, "run.expect": 2}
    nodes = [node for node in line if node["name"] in ("home", "far")]
    w1, said = {}, {}
    for by in (0.0, 3.0):
        resident.cache_clear()
        place = {"run.dir": str(tmp_path / str(by)), "fruda.sequence": "far"}
        results, events = run(nodes, settings | place, script={"home": lowered("measure", by)})
        w1[by] = results["trainings"]["fruda"][0]["selection"]["after"]["w1"]
        said[by] = [e["text"] for e in events if e.get("what") == "refused"]
    assert w1[0.0] > 0.1 and w1[3.0] == pytest.approx(w1[0.0], abs=0.2) and w1[3.0] > 0.1
    assert not said[0.0] and len(said[3.0]) == 1 and said[3.0][0].endswith("; these count")


@pytest.mark.parametrize("more", [{"fruda.select": "pad"}, {"fruda.measure.penalty": 10.0}])
def test_of_a_discriminator_and_with_a_penalty_gradients_tell_no_mean(
    several: list[Node], runs_in: Any, more: dict[str, Any]
) -> None:
    """So there a candidate is believed, as docs/trust/limits.md says."""
    lied = runs_in(several, {"bert": lowered("select", 1.0)}, **LONG | more)
    assert not lied["troubles"] and len(lied["selection"]["candidates"]) == 3


def assert_without_bert(training: Mapping[str, Any], why: str) -> None:
    """A training has left out the candidate bert alone, and says why."""
    assert [r["name"] for r in training["selection"]["candidates"]] == ["anna", "carl"]
    refused = [(t["site"], t["text"]) for t in training["troubles"] if t["what"] == "refused"]
    assert refused == [("bert", why)]


@pytest.mark.parametrize("value", [math.nan, 3e38])
def test_a_candidate_that_ends_the_exchange_is_left_out_of_the_next_try(
    several: list[Node], runs_in: Any, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """By values that are no numbers, or that are too large for a sum."""
    push = LocalStream._push

    def spoilt(self: Any, group: str, index: int, gradient: Any, examples: int) -> None:
        mine = np.full_like(gradient, value) if self.node == "bert" else gradient
        push(self, group, index, mine, examples)

    monkeypatch.setattr(LocalStream, "_push", spoilt)
    why = "the exchange of an earlier try ended because of it; it is no candidate"
    assert_without_bert(runs_in(several), why)


def test_candidates_that_fail_each_time_are_left_out(
    several: list[Node], runs_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = load_half("clients", "fruda").Collaborator
    real = client.measured

    def fail(self: Any, z: Any) -> Any:
        if self.site.name in ("anna", "bert"):
            raise WireError("no reason")
        return real(self, z)

    monkeypatch.setattr(client, "measured", fail)
    training = runs_in(several)
    assert [r["name"] for r in training["selection"]["candidates"]] == ["carl"]


@pytest.mark.parametrize("factor", [0.0, 1e30])
def test_a_candidate_whose_model_the_target_cannot_use_is_left_out(
    several: list[Node],
    runs_in: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
) -> None:
    """By it all features are alike, or no numbers; the candidate takes part with others."""
    client: Any = load_half("clients", "fruda").Collaborator
    monkeypatch.setattr(client, "all_features", lambda self: torch.rand(len(self.data), 16))
    monkeypatch.setattr(client, "checked", lambda self, p: p.nan_to_num())
    own = {"reproducible": False, "state-dir": str(tmp_path / "state")}
    more = {"rounds": 3, "fruda.pretrain": 1, "guard.max-change": 0, "guard.max-statistics": 0}
    more |= {"guard.max-update": 0}  # else it is scaled to one that can be used
    training = runs_in([node | own for node in several], {"bert": scaled(factor)}, **more)
    assert_without_bert(training, "the target cannot use its model; the target's log says why")


def scaled(factor: float) -> Script:
    """Return a script that multiplies all weights of the model that a site trains."""
    change = reshaped(lambda model: {n: times(a, factor) for n, a in model.items()})
    return lambda q, a: change(q, a) if q.content["step"]["hop"] == "train" else [a]


@pytest.mark.parametrize("error", [-0.1, 1.5])
def test_a_candidate_with_an_impossible_error_is_left_out(
    several: list[Node], runs_in: Any, error: float
) -> None:
    training = runs_in(several, {"bert": claim(error=error)})
    assert_without_bert(training, "bert sent no error between 0 and 1.")


def test_the_others_go_on_when_a_candidate_leaves_in_the_selection(
    line: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ScriptedGrid(line)
    client: Any = load_half("clients", "fruda").Collaborator
    real = client.measured

    def leave(self: Any, z: Any) -> Any:
        if self.site.name == "near" and self.task.target == "far":
            grid.offline.add("near")
            raise ExchangeError("the machine is switched off")
        return real(self, z)

    monkeypatch.setattr(client, "measured", leave)
    place = {"run.dir": str(tmp_path), "run.expect": 4, "wait.sites": 30.0}
    results, events = run(line, CHAIN | SHORT | place | {"fruda.sequence": "near,far"}, grid=grid)
    trainings = by_target(results["trainings"]["fruda"])
    assert [r["name"] for r in trainings["far"]["selection"]["candidates"]] == ["home"]
    assert trainings["far"]["selection"]["collaborator"] == "home"
    assert "after" in trainings["far"]["selection"]
    absent = [e["text"] for e in events if e.get("what") == "absent" and e["site"] == "near"]
    assert absent == ["not connected; it is no candidate"]


@pytest.mark.parametrize("keep", ["better", "adapted"])
def test_a_target_that_the_adaptation_made_worse_keeps_the_earlier_model(
    line: list[Node], tmp_path: Path, keep: str
) -> None:
    events: list[Event] = []
    settings = {"rounds": 8, "fruda.pretrain": 6, "fruda.sequence": "near", "fruda.lr": 0.3}
    settings |= {"fruda.keep": keep, "fruda.measure.steps": 5, "guard.max-change": 0.0}
    (training,) = train(line, tmp_path, events.append, **settings)
    after = training["selection"]["after"]
    assert after["infomax-after"] < after["infomax-before"]
    named = [(e["site"], e["text"]) for e in events if e.get("what") == "negative transfer"]
    server = load_file(training["model"])
    own = load_file(tmp_path / "chain" / "sites" / "near" / "chain.fruda-0-near.model.safetensors")
    assert all(torch.equal(own[name], server[name]) for name in own)
    before, last = training["rounds"][-2], training["rounds"][-1]
    if keep == "better":
        assert after["kept"] == "before" and last["accuracy"] == before["accuracy"] > 0.4
        (said,) = named
        assert said[0] == "near" and said[1].endswith("it keeps the model of home")
    else:
        assert after["kept"] == "after" and not named
        assert last["accuracy"] < before["accuracy"]


@pytest.mark.nightly("clients/fruda.py", "strategies/fruda.py")
@pytest.mark.parametrize(
    "server_round",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
)
def test_a_chain_resumed_in_its_middle_gives_that_of_an_uninterrupted_one(
    line: list[Node], tmp_path: Path, server_round: int
) -> None:
    """Stopped after the choice, while adapting, or between two targets."""
    settings: dict[str, Any] = SHORT | {"rounds": 4}
    whole = train(line, tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train(line, tmp_path / "cut", stop_in("far", server_round), **settings)
    resident.cache_clear()
    events: list[Event] = []
    cut = train(line, tmp_path / "cut", events.append, **settings, **{"run.resume": True})
    done = [(e["target"], e["round"]) for e in events if e["event"] == "round"]
    left = [("far", n) for n in range(server_round + 1, 4)]
    assert done == [*left, *(("aside", n) for n in (1, 2, 3))]
    assert [t["selection"] for t in cut] == [t["selection"] for t in whole]
    for one, other in zip(cut, whole, strict=True):
        mine, theirs = load_file(one["model"]), load_file(other["model"])
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_every_seed_has_a_chain_of_its_own(line: list[Node], tmp_path: Path) -> None:
    settings = SHORT | {"fruda.sequence": "near,far", "run.seeds": "0,1"}
    trainings = train(line, tmp_path, **settings)
    order = [(t["seed"], t["target"]) for t in trainings]
    assert order == [(0, "near"), (0, "far"), (1, "near"), (1, "far")]
    for near, far in (trainings[:2], trainings[2:]):
        assert row(far, "near")["eps"] == near["selection"]["after"]["eps"]
    assert row(trainings[1], "near")["theta"] != row(trainings[3], "near")["theta"]


def test_a_sequence_without_a_target_and_too_few_rounds_are_refused_before_anything_runs(
    line: list[Node], tmp_path: Path
) -> None:
    events: list[Event] = []
    message = r"fruda.sequence names 'home', which is no target .*; name some of aside, far, near"
    with pytest.raises(ConfigError, match=message):
        train(line, tmp_path, events.append, **{"fruda.sequence": "near,home"})
    with pytest.raises(ConfigError, match=r"sums no gradients in its first 6 rounds.*pretrain"):
        train(line, tmp_path, events.append, **{"rounds": 6})
    assert not [e for e in events if e["event"] == "training"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fruda.loss": "cada"}, "loss is cada, .* on labels, but an adapted .* adda, grl or was"),
        ({"fruda.sequence": "a,b,a"}, "sequence is 'a,b,a'; name each target once"),
        ({"fruda.sequence": "a,,b"}, "name each target once"),
        ({"fruda.select": "nearest"}, "fruda.select"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse(CHAIN | settings)


@pytest.mark.parametrize("selector", ["ocs", "all"])
def test_without_any_candidate_the_run_stops(
    several: list[Node], runs_in: Any, selector: str
) -> None:
    odd = {name: claim(error=2.0) for name in ("anna", "bert", "carl")}
    with pytest.raises(QuorumError, match="No candidate for a collaborator gave a usable reply"):
        runs_in(several, odd, **{"wait.tries": 1, "fruda.select": selector})


def test_the_phases_of_a_chain() -> None:
    longer = RunConfig.parse({"method": "fruda", "rounds": 9, "fruda.pretrain": 4})
    lengths = [
        [(s.phase.name, s.last - s.first + 1) for s in longer.stages("fruda", later)]
        for later in (False, True)
    ]
    assert lengths[1] == [("select", 1), ("adapt", 4)]
    assert lengths[0] == [("pretrain", 4), *lengths[1]]


@pytest.mark.parametrize(("own", "least"), [(1, 20), (64, 64)])
def test_a_sites_own_limit_holds_for_critics_too(
    line: list[Node], tmp_path: Path, own: int, least: int
) -> None:
    """A window of the run has 20 images, but a gradient of this site must be over 64."""
    careful = [node | {"min-examples": own} for node in line]
    settings = SHORT | {"fruda.pretrain": 0, "fruda.sequence": "near", "rounds": 2}
    (training,) = train(careful, tmp_path, **settings)
    fewest = [entry["gradient-examples"] for entry in training["rounds"]]
    assert all(least <= each < least + 60 for each in fewest)


@pytest.mark.slow
def test_progress_names_the_collaborator_and_counts_shorter_trainings(
    line: list[Node], tmp_path: Path
) -> None:
    settings = CHAIN | SHORT | {"run.dir": str(tmp_path), "fruda.select": "source"}
    out = io.StringIO()
    display = Display(RunConfig.parse(settings), Console(file=out, width=120))
    simulate(RunConfig.parse(settings), line, Journal(None, display), "process")
    said = [text.strip() for text in out.getvalue().splitlines()]
    told = [text for text in said if "adapts from" in text]
    assert told == [f"{name} adapts from home, of 1 candidate" for name in ("near", "far", "aside")]
    assert "FRUDA on near: 4 rounds" in said and "FRUDA on far: 3 rounds" in said
    (last,) = (text for text in said[-2:] if text.startswith("round 3/3"))
    assert "left" not in last


def test_a_collaborators_weight_counts_where_it_takes_part(chain: Any) -> None:
    trainings, _ = chain
    sites = [{"name": n, "role": "source" if n == "home" else "target"} for n in SHIFTS]
    results = {"sites": sites}
    assert read.others(results, trainings["near"]) == {"far", "aside"}
    assert read.others(results, trainings["far"]) == {"aside"}
    assert read.others(results, trainings["aside"]) == set()
    weights = read.mean_weights(
        [t["rounds"][-1]["weights"] for t in trainings.values()],
        [read.others(results, t) for t in trainings.values()],
    )
    assert weights == {"home": pytest.approx(2 / 3), "near": pytest.approx(1 / 3)}
