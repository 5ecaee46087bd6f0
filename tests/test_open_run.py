"""An open run of FRUDA: targets that join after it began are adapted, until somebody stops it."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from clients.site.memory import resident
from fedda.config import InputConfig
from fedda.errors import RosterError
from fedda.settings import RunConfig
from server import run as server_run
from server.journal import Event, Journal
from server.simulation import simulate
from strategies.sites import roster
from tests.local_grid import FAST, Node, Script, ScriptedGrid, never
from tests.test_fruda import CHAIN, SHORT, make_line

TARGETS = ("near", "far", "aside")
OPEN: dict[str, Any] = (
    FAST | CHAIN | SHORT | {"fruda.open": True, "fruda.sequence": "", "run.expect": 0}
)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    return make_line(tmp_path_factory.mktemp("line"))


class Open:
    """An open run in this process: `home` and `near` are there, others join when it waits."""

    def __init__(self, nodes: list[Node], folder: Path) -> None:
        self.nodes = nodes
        self.folder = folder / "chain"
        self.settings = OPEN | {"run.dir": str(folder)}
        self.events: list[Event] = []
        self.grid = ScriptedGrid(nodes)

    def go(
        self,
        *moments: Callable[[ScriptedGrid], object],
        script: Mapping[str, Script] | None = None,
        away: Collection[str] = ("far", "aside"),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Run; do the next of `moments` each time the run waits for targets, then stop it."""
        resident.cache_clear()
        self.grid = ScriptedGrid(self.nodes, script)
        self.grid.offline = set(away)
        left = list(moments)

        def listen(event: Event) -> None:
            self.events.append(event)
            if event["event"] == "open":
                if not left:
                    raise KeyboardInterrupt
                left.pop(0)(self.grid)

        config = RunConfig.parse(self.settings | dict(settings or {}))
        with pytest.raises(KeyboardInterrupt):
            server_run.execute(config, self.grid, Journal(None, listen))
        assert not left

    @property
    def trainings(self) -> dict[str, Any]:
        results = json.loads((self.folder / "results.json").read_text())
        return {t["target"]: t for t in results["trainings"]["fruda"]}

    @property
    def trained(self) -> list[str]:
        """The targets whose training went on for one round or more, in order."""
        return list(dict.fromkeys(e["target"] for e in self.events if e["event"] == "round"))

    def said(self, what: str) -> list[tuple[str, str]]:
        found = [e for e in self.events if e["event"] == "trouble" and e["what"] == what]
        return [(e["site"], e["text"]) for e in found]


def joins(name: str) -> Callable[[ScriptedGrid], object]:
    return lambda grid: grid.offline.discard(name)


def test_targets_that_join_later_adapt_as_in_a_sequence(line: list[Node], tmp_path: Path) -> None:
    run = Open(line, tmp_path / "open")
    run.go(joins("far"), joins("aside"))
    assert run.trained == list(TARGETS)
    resident.cache_clear()
    whole = CHAIN | SHORT | {"run.dir": str(tmp_path / "whole")}
    wanted = simulate(RunConfig.parse(whole), line, Journal(None), "process")
    for training in wanted["trainings"]["fruda"]:
        found = run.trainings[training["target"]]
        assert found["selection"] == training["selection"]
        mine, theirs = load_file(found["model"]), load_file(training["model"])
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    assert not (run.folder / "model.safetensors").exists()


def test_a_resumed_run_knows_those_that_joined(line: list[Node], tmp_path: Path) -> None:
    run = Open(line, tmp_path)
    run.go(joins("far"))
    before = run.trainings
    run.events.clear()
    run.go(joins("aside"), settings={"run.resume": True})  # `far` has left
    assert run.trained == ["aside"]
    for name, training in before.items():
        again = run.trainings[name]
        assert {**again, "rounds": 0} == {**training, "rounds": 0}  # these have times of day
        assert len(again["rounds"]) == len(training["rounds"])
    names = [c["name"] for c in run.trainings["aside"]["selection"]["candidates"]]
    assert names == ["home", "near"]  # its model has left with it
    assert ("far", "not connected; it is no candidate") in run.said("absent")


def test_a_target_that_fails_does_not_end_the_run_and_may_come_again(
    line: list[Node], tmp_path: Path
) -> None:
    answers = [False]

    def silent(request: Any, reply: Any) -> list[Any]:
        return [reply] if answers[0] else never(request, reply)

    def back(grid: ScriptedGrid) -> None:
        answers[0] = True
        grid.offline.discard("far")

    run = Open(line, tmp_path)
    tries = {"wait.tries": 1, "wait.train": 3}
    run.go(joins("far"), script={"far": silent}, settings=tries)
    assert run.trained == ["near"] and [site for site, _ in run.said("left out")] == ["far"]
    run.go(back, script={"far": silent}, settings=tries | {"run.resume": True})
    assert run.trained == ["near", "far"]
    known = json.loads((run.folder / "roster.json").read_text())
    assert [node["name"] for node in known["nodes"]] == ["home", "near", "far"]


def node(name: str, role: Any = "target", shape: tuple[int, ...] = (1, 8, 8)) -> roster.Node:
    classes = ("a", "b") if role == "source" else ()
    return roster.Node(len(name), role, name, 30, 0, classes, shape, "1")


def test_a_roster_takes_another_target_and_gives_it_up() -> None:
    known = roster.form([node("home", "source"), node("z")])
    more = known.joined(node("early"), InputConfig())
    assert [n.name for n in more.nodes] == ["home", "z", "early"]  # in the order of arrival
    assert more.counts["early"] == 30
    assert more.without("early") == known
    for odd, text in (
        (node("early", shape=(1, 9, 9)), "different sizes"),
        (replace(node("early"), version="2"), "different versions"),
        (replace(node("z"), id=77), "the name of two sites"),
    ):
        with pytest.raises(RosterError, match=text):
            known.joined(odd, InputConfig())
    fitted = roster.form([node("home", "source"), node("z")], InputConfig(size=8))
    assert fitted.joined(node("early", shape=(1, 9, 9)), InputConfig(size=8)).shape == (1, 8, 8)
