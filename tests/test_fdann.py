"""f-DANN over four sites: the encoders reverse the discriminator's gradient."""

from pathlib import Path

from fedda.adversarial import discriminators
from tests.adversarial_runs import (
    WIDTH,
    assert_as_in_one_place,
    assert_declared_arrays_cross,
    cases,
    run,
)
from tests.local_grid import Node


@cases((1, True), (3, False))
def test_four_sites_compute_the_same_as_one_plain_loop(
    domains: list[Node], tmp_path: Path, p: int, pairs: bool
) -> None:
    assert_as_in_one_place(domains, tmp_path, "fdann", p, pairs)


def test_models_and_gradients_cross_and_are_counted(domains: list[Node], tmp_path: Path) -> None:
    floats = discriminators.count(WIDTH, (8,))
    numbers = {"discriminator-loss", "discriminator-accuracy"}
    training = run(domains, tmp_path, "fdann")
    assert_declared_arrays_cross(training, "fdann", sums=2, floats=floats, numbers=numbers)


def test_a_run_with_one_window_per_round_and_overlap_completes(
    domains: list[Node], tmp_path: Path
) -> None:
    settings = {"exchange.overlap": True, "exchange.p": 4}
    found = run(domains, tmp_path, "fdann", **settings)
    assert len(found["rounds"]) == 2
