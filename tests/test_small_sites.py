"""A site with fewer examples than a gradient must be summed over takes part without gradients."""

import numpy as np
import pytest
import torch
from torch import optim
from torch.nn import functional as F

from fedda import models
from fedda.errors import ConfigError
from fedda.train import seed_for
from tests.adversarial_runs import images
from tests.local_grid import EXAMPLES, SIDE, Bench, Node, sent_by
from tests.reference import windows

pytestmark = pytest.mark.usefixtures("fresh_sites")

FLOOR = {"exchange__min_examples": 45, "exchange__p": 3}  # anna has 40 images, the others 48 to 60
LR = 0.02


@pytest.mark.parametrize("method", ["fdann", "fwdgrl", "fdan", "mdan"])
def test_a_small_source_trains_on_its_labels_and_sums_nothing(
    domains: list[Node], method: str
) -> None:
    bench = Bench(domains, method, **FLOOR, train__lr=LR, train__schedule="constant")
    start = {name: array.copy() for name, array in bench.model.items()}
    bench.round()
    assert [(what, site) for what, site, _ in bench.notices] == [("small", "anna")]
    assert "40 examples, but a gradient is summed over 45" in bench.notices[0][2]
    for request in bench.opened:
        name = bench.roster.by_id(request.metadata.dst_node_id).name  # type: ignore[union-attr]
        assert ("exchange" in request.content) == (name != "anna")
    assert set(bench.strategy.weights) == set(EXAMPLES)
    assert bench.strategy.weights["anna"] == pytest.approx(40 / 198)
    assert sum(bench.strategy.weights.values()) == pytest.approx(1.0)
    # The same in a plain loop: six steps of sgd over windows of one batch each.
    network = models.build(bench.task.model, (1, SIDE, SIDE), bench.task.classes, seed=0)
    network.load_state_dict({n: torch.tensor(a) for n, a in start.items()})
    x, y = images(next(node for node in domains if node["name"] == "anna"))
    assert y is not None
    optimizer = optim.SGD(network.parameters(), lr=LR, momentum=0.9)
    parts = windows.batches(windows.blocks(40, "anna", 2), 16, 1, seed_for(0, "anna"), 6)
    # carl's 60 images are 4 batches, and a round is a whole number of windows of 3 steps
    for part in parts:
        loss = F.cross_entropy(network.train()(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = sent_by(bench, "anna")
    for name, value in network.state_dict().items():
        torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-4, atol=1e-6)


def test_the_sites_that_sum_are_as_many_as_without_the_small_one(domains: list[Node]) -> None:
    """Each of two sources has half of the sources' side: anna is not counted."""
    bench = Bench(domains, "fdann", **FLOOR)
    bench.begin()
    assert bench.strategy.session is not None
    invited = bench.strategy.session.invitations
    assert set(invited) == {"bert", "carl", "town"}
    assert {len(group.members) for i in invited.values() for group in i.groups} == {3}


@pytest.mark.parametrize(
    ("floor", "names"), [(49, "town .target. has 48"), (61, "anna .* bert .* carl .* town")]
)
def test_a_small_target_or_only_small_sources_end_the_run_with_the_reason(
    domains: list[Node], floor: int, names: str
) -> None:
    bench = Bench(domains, "fdann", exchange__min_examples=floor, exchange__p=4)
    with pytest.raises(ConfigError, match=f"{names}.*exchange.min-examples.*kd3a or adabn"):
        bench.begin()


def test_later_rounds_do_not_repeat_the_event(domains: list[Node]) -> None:
    bench = Bench(domains, "fdann", **FLOOR)
    for server_round in (1, 2):
        model, _ = bench.round(server_round)
        assert all(np.isfinite(array).all() for array in model.values())
    assert len(bench.notices) == 1
