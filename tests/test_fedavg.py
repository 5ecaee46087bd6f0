"""FedAvg: the mean of the sources' models by their numbers of examples, and nothing else."""

import numpy as np
import pytest
from flwr.app import Message

from fedda.wire.packing import Arrays
from tests.local_grid import Bench, Node, assert_mean_of_sources, changed


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_round_gives_the_mean_weighted_by_the_rosters_counts(
    domains: list[Node], method: str, weighting: str
) -> None:
    chosen = {f"{method}__weighting": weighting}
    assert_mean_of_sources(Bench(domains, method, **chosen), weighting)


def test_numbers_in_a_reply_change_no_weight(domains: list[Node]) -> None:
    def boast(request: Message, reply: Message) -> list[Message]:
        return [changed(request, reply, numbers={"steps": 10**9, "seconds": 1e9})]

    honest, boasting = Bench(domains, "fedavg"), Bench(domains, "fedavg", {"anna": boast})
    wanted, found = honest.round()[0], boasting.round()[0]
    assert boasting.strategy.weights == honest.strategy.weights
    assert all(np.array_equal(found[n], wanted[n]) for n in wanted)


def test_the_order_of_replies_changes_no_bit(domains: list[Node]) -> None:
    def round_in(order: int) -> Arrays:
        bench = Bench(domains, "fedavg")
        replies = [bench.grid.call(request) for request in bench.begin()]
        arrays, _ = bench.strategy.aggregate_train(1, replies[::order])
        return bench.unpack(arrays)

    forwards, backwards = round_in(1), round_in(-1)
    assert all(forwards[n].tobytes() == backwards[n].tobytes() for n in forwards)


def test_the_weights_of_the_remaining_sites_sum_to_one(domains: list[Node]) -> None:
    bench = Bench(domains, "fedavg")
    bench.grid.offline = {"bert"}
    bench.round()
    assert bench.strategy.weights == pytest.approx({"anna": 0.4, "carl": 0.6})
    assert ("absent", "bert") in [n[:2] for n in bench.notices]


def test_a_round_too_small_for_a_sites_images_is_refused(domains: list[Node]) -> None:
    bench = Bench(domains, "fedavg", train__rounds_per_epoch=25)  # anna has 40 images
    bench.round()
    assert [(what, site) for what, site, _ in bench.notices] == [("failed", "anna")]
    assert "refused the run's settings" in bench.notices[0][2]
