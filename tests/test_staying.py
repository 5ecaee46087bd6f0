"""What stays at a site from round to round: networks by name, even if the site restarts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clients import fedavg
from clients.site.memory import Site, resident
from clients.site.request import Numbers, Request
from clients.site.workspace import Network
from fedda import models
from fedda.errors import LostError
from fedda.settings import RunConfig, Task
from fedda.wire import packing
from fedda.wire.packing import Kind, Packed
from tests.local_grid import CLASSES, FAST, SIDE, Node

pytestmark = pytest.mark.usefixtures("fresh_sites")

ROUNDS = 4


class Source(fedavg.Source):
    """Trains a second network beside the model, and reports its state before and after."""

    strict = False

    def train(self) -> Numbers:
        def make() -> nn.Module:
            torch.manual_seed(self.task.seed)
            return nn.Linear(self.model.width, 1)

        module = make()
        network = Network(module, self.optimizer(module.parameters()))
        self.register_state("second", network)
        if self.strict:
            self.register_state("third", Network(nn.Linear(1, 1)), strict=True)
        begins = float(next(network.module.parameters()).detach().sum())
        optimizer = network.optimizer
        assert optimizer is not None
        momentum = len(optimizer.state)
        for indices in self.batches():
            loss = (network.module(self.features(indices).detach()) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends = float(next(network.module.parameters()).detach().sum())
        return {
            "begins": begins,
            "ends": ends,
            "momentum": momentum,
            "rate": optimizer.param_groups[0]["lr"],
        }


class Strict(Source):
    strict = True


@pytest.fixture
def node(domains: list[Node], tmp_path: Path) -> Node:
    return domains[0] | {"state-dir": str(tmp_path)}


def a_task() -> Task:
    flat = {**FAST, "method": "fedavg", "rounds": ROUNDS, "train.schedule": "linear"}
    names = [str(i) for i in range(CLASSES)]
    return RunConfig.parse(flat).task("fedavg", 0, (1, SIDE, SIDE), names, 4)


def ask(node: Node, server_round: int, kind: type[Source] = Source) -> dict[str, Any]:
    """Return a site's numbers of a round; `resident` keeps sites in memory between the calls."""
    task = a_task()
    network = models.build(task.model, task.dims, task.classes, 0)
    sent: dict[str, Packed] = {"model": packing.pack(models.to_arrays(network), Kind.MODEL)}
    step = {"round": server_round, "phase": "train", "hop": "train", "part": "source"}
    site: Site = resident(tuple(sorted(node.items())))
    return kind(site).serve(Request.make(task.flat(), step, sent))[1]


def test_a_network_goes_on_where_it_was_left(node: Node) -> None:
    first, second = ask(node, 1), ask(node, 2)
    assert first["begins"] != first["ends"] == second["begins"] != second["ends"]
    assert first["momentum"] == 0 < second["momentum"]
    assert second["rate"] < first["rate"]  # the run's schedule goes on, too


def test_a_restart_changes_no_bit(node: Node) -> None:
    ask(node, 1)
    wanted = ask(node, 2)
    resident.cache_clear()
    found = ask(node, 2)  # the same round again, after a restart of the site
    assert found | {"seconds": 0} == wanted | {"seconds": 0}


def test_a_round_that_is_asked_for_again_begins_from_the_same_state(node: Node) -> None:
    ask(node, 1)
    once, again = ask(node, 2), ask(node, 2)
    assert once["begins"] == again["begins"]
    assert once["ends"] == again["ends"]


def test_a_site_that_missed_a_round_goes_on_from_its_last_one(node: Node) -> None:
    first, third = ask(node, 1), ask(node, 3)
    assert third["begins"] == first["ends"]
    again = ask(node, 3)
    assert again["begins"] == first["ends"]


def test_the_first_round_begins_anew_whatever_an_earlier_run_left(node: Node) -> None:
    first = ask(node, 1)
    ask(node, 2)
    assert ask(node, 1)["begins"] == first["begins"]


def test_without_a_disk_a_restarted_site_begins_anew(domains: list[Node]) -> None:
    first = ask(domains[0], 1)
    resident.cache_clear()
    assert ask(domains[0], 2)["begins"] == first["begins"]


def test_a_strict_state_is_an_error_if_its_last_round_is_missing(node: Node) -> None:
    ask(node, 1, Strict)
    ask(node, 2, Strict)
    with pytest.raises(LostError, match="lost its state of round 3"):
        ask(node, 4, Strict)


def test_a_state_is_of_the_rounds_that_are_asked_for(node: Node) -> None:
    """Also where the site still remembers an earlier one."""
    ask(node, 1)
    ask(node, 2)
    site: Site = resident(tuple(sorted(node.items())))
    left = site.workspace(a_task()).left
    assert left(a_task(), "second", 1, 2) and left(a_task(), "second", 2, 3)
    assert left(a_task(), "second", 3, 3) is None
