"""What every strategy does: refuse harmful models, run in Flower's loop, and need its target."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import EvaluateIns, FitIns, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import (
    evaluateins_to_recorddict,
    fitins_to_recorddict,
    recorddict_to_evaluateres,
    recorddict_to_fitres,
)

from clients.numpy_client import NumPySite, client_fn, flat, unflat
from clients.site.memory import resident
from fedda import records
from fedda.config import GuardConfig
from fedda.errors import ConfigError, NotFiniteError, QuorumError, WireError
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind
from server.simulation import LocalGrid
from strategies.sites import roster
from strategies.sites.replies import Checks
from tests.local_grid import Bench, Node, reshaped

# ---- what the server's guards refuse -----------------------------------------------------------


def scaled(by: float) -> Any:
    def change(model: Arrays) -> Arrays:
        weights = [n for n in model if n.endswith(("weight", "bias"))]
        return model | {n: model[n] * by for n in weights}

    return reshaped(change)


def spoiled(name: str, value: float) -> Any:
    def change(model: Arrays) -> Arrays:
        entry = next(n for n in model if n.endswith(name))
        model[entry].flat[0] = value
        return model

    return reshaped(change)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (scaled(-10), "norms away"),
        (scaled(1e30), "norms away"),
        (spoiled("weight", float("nan")), "not finite"),
        (spoiled("weight", float("inf")), "not finite"),
        (spoiled("running_var", -0.5), "negative variance"),
    ],
)
def test_a_harmful_model_is_refused_and_the_round_goes_on(
    domains: list[Node], script: Any, message: str
) -> None:
    bench = Bench(domains, "fedavg", {"carl": script})
    model, _ = bench.round()
    assert [(what, site) for what, site, _ in bench.notices] == [("refused", "carl")]
    assert message in bench.notices[0][2]
    assert bench.strategy.weights == pytest.approx({"anna": 4 / 9, "bert": 5 / 9})
    assert all(np.isfinite(a).all() for a in model.values())


def test_the_bound_on_change_can_be_set(domains: list[Node]) -> None:
    for bound, refused in ((0.0, False), (120.0, False), (10.0, True)):
        bench = Bench(domains, "fedavg", {"carl": scaled(-100)}, guard__max_change=bound)
        bench.round()
        assert ("carl" not in bench.strategy.weights) is refused


def test_a_small_new_head_may_grow() -> None:
    """By hand: 8 weights of 0.01; the bound 5 lets them change by 5 * 0.2 in the mean square."""
    sent = {"head.weight": np.full((2, 4), 0.01, np.float32)}
    layout = packing.pack(sent, Kind.MODEL).manifest
    checks = Checks(GuardConfig(max_change=5.0), layout)
    checks.begin(packing.pack(sent, Kind.MODEL))
    node = roster.Node(1, "source", "anna", 10, 0, ("a", "b"), (4,), "")
    for step, refused in ((0.99, False), (-0.99, False), (1.01, True)):
        moved = packing.pack({"head.weight": sent["head.weight"] + np.float32(step)}, Kind.MODEL)
        with pytest.raises(WireError, match=r"5\.[01] norms") if refused else nullcontext():
            checks._bounds.check(node.name, "model", moved.unpack())


# ---- Flower's own loop -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "kd3a"])
def test_flowers_own_start_runs_the_same_strategy(domains: list[Node], method: str) -> None:
    ours = Bench(domains, method)
    for server_round in (1, 2):
        ours.round(server_round)
    bench = Bench(domains, method)
    grid: LocalGrid = bench.grid
    sent: ArrayRecord = bench.strategy.packed(bench.model)
    result = bench.strategy.start(grid, sent, num_rounds=2)
    model = bench.unpack(result.arrays)
    assert all(np.array_equal(model[n], ours.model[n]) for n in model)
    assert len(result.train_metrics_clientapp) == len(result.evaluate_metrics_clientapp) == 2
    assert result.evaluate_metrics_clientapp[2]["tested"] == 24


def numpy_client(message: Message, node: Node) -> Message:
    """Answer a message by Flower's own `client_fn`, whose messages hold arrays and one table."""
    context = Context(1, message.metadata.dst_node_id, node, RecordDict(), {})
    app = ClientApp(client_fn=client_fn)
    arrays, tables = records.read(message.content)
    parameters, config = flat(arrays, tables)
    sent = ndarrays_to_parameters(parameters)
    trains = message.metadata.message_type == "train"
    ins = FitIns(sent, config) if trains else EvaluateIns(sent, config)
    content = (fitins_to_recorddict if trains else evaluateins_to_recorddict)(ins, True)  # type: ignore[operator]
    asked = Message(content, message.metadata.dst_node_id, message.metadata.message_type)
    came = app(message=asked, context=context).content
    result = recorddict_to_fitres(came, True) if trains else recorddict_to_evaluateres(came)
    assert result.status.code.name == "OK" and result.num_examples
    numbers = dict(result.metrics)
    left = parameters_to_ndarrays(result.parameters) if isinstance(result, FitRes) else []
    packed = unflat(left, numbers)
    return Message(records.write(packed, metrics=numbers), reply_to=message)


@pytest.mark.parametrize("method", ["fedavg", "kd3a"])
def test_flowers_own_client_app_runs_the_same_clients(domains: list[Node], method: str) -> None:
    """Flower's `ClientApp(client_fn)` and `Strategy.start`, to the bits of our own loop."""
    ours = Bench(domains, method)
    for server_round in (1, 2):
        ours.round(server_round)
    resident.cache_clear()
    bench = Bench(domains, method)
    grid: LocalGrid = bench.grid
    nodes = bench.grid.nodes
    grid.app = lambda message, context: numpy_client(message, nodes[message.metadata.dst_node_id])  # type: ignore
    result = bench.strategy.start(grid, bench.strategy.packed(bench.model), num_rounds=2)
    model = bench.unpack(result.arrays)
    assert all(np.array_equal(model[n], ours.model[n]) for n in model)
    assert result.evaluate_metrics_clientapp[2]["tested"] == 24


def test_a_numpy_client_checks_what_comes(domains: list[Node]) -> None:
    """Whatever part of Flower calls it, the contract holds."""
    bench = Bench(domains, "fedavg")
    message = bench.begin()[0]
    arrays, tables = records.read(message.content)
    node = bench.grid.nodes[message.metadata.dst_node_id]
    site = NumPySite(resident(tuple(sorted(node.items()))))
    parameters, config = flat(arrays, tables)
    assert site.fit(parameters, config)[1] == 40
    assert site.get_properties({})["name"] == "anna"
    with pytest.raises(WireError, match="no number 'pixel'"):
        site.fit(parameters, config | {"step.pixel": 1.0})
    with pytest.raises(WireError, match="asks no Client for"):
        site.fit(parameters, config | {"step.part": "Client"})
    with pytest.raises(WireError, match="'train', not for a test"):
        site.evaluate(parameters, config)
    with pytest.raises(WireError, match="do not fit the layouts"):
        site.fit(parameters * 2, config)
    with pytest.raises(ConfigError, match="no method 'nosuch'"):
        site.fit(parameters, config | {"task.method": "nosuch"})


def test_a_model_too_large_for_the_wire_is_an_error_that_names_the_setting(
    domains: list[Node],
) -> None:
    bench = Bench(domains, "fedavg", wire__dtype="float16")
    name = next(n for n in bench.model if n.endswith("running_var"))
    bench.model[name][0] = 1e5
    with pytest.raises(NotFiniteError, match=r"wire.dtype is float16, .* 65504.0; set it to flo"):
        bench.begin()


def test_no_source_trains_for_a_target_that_is_away(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    bench.grid.offline = {"town"}
    with pytest.raises(QuorumError, match=r"town \(target\) is not connected"):
        bench.begin()
    bench = Bench(domains, "fedavg")  # whose target does not train
    bench.grid.offline = {"town"}
    assert len(bench.begin()) == 3
