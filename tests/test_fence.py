"""A source whose change of the model is far longer than the others' is left out of the round."""

import math
from typing import Any

import numpy as np
import pytest

from fedda import records, wire
from fedda.maths.bounds import too_long
from fedda.wire import Kind
from strategies.sites.fence import Fence
from strategies.sites.replies import Reply
from strategies.sites.roster import Node
from tests.local_grid import Bench, changed
from tests.local_grid import Node as Given

LENGTHS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 10.0}


def test_by_hand() -> None:
    """The median of the other three is 2, and 10 is five times as long."""
    assert too_long(LENGTHS, "d", 4.9) == 5.0
    assert too_long(LENGTHS, "d", 5.0) == too_long(LENGTHS, "d", 0.0) == 0.0
    assert too_long(LENGTHS, "a", 5.0) == 0.0  # a short one does no harm
    assert too_long({"a": 1.0, "b": 1.0, "c": 99.0}, "c", 5.0) == 0.0  # two others tell nothing
    assert math.isinf(too_long({"a": 0.0, "b": 0.0, "c": 0.0, "d": 1.0}, "d", 5.0))


def reply(name: str, length: float, role: Any = "source") -> Reply:
    return Reply(Node(1, role, name, 1, 0, (), (1,), ""), {}, {}, length)


def passed(fence: Fence, *replies: Reply) -> list[list[str]]:
    return [[each.node.name for each in fence.take(one)] for one in replies]


@pytest.mark.parametrize("liar", range(4))
def test_replies_pass_as_soon_as_they_can_be_judged(liar: int) -> None:
    names = ["a", "b", "c"]
    names.insert(liar, "liar")
    fence = Fence(5.0)
    found = passed(fence, *(reply(n, 60.0 if n == "liar" else 1.0) for n in names))
    assert found == [[], [], [], ["a", "b", "c"]]
    assert passed(fence, reply("e", 1.2)) == [["e"]]
    assert [(r.node.name, times) for r, times in fence.rest()] == [("liar", 60.0)]


def test_what_is_not_judged_passes_at_once() -> None:
    fence = Fence(5.0)
    assert passed(fence, reply("town", 50.0, "target"), reply("a", 0.0)) == [["town"], ["a"]]
    assert passed(Fence(0.0), reply("a", 1.0), reply("b", 99.0)) == [["a"], ["b"]]
    held = Fence(5.0)
    passed(held, reply("a", 1.0), reply("b", 99.0))  # the others never answered
    assert [(r.node.name, times) for r, times in held.rest()] == [("a", 0.0), ("b", 0.0)]


def scaled(request: Any, reply: Any) -> list[Any]:
    """Ten times the change, backwards."""
    sent, trained = (
        records.read(message.content)[0]["model"].unpack() for message in (request, reply)
    )
    lie = {
        n: sent[n] - 10 * (a - sent[n]) if a.dtype.kind == "f" and "running" not in n else a
        for n, a in trained.items()
    }
    return [changed(request, reply, arrays={"model": wire.pack(lie, Kind.MODEL)})]


@pytest.mark.parametrize("method", ["fedavg", "kd3a", "shot"])
def test_a_scaled_liar_costs_no_more_than_its_absence(domains: list[Given], method: str) -> None:
    anna, bert, *_ = domains
    nodes = [*domains, anna | {"name": "dora"}, bert | {"name": "emil"}]
    more = {"run.expect": len(nodes), "shot.epochs": 2} | {"guard.max-change": 0.0}
    with_liar = Bench(nodes, method, {"carl": scaled}, **more)
    without = Bench(nodes, method, {"carl": lambda *_: []}, **more)
    found, wanted = with_liar.round()[0], without.round()[0]
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    (refused,) = [n for n in with_liar.notices if n[0] == "refused"]
    assert refused[1] == "carl" and "times as long as the median of the others'" in refused[2]
    honest = Bench(nodes, method, **more)
    honest.round()
    assert honest.notices == []
