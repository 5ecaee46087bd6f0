"""f-WDGRL over four sites: a critic with extra steps estimates a Wasserstein distance."""

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


@cases((3, False))
def test_four_sites_compute_the_same_as_one_plain_loop(
    domains: list[Node], tmp_path: Path, p: int, pairs: bool
) -> None:
    assert_as_in_one_place(domains, tmp_path, "fwdgrl", p, pairs)


def test_models_and_gradients_cross_and_are_counted(domains: list[Node], tmp_path: Path) -> None:
    """There are twice f-DANN's sums: the critic makes one extra step per step of the encoders."""
    floats = discriminators.count(WIDTH, (8,))
    training = run(domains, tmp_path, "fwdgrl")
    assert_declared_arrays_cross(
        training, "fwdgrl", sums=4, floats=floats, numbers={"discriminator-loss"}
    )
