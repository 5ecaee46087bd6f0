"""Which images a round uses, in which batches, at what rate."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedda.config import TrainConfig
from fedda.train import batches, generator, learning_rate, round_images, seed_for, windows
from tests.reference import windows as twin


@pytest.mark.parametrize("n", [1, 2, 7, 60, 101])
@pytest.mark.parametrize("r", [0.2, 0.5, 0.3, 1, 1.5, 3, 100])
def test_the_rounds_read_every_epoch_exactly_once(n: int, r: float) -> None:
    epochs = 15
    read = [i for t in range(1, round(epochs * r) + 1) for i in round_images(n, t, r, seed=5)]
    images = torch.cat(read)
    whole = len(images) // n
    assert whole >= math.floor(round(epochs * r) / r + 1e-9)
    for epoch in range(whole):
        part = images[epoch * n : (epoch + 1) * n]
        assert part.sort().values.tolist() == list(range(n))


def test_a_round_by_hand() -> None:
    shares = [[len(s) for s in round_images(10, t, 0.5, seed=0)] for t in (1, 2)]
    assert shares == [[10, 10], [10, 10]]
    assert [[len(s) for s in round_images(10, t, 3, seed=0)] for t in (1, 2, 3)] == [[3], [3], [4]]
    assert [[len(s) for s in round_images(10, t, 1.5, 0)] for t in (1, 2, 3)] == [[6], [4, 3], [7]]


def test_epochs_are_shuffled_anew_and_repeatably() -> None:
    first, second = (torch.cat(round_images(60, t, 1, seed=1)).tolist() for t in (1, 2))
    assert first != second != sorted(second)
    assert torch.cat(round_images(60, 1, 1, seed=1)).tolist() == first
    assert torch.cat(round_images(60, 1, 1, seed=2)).tolist() != first
    thirds = [torch.cat(round_images(60, t, 3, seed=1)).tolist() for t in (1, 2, 3)]
    assert [i for third in thirds for i in third] == first  # the same epoch, in parts


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(2, 9))
def test_no_batch_has_one_image_and_none_is_lost(sizes: list[int], batch_size: int) -> None:
    shares = [torch.arange(n) for n in sizes]
    found = list(batches(shares, batch_size))
    assert all(2 <= len(batch) <= batch_size + 1 for batch in found)
    wanted = [i for n in sizes if n != 1 for i in range(n)]
    assert [i for batch in found for i in batch.tolist()] == wanted


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rates_go_from_the_first_to_the_last(schedule: str) -> None:
    config = TrainConfig.model_validate({"lr": 0.5, "lr-end": 0.1, "schedule": schedule})
    rates = [learning_rate(config, t, 11) for t in range(1, 12)]
    assert rates[0] == pytest.approx(0.5)
    assert rates[5] == pytest.approx(0.3)  # half-way in both
    assert rates[-1] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(config, 1, 1) == pytest.approx(0.5)


def test_schedules_by_hand() -> None:
    def at(schedule: str) -> float:
        config = TrainConfig.model_validate({"lr": 1.0, "lr-end": 0.0, "schedule": schedule})
        return learning_rate(config, 2, 4)  # a third of the way

    assert at("linear") == pytest.approx(2 / 3)
    assert at("cosine") == pytest.approx(0.75)  # (1 + cos 60 degrees) / 2
    assert at("constant") == pytest.approx(1.0)


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    assert seed_for(0, "anna", 3) == 3032110860137509364
    assert len({seed_for(*p) for p in [(0, "a"), (0, "b"), (1, "a"), ("0a",), (0, "a", "")]}) == 5
    assert 0 <= seed_for("x") < 2**63
    draws = [torch.rand(3, generator=generator(0, "a")).tolist() for _ in range(2)]
    assert draws[0] == draws[1]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.integers(0, 20))
def test_windows_repeat_no_image_and_are_equal_or_disjoint(
    n: int, size: int, p: int, first: int
) -> None:
    found = [part.tolist() for part in windows(n, size, p, seed=3, first=0, count=9 * p)]
    assert found == twin.batches(n, size, p, 3, 9 * p)
    assert all(size <= len(part) < 2 * size + 1 for part in found)
    seen: list[list[int]] = []
    for start in range(0, 9 * p, p):
        window = sorted(i for part in found[start : start + p] for i in part)
        assert len(set(window)) == min(n, len(window))
        assert all(window == other or not set(window) & set(other) for other in seen)
        seen.append(window)
    assert set().union(*seen) == set(range(n)) or n // (p * size) > 9
    first = min(first, 9 * p)
    rest = windows(n, size, p, seed=3, first=first, count=9 * p - first)
    assert [part.tolist() for part in rest] == found[first:]


def test_windows_by_hand() -> None:
    """Ten images, two batches of two to a window: windows of five, batches of three and two."""
    read = [list(windows(10, 2, 2, 0, 2 * k, 2)) for k in range(20)]
    assert all([len(part) for part in window] == [3, 2] for window in read)
    sets = [frozenset(torch.cat(window).tolist()) for window in read]
    assert len(set(sets)) == 2 and sets[0] | sets[1] == set(range(10))
    assert all(a != b for a, b in zip(sets[::2], sets[1::2], strict=True))  # an epoch has both
    assert len({tuple(torch.cat(window).tolist()) for window in read}) > 10  # in many orders
