"""What every strategy does: refuse harmful models, run in Flower's loop, and need its target."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedda import wire
from fedda.config import GuardConfig
from fedda.errors import NotFiniteError, QuorumError, WireError
from fedda.wire import Arrays, Kind
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
    layout = wire.pack(sent, Kind.MODEL).manifest
    checks = Checks(GuardConfig(max_change=5.0), layout)
    checks.begin(wire.pack(sent, Kind.MODEL))
    node = roster.Node(1, "source", "anna", 10, 0, ("a", "b"), (4,), "")
    for step, refused in ((0.99, False), (-0.99, False), (1.01, True)):
        moved = wire.pack({"head.weight": sent["head.weight"] + np.float32(step)}, Kind.MODEL)
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
