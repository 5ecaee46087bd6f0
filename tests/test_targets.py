"""Several targets, each adapted in turn, and runs that go on or begin without any source."""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from rich.console import Console

from clients import fedavg as clients
from clients.base import Client
from clients.site.request import Numbers
from fedda import models
from fedda.algorithms import fedavg
from fedda.cli import run as run_command
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import ConfigError, ModelError, QuorumError, RosterError, RunError
from fedda.methods import Hop, Method, Phase
from fedda.results import read, terminal
from fedda.results.progress import Display
from fedda.settings import RunConfig, Task
from fedda.wire import MODEL, Part, Rule
from fedda.wire.packing import Arrays
from server.journal import Event, Journal, Listener
from server.presence import Sites
from server.simulation import folders, rehearse, simulate
from strategies.base import Numbers as RoundNumbers
from strategies.fedavg import FedAvg
from strategies.sites.roster import Roster, form
from tests import test_plugins
from tests.command_lines import call
from tests.fingerprints import numbers_of
from tests.local_grid import Node, ScriptedGrid, dotted, run, stop_after
from tests.test_roster import ANNA, TOWN, nodes, offer

pytestmark = pytest.mark.usefixtures("fresh_sites")

Install = test_plugins.Install
install = test_plugins.install

TARGETS = ("town", "village")


VILLAGE = offer("village", "target", tested=3)


@pytest.fixture(scope="module")
def sites(domains: list[Node], tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    """Two sources and two targets."""
    anna, bert, carl, town = domains
    with np.load(carl["data"]) as file:
        arrays = {name: array for name, array in file.items() if name != "y_train"}
    path = tmp_path_factory.mktemp("village") / "village.npz"
    np.savez(path, **arrays)
    return [anna, bert, town, carl | {"role": "target", "name": "village", "data": str(path)}]


@pytest.fixture
def flat(tmp_path: Path) -> dict[str, Any]:
    return {"run.dir": str(tmp_path / "runs"), "run.expect": 4, "track.tensorboard": False}


def without(sites: Sequence[Node], *names: str) -> list[Node]:
    return [site for site in sites if site["name"] not in names]


def stateful(sites: Sequence[Node], folder: Path, notes: bool = False) -> list[Node]:
    return [{**site, "state-dir": str(folder), "notes": notes} for site in sites]


def training(results: Mapping[str, Any], method: str, target: str) -> dict[str, Any]:
    (found,) = [t for t in results["trainings"][method] if t["target"] == target]
    return found


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Two trainings have one model and one history, whatever they are called.

    The bytes to the target may differ, as a resumed server sends it again a model that it kept.
    """
    assert Path(one["model"]).read_bytes() == Path(other["model"]).read_bytes()
    kept = "bytes/to target model"
    found, wanted = ([{**r, kept: 0} for r in numbers_of(t["rounds"])] for t in (one, other))
    assert found == wanted
    for key in ("target", "final_accuracy", "selected_accuracy", "selected_round"):
        assert one[key] == other[key]


def stop_in(target: str, server_round: int) -> Listener:
    """Make a listener that ends a run, as Ctrl-C would, after a round of one target's training."""

    def listen(event: Event) -> None:
        at = event.get("target"), event.get("round")
        if event["event"] == "round" and at == (target, server_round):
            raise KeyboardInterrupt

    return listen


# The settings by method; one of them has a baseline and two seeds.
IN_TURN: dict[str, dict[str, Any]] = {
    "kd3a": {"run.baseline": "fedavg", "run.seeds": "0,1"},
    "fdann": {},
    "dils": {"dils.share": False, "dils.loss": "adda"},
}


LATER = pytest.mark.nightly(
    *("server", "strategies", "clients/base.py", "clients/site/trainer.py", "clients/shared")
)


@pytest.mark.parametrize(
    "method", ["kd3a", *(pytest.param(m, marks=LATER) for m in IN_TURN if m != "kd3a")]
)
def test_each_target_is_adapted_as_if_it_were_alone(
    sites: list[Node], flat: dict[str, Any], tmp_path: Path, method: str
) -> None:
    settings = flat | {"method": method} | IN_TURN[method]
    config = RunConfig.parse({"method": method, **IN_TURN[method]})
    both = stateful(sites, tmp_path / "both")
    together, events = run(both, settings)
    assert together["events"] == []
    order = [(e["seed"], e["target"], e["method"]) for e in events if e["event"] == "training"]
    trained = config.trainings
    assert order == [(s, t, m) for s in config.seeds for t in TARGETS for m in trained]
    for target, other in zip(TARGETS, reversed(TARGETS), strict=True):
        here = stateful(without(sites, other), tmp_path / target)
        place = {"run.dir": str(tmp_path / "alone" / target), "run.expect": 3}
        alone, _ = run(here, settings | place)
        for m in trained:
            trainings = [t for t in together["trainings"][m] if t["target"] == target]
            for one, same in zip(trainings, alone["trainings"][m], strict=True):
                assert_same(one, same)
                assert Path(one["model"]).parent.name == f"{m}-{one['seed']}-{target}"
                assert Path(same["model"]).parent.name == f"{m}-{one['seed']}"
                if m == "dils":  # and the model that stays at the target
                    adapted = [tmp_path / "both" / one["adapted"]["file"]]
                    adapted += [tmp_path / target / same["adapted"]["file"]]
                    assert adapted[0].read_bytes() == adapted[1].read_bytes()
                    assert one["adapted"]["site"] == target
        keys = ("final_accuracy", "final_accuracy_std", "selected_accuracy", "fedavg_accuracy")
        assert {k: together["targets"][target][k] for k in keys} == {k: alone[k] for k in keys}
        assert list(alone["targets"]) == [target]
    mean = np.mean([together["targets"][t]["final_accuracy"] for t in TARGETS])
    assert together["final_accuracy"] == pytest.approx(mean)


AT_VILLAGE = {"run.target": "village"}


def test_a_run_can_choose_one_of_several_targets(sites: list[Node], flat: dict[str, Any]) -> None:
    settings = flat | {"method": "kd3a"}
    both, _ = run(sites, settings)
    grid = ScriptedGrid(sites)
    chosen, events = run(sites, settings | AT_VILLAGE | {"run.name": "chosen"}, grid=grid)
    assert_same(training(chosen, "kd3a", "village"), training(both, "kd3a", "village"))
    (only,) = chosen["trainings"]["kd3a"]
    own = Path(flat["run.dir"]) / "chosen" / "model.safetensors"
    assert list(chosen["targets"]) == ["village"]
    assert not (own.parents[1] / "run" / "model.safetensors").exists()  # one per target
    assert own.read_bytes() == Path(only["model"]).read_bytes()
    # It is reported in one row.
    rows = list(terminal.scores(read.summary(chosen), "kd3a", str))
    assert [row[0] for row in rows] == ["KD3A"] and read.target(chosen) == "village"
    page = pytest.importorskip("fedda.contrib.report.page")
    text = page.write(chosen, own.with_name("page.html"), own.parent).read_text()
    assert "KD3A on village" in text and "on town" not in text
    assert not [c for c in grid.crossed if c.site == "town" and c.kind != "query"]
    (roster,) = [e for e in events if e["event"] == "roster"]
    assert roster["targets"] == ["village"] and len(roster["sites"]) == 4


def test_a_run_can_choose_some_of_its_sources(sites: list[Node], flat: dict[str, Any]) -> None:
    """It computes what a run over these sites alone computes; the others are asked nothing."""
    chosen = {"run.sources": "bert", "wait.min-sources": 1, "run.target": "town"}
    grid = ScriptedGrid(sites)
    results, _ = run(sites, {**flat, **chosen, "run.name": "chosen"}, grid=grid)
    assert {c.site for c in grid.crossed if c.kind != "query"} == {"bert", "town"}
    assert {s["name"] for s in results["sites"]} == {"bert", "town", "village"}
    alone = [node for node in sites if node["name"] in ("bert", "town", "village")]
    few = {"run.expect": 3, "wait.min-sources": 1, "run.target": "town", "run.name": "alone"}
    wanted, _ = run(alone, {**flat, **few})
    assert_same(training(results, "kd3a", "town"), training(wanted, "kd3a", "town"))


def test_sources_that_a_run_names_must_be_there(sites: list[Node], flat: dict[str, Any]) -> None:
    missing = {"run.sources": "anna,dora", "wait.min-sources": 1}
    with pytest.raises(RosterError, match=r"run\.sources names 'dora', but no such source"):
        run(sites, {**flat, **missing})
    with pytest.raises(RosterError, match="names 'dora'"):
        rehearse(RunConfig.parse({**flat, **missing}), sites)
    for wrong in ("anna,anna", "anna,"):
        with pytest.raises(ConfigError, match="each source once"):
            RunConfig.parse({"run.sources": wrong})
    with pytest.raises(ConfigError, match=r"names 1, but wait\.min-sources asks for 2"):
        RunConfig.parse({"run.sources": "anna", "wait.min-sources": 2})


@pytest.mark.parametrize("expect", [0, 4])
def test_an_unknown_target_is_refused_with_the_known_ones(
    sites: list[Node], flat: dict[str, Any], expect: int
) -> None:
    """At once if all expected sites have joined, otherwise when the time for joining is over."""
    settings = flat | {"run.target": "city", "run.expect": expect, "wait.sites": 0.2}
    with pytest.raises(RosterError, match=r"No target is called 'city'.* one of town, village\."):
        run(sites, settings)
    with pytest.raises(RosterError, match=r"No target is called 'anna'"):
        run(sites, settings | {"run.target": "anna"})
    assert not list(Path(flat["run.dir"]).glob("*/*/checkpoint.json"))


def test_a_target_that_a_run_names_is_waited_for(sites: list[Node], flat: dict[str, Any]) -> None:
    grid = ScriptedGrid(sites)
    grid.offline = {"village"}

    def arrive(event: Event) -> None:
        if event["event"] == "waiting" and (event["sources"], event["targets"]) == (2, 1):
            assert not event["enough"]
            grid.offline.clear()

    settings = flat | AT_VILLAGE | {"method": "fedavg", "rounds": 1, "run.expect": 0}
    results, _ = run(sites, settings | {"wait.sites": 60.0}, arrive, grid=grid)
    assert list(results["targets"]) == ["village"]


def asked_back(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """List the sites that a resumed run waits for, each time it waits."""
    awaited: list[set[str]] = []
    real = Sites.back

    def back(self: Sites, known: Roster, needed: Iterable[str], *args: Any, **more: Any) -> Roster:
        awaited.append(set(needed))
        return real(self, known, needed, *args, **more)

    monkeypatch.setattr(Sites, "back", back)
    return awaited


@pytest.mark.parametrize("method", ["kd3a", pytest.param("dils", marks=LATER)])
def test_a_run_stopped_at_its_second_target_goes_on_bit_for_bit(
    sites: list[Node],
    flat: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """The first target, whose training is over, does not have to come back."""
    settings = flat | {"method": method, "rounds": 3}
    whole, _ = run(stateful(sites, tmp_path / "a"), settings | {"run.name": "whole"})
    with pytest.raises(KeyboardInterrupt):
        run(stateful(sites, tmp_path / "b"), settings, stop_in("village", 2))
    awaited = asked_back(monkeypatch)
    grid = ScriptedGrid(stateful(sites, tmp_path / "b"))
    grid.offline = {"town"}
    again, events = run([], settings | {"run.resume": True}, grid=grid)
    rounds = [(e["target"], e["round"]) for e in events if e["event"] == "round"]
    assert rounds == [("village", 3)]
    assert awaited == [{"anna", "bert", "village"}]
    for target in TARGETS:
        assert_same(training(again, method, target), training(whole, method, target))


def test_a_finished_run_waits_for_nobody(
    sites: list[Node], flat: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = flat | {"method": "kd3a", "rounds": 1}
    before, _ = run(sites, settings)
    awaited, grid = asked_back(monkeypatch), ScriptedGrid(sites)
    grid.offline = {site["name"] for site in sites}
    again, events = run([], settings | {"run.resume": True}, grid=grid)
    assert awaited == [set()] and not [e for e in events if e["event"] == "round"]
    assert again["targets"] == before["targets"]
    assert_same(training(again, "kd3a", "town"), training(before, "kd3a", "town"))


class Config(fedavg.Config):
    """How long the sources stay."""

    source_rounds: int = 2


ADAPT: Hop = {"target": Part(Rule(MODEL), fedavg.TRAINED)}
FIRST = Phase("source", {"train": fedavg.TRAIN}, lambda o, _: o.source_rounds, prepares=True)
METHOD = Method("leaving", "Leaving", Config, (FIRST, Phase("adapt", {"adapt": ADAPT})))


class STRATEGY(FedAvg):
    """FedAvg of the sources, then the target by itself."""

    def requests(self) -> list[Message]:
        chosen = self.present() if self.phase.name == "source" else [self.roster.target]
        if self.phase.name == "adapt":
            self.present()  # raises an error if the target is away
        return [self.request(node, {"model": self.model}) for node in chosen]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, RoundNumbers]:
        if self.phase.name == "source":
            return super().combine(replies)
        for reply in self.accept(replies, needs={"loss"}):
            return reply.model().unpack(), {"loss": float(reply.numbers["loss"])}
        raise QuorumError("the target gave no usable reply")


Source = clients.Source


class Target(Client):
    """Makes its own predictions surer."""

    def adapt(self) -> Numbers:
        optimizer, steps, total = self.optimizer(), 0, 0.0
        for indices in self.batches():
            p = self.model(self.inputs(indices)).softmax(dim=1)
            loss = -(p * p.clamp_min(1e-12).log()).sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps, total = steps + 1, total + loss.item()
        return {"loss": total / steps, "steps": steps}


@pytest.fixture
def leaving(install: Install, flat: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run of the method above: two rounds with sources, two without."""
    here = "from tests.test_targets import"
    modules = {"algorithm": f"{here} METHOD", "strategy": f"{here} STRATEGY"}
    modules |= {"client": f"{here} Source, Target", "__init__": ""}
    install("leaving_package", {"methods": "leaving = leaving_package"}, modules)
    return flat | {"method": "leaving", "rounds": 4}


def test_sources_may_leave_after_their_phase(sites: list[Node], leaving: dict[str, Any]) -> None:
    here = without(sites, "village")
    settings = leaving | {"run.expect": 3}
    whole, _ = run(here, settings | {"run.name": "whole"})
    grid = ScriptedGrid(here)

    def leave(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 2:
            grid.offline = {"anna", "bert"}

    results, events = run(here, settings, leave, grid=grid)
    assert results["events"] == []
    assert [e["round"] for e in events if e["event"] == "round"] == [1, 2, 3, 4]
    assert_same(training(results, "leaving", "town"), training(whole, "leaving", "town"))
    rounds = results["trainings"]["leaving"][0]["rounds"]
    weighed = [["anna", "bert"]] * 2 + [[]] * 2  # nobody is averaged when the target is alone
    assert [sorted(entry["weights"]) for entry in rounds] == weighed


def test_a_run_is_resumed_without_sources_that_have_gone_home(
    sites: list[Node], leaving: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = without(sites, "village")
    settings = leaving | {"run.expect": 3}
    whole, _ = run(here, settings | {"run.name": "whole"})
    with pytest.raises(KeyboardInterrupt):
        run(here, settings, stop_after(2))
    awaited, grid = asked_back(monkeypatch), ScriptedGrid(here)
    grid.offline = {"anna", "bert"}
    again, _ = run([], settings | {"run.resume": True}, grid=grid)
    assert awaited == [{"town"}] and again["events"] == []
    assert_same(training(again, "leaving", "town"), training(whole, "leaving", "town"))


def test_sources_whose_phase_is_not_over_are_waited_for(
    sites: list[Node], leaving: dict[str, Any]
) -> None:
    here = without(sites, "village")
    settings = leaving | {"run.expect": 3, "wait.sites": 0.2}
    with pytest.raises(KeyboardInterrupt):
        run(here, settings, stop_after(1))
    grid = ScriptedGrid(here)
    grid.offline = {"anna", "bert"}
    with pytest.raises(QuorumError, match="only 0 sources came back"):
        run([], settings | {"run.resume": True}, grid=grid)


def test_with_two_targets_sources_may_leave_after_their_phase_for_the_second(
    sites: list[Node], leaving: dict[str, Any]
) -> None:
    grid = ScriptedGrid(sites)

    def leave(event: Event) -> None:
        if event["event"] == "round" and (event["target"], event["round"]) == ("village", 2):
            grid.offline = {"anna", "bert", "town"}

    results, _ = run(sites, leaving, leave, grid=grid)
    assert results["events"] == [] and list(results["targets"]) == ["town", "village"]


@pytest.fixture
def first(sites: list[Node], leaving: dict[str, Any]) -> str:
    """The folder of a finished run of FedAvg."""
    run(sites, leaving | {"method": "fedavg", "rounds": 2, "run.name": "first"} | AT_VILLAGE)
    return str(Path(leaving["run.dir"]) / "first")


def test_a_finished_model_is_adapted_without_any_source(
    sites: list[Node], leaving: dict[str, Any], first: str
) -> None:
    target = without(sites, "anna", "bert", "village")
    start = {"run.start-from": first, "run.expect": 0, "rounds": 2}
    results, events = run(target, leaving | start)
    assert results["events"] == [] and results["classes"] == ["0", "1", "2", "3"]
    assert [site["name"] for site in results["sites"]] == ["town"]
    (adapted,) = results["trainings"]["leaving"]
    assert [entry["round"] for entry in adapted["rounds"]] == [1, 2]
    assert adapted["final_accuracy"] is not None
    waits = [e for e in events if e["event"] == "waiting"]
    assert waits[-1]["sources"] == 0 and waits[-1]["enough"]

    # A run with connected sources makes the same of it: they take no part.
    with_sources = without(sites, "village")
    again, _ = run(with_sources, leaving | start | {"run.expect": 3, "run.name": "there"})
    (same,) = again["trainings"]["leaving"]
    assert Path(adapted["model"]).read_bytes() == Path(same["model"]).read_bytes()

    # Tables and page work without sources, too.
    terminal.table(results)
    page = pytest.importorskip("fedda.contrib.report.page")
    text = page.write(results, Path(first) / "page.html", Path(first)).read_text()
    assert "no sources → town" in text


def test_without_a_model_to_start_from_sources_are_needed(
    sites: list[Node], leaving: dict[str, Any], first: str
) -> None:
    target = without(sites, "anna", "bert", "village")
    with pytest.raises(QuorumError, match="0 sources and 1 target have joined"):
        run(target, leaving | {"run.expect": 0, "wait.sites": 0.1})
    fedavg_too = {"run.start-from": first, "run.baseline": "fedavg", "run.name": "b"}
    with pytest.raises(QuorumError, match="0 sources and 1 target have joined"):
        run(target, leaving | fedavg_too | {"run.expect": 0, "wait.sites": 0.1})


def saved(path: Path, config: ModelConfig, shape: tuple[int, ...], classes: str) -> str:
    model = models.build(config, shape, len(classes), 0)
    models.save(path, model, config=config, inputs=Inputs(shape), classes=classes)
    return str(path)


MLP = ModelConfig(name="mlp", hidden="16")
WRONG: dict[str, tuple[ModelConfig, tuple[int, ...], str, str]] = {
    "model": (ModelConfig(name="lenet"), (1, 16, 16), "0123", "has model 'lenet', but this run"),
    "sizes": (ModelConfig(name="mlp", hidden="8"), (1, 8, 8), "0123", "has hidden layers '8', but"),
    "shape": (MLP, (3, 8, 8), "0123", r"has inputs of shape \(3, 8, 8\), but this run has \(1, 8"),
    "more classes": (MLP, (1, 8, 8), "01234", "knows 4, which this run does not; start from"),
    "fewer": (MLP, (1, 8, 8), "012", "does not know 3; start from a run with the same"),
    "others": (MLP, (1, 8, 8), "abc3", r"knows a, b, c, which .* and does not know 0, 1, 2; sta"),
    "order": (MLP, (1, 8, 8), "1023", "has this run's classes in another order"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_start_that_does_not_fit_is_refused_in_one_sentence_before_training(
    sites: list[Node], flat: dict[str, Any], tmp_path: Path, case: str
) -> None:
    config, shape, classes, words = WRONG[case]
    start = {"run.start-from": saved(tmp_path / "m.safetensors", config, shape, classes)}
    events: list[Event] = []
    with pytest.raises(ConfigError, match=words) as error:
        run(sites, flat | start | {"method": "kd3a", "run.baseline": "fedavg"}, events.append)
    assert len(str(error.value).splitlines()) == 1
    assert not {"roster", "training"} & {e["event"] for e in events}
    joined = "joined" in [e["event"] for e in events]
    assert joined == (case not in ("model", "sizes"))  # these two need no site
    # A simulation says the same before it makes its run's folder.
    place = RunConfig.parse({**flat, **start, "model.name": "mlp", "model.hidden": "16"})
    with pytest.raises(ConfigError, match=words):
        rehearse(place, sites)


def test_a_run_can_start_from_one_training_but_not_from_a_run_of_several_targets(
    sites: list[Node], flat: dict[str, Any]
) -> None:
    settings = flat | {"method": "fedavg", "rounds": 1}
    run(sites, settings | {"run.name": "first"})
    folder = Path(flat["run.dir"]) / "first"
    with pytest.raises(ModelError, match=r"start from one of its trainings: .*fedavg-0-town"):
        run(sites, settings | {"run.start-from": str(folder)})
    (folder / "text").write_text("no model")
    for name in ("nowhere", "text"):
        with pytest.raises(ModelError, match=f"Cannot read '.*{name}' as a model"):
            run(sites, flat | {"run.start-from": str(folder / name)})
    run(sites, settings | {"run.start-from": str(folder / "fedavg-0-village")})


def test_files_of_different_targets_do_not_collide(
    sites: list[Node], flat: dict[str, Any], tmp_path: Path
) -> None:
    settings = flat | {"method": "kd3a", "train.carry-momentum": True, "track.tensorboard": True}
    folder = Path(flat["run.dir"]) / "run"
    results, _ = run(stateful(sites, folder / "sites", notes=True), settings)
    curves = {path.parent.name for path in folder.glob("*/events.out.tfevents.*")}
    assert curves == {"kd3a-0-town", "kd3a-0-village"}
    optimizers = {path.name for path in (folder / "sites" / "anna").glob("*.optimizer.safetensors")}
    names = {f"run.kd3a-0-{t}.{r}" for t in TARGETS for r in (1, 2)}
    assert optimizers == {f"{name}.optimizer.safetensors" for name in names}
    noted = {path.name for path in (folder / "sites" / "anna" / "notes").iterdir()}
    assert noted == {"run.kd3a-0-town", "run.kd3a-0-village"}

    # The page shows the notes of each target under its name.
    page = pytest.importorskip("fedda.contrib.report.page")
    text = page.write(results, tmp_path / "page.html", folder).read_text()
    for target in TARGETS:
        assert f"KD3A: test at {target}, last round" in text
    assert "seed 0 on town; distances" in text


@pytest.mark.parametrize("name", ["../town", ".town", "a/b", "a\nb"])
def test_a_site_takes_no_target_whose_name_is_a_path(name: str) -> None:
    config = RunConfig.parse({})
    task = config.task("kd3a", 0, (1, 8, 8), ("a", "b"), 3, "town").flat()
    assert Task.parse(task).training == "run.kd3a-0-town"
    with pytest.raises(ConfigError, match="it is not the name of a site"):
        Task.parse(task | {"target": name})


@pytest.fixture
def of_two_targets(sites: list[Node], flat: dict[str, Any]) -> dict[str, Any]:
    """The results of a run with two targets, two methods and two seeds."""
    settings = {"method": "kd3a", "run.baseline": "fedavg", "run.seeds": "0,1"}
    return run(sites, flat | settings)[0]


def test_reports_have_a_row_per_target(of_two_targets: dict[str, Any], tmp_path: Path) -> None:
    assert read.targets(of_two_targets) == list(TARGETS)
    assert read.target(of_two_targets) == "town and village"
    summary = read.summary(of_two_targets)

    def number(value: float) -> str:
        return f"{100 * value:.1f}"

    for method in ("kd3a", "fedavg"):
        rows = list(terminal.scores(summary, method, number))
        named = [read.title(of_two_targets, method), "on town", "on village"]
        assert [row[0] for row in rows] == named
        for target, row in zip(TARGETS, rows[1:], strict=True):
            own = [t for t in of_two_targets["trainings"][method] if t["target"] == target]
            values = [t["final_accuracy"] for t in own]
            spread = abs(values[0] - values[1]) / 2**0.5
            assert row[1] == f"{number(float(np.mean(values)))} ± {number(spread)}"
        assert rows[0][4] == pytest.approx(rows[1][4] + rows[2][4])
    assert rows[0][1].startswith(number(of_two_targets["fedavg_accuracy"]))

    # The weight of a target is the mean over the trainings in which it took part.
    weights = summary["methods"]["kd3a"]["weights"]
    for target in TARGETS:
        own = [t for t in of_two_targets["trainings"]["kd3a"] if t["target"] == target]
        mean = np.mean([t["rounds"][-1]["weights"][target] for t in own])
        assert weights[target] == pytest.approx(mean) and mean > 0

    page = pytest.importorskip("fedda.contrib.report.page")
    text = page.write(of_two_targets, tmp_path / "page.html", tmp_path).read_text()
    words = re.sub(r"<[^>]*>", " ", text)
    assert "KD3A on town and village" in words
    assert re.search(r"on town\s+[\d.]+ ± [\d.]+", words)
    assert "KD3A on village, seed 1 on village" in words
    assert "24 labelled tests at town and 24 labelled tests at village" in words


def test_progress_names_the_target_where_there_are_several(
    sites: list[Node], flat: dict[str, Any]
) -> None:
    def shown(**more: str) -> str:
        settings = flat | {"method": "kd3a", "rounds": 1, "run.seeds": "4,5"} | dotted(more)
        out = io.StringIO()
        display = Display(RunConfig.parse(settings), Console(file=out, width=120))
        run(sites, settings, display)
        return out.getvalue()

    text = shown(run__name="both")
    for name in TARGETS:
        for number, seed in ((1, 4), (2, 5)):
            assert text.count(f"KD3A on {name}, seed {seed} ({number} of 2): 1 round, ") == 1
    text = shown(run__name="one", run__target="village")
    assert "KD3A, seed 4 (1 of 2): 1 round, " in text and " on " not in text


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, Any]]:
    """The runs that `fedda run` would perform: their settings, and how to launch them."""
    runs: list[tuple[RunConfig, Any]] = []
    monkeypatch.setattr(run_command, "perform", lambda config, how: runs.append((config, how)))
    return runs


def test_the_option_target_names_the_targets_of_a_simulation(
    performed: list[Any], sites: list[Node], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for site in sites:
        (root / f"{site['name']}.npz").symlink_to(site["data"])
    words = ("--simulate", root, "--dir", tmp_path / "runs", "--target", "town,village")
    call("run", "kd3a", *words)
    config, how = performed[0]
    assert (config.run.target, how.target) == ("", "town,village")
    roles = {site["name"]: site["role"] for site in folders(root, how.target, {})}
    assert roles == {"anna": "source", "bert": "source", "town": "target", "village": "target"}
    with pytest.raises(RunError, match=r"no domain 'city', it has .*several with commas"):
        folders(root, "town,city", {})
    with pytest.raises(RunError, match="'village' is not a source"):
        folders(root, "town,village", {"village": 10.0})

    flat = {"run.dir": str(tmp_path / "runs"), "method": "fedavg", "rounds": 1}
    flat |= {"model.name": "mlp", "model.hidden": "8", "train.batch-size": 16}
    here = folders(root, "town,village", {})
    results = simulate(RunConfig.parse(flat), here, Journal(), "process")
    assert list(results["targets"]) == ["town", "village"]


def test_a_run_that_starts_from_another_has_no_baseline_unless_it_is_asked_for(
    performed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = ("--start-from", "first")
    for words in (start, ("-c", "run.start-from=first"), (*start, "--baseline", "fedavg"), ()):
        call("run", "kd3a", "--dir", tmp_path, *words)
    call("run", "kd3a", "--target", "village", "--dir", tmp_path)
    assert performed.pop()[0].run.target == "village"
    assert [config.run.baseline for config, _ in performed] == ["", "", "fedavg", "fedavg"]
    starts = [config.run.start_from for config, _ in performed]
    assert starts == [str(tmp_path / "first"), "first", str(tmp_path / "first"), ""]


def test_a_simulation_may_have_a_target_and_no_sources(
    sites: list[Node], leaving: dict[str, Any], first: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "town.npz").symlink_to(without(sites, "anna", "bert", "village")[0]["data"])
    settings = {"model.name": "mlp", "model.hidden": "16", "train.batch-size": 16, "rounds": 1}
    settings |= {"run.dir": leaving["run.dir"], "method": "leaving", "run.start-from": first}
    config = RunConfig.parse(settings)
    here = folders(root, "town", {})
    rehearse(config, here)
    assert simulate(config, here, Journal(), "process")["final_accuracy"] is not None
    with pytest.raises(RosterError, match="there is no source"):
        rehearse(config.model_copy(update={"method": "kd3a"}), here)


def test_predict_and_export_ask_which_of_several_models(
    sites: list[Node], flat: dict[str, Any], tmp_path: Path
) -> None:
    run(sites, flat | {"method": "fedavg", "rounds": 1})
    folder, town = Path(flat["run.dir"]) / "run", sites[2]["data"]
    said = call("predict", folder, town, code=1, columns=200).stderr
    assert f"the folder of one training: {folder}/fedavg-0-town, " in said
    predicted = call("predict", folder / "fedavg-0-village", town).stdout
    assert predicted.startswith("file,class,probability")
    said = call("export", folder, code=1, columns=200).stderr
    assert "fedavg-0-town, fedavg-0-village: choose by" in said
    (folder / "config.json").write_text(json.dumps({"method": "fedavg", "run.seeds": "0"}))
    said = call("export", folder, "--target", "city", code=1, columns=200).stderr
    assert "fedavg-0-city has no model.safetensors" in said


def test_a_roster_is_read_as_it_was_written() -> None:
    whole = form(nodes(VILLAGE, ANNA, TOWN))
    assert Roster.parse(whole.text()) == whole
    alone = form(nodes(TOWN), class_names=("cat", "dog"))
    assert alone.classes == ("cat", "dog") and alone.sources == ()
    assert Roster.parse(alone.text()) == alone and alone.bounded(1.0) == alone
    with_sources = form(nodes(TOWN, ANNA), class_names=("x", "y"))
    assert with_sources.classes == ("cat", "dog")


def test_a_roster_takes_over_the_ids_of_a_later_one() -> None:
    roster = form(nodes(VILLAGE, ANNA, TOWN))
    later = replace(roster, nodes=tuple(replace(n, id=n.id + 50) for n in roster.nodes))
    (aim,) = later.aims("village")
    taken = roster.taking(aim)
    ids = {n.name: n.id for n in roster.nodes}
    later_ids = {name: ids[name] + 50 for name in ("anna", "village")}  # town is in one only
    assert {n.name: n.id for n in taken.nodes} == ids | later_ids
