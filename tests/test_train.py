"""Which images a round uses, in which batches, at what rate."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedda.config import TrainConfig
from fedda.train import batches, generator, joined, learning_rate, round_images, seed_for, windows
from tests.reference import windows as twin


def in_blocks(n: int, size: int) -> list[torch.Tensor]:
    """Divide n images into blocks of `size` or one more, at random."""
    order = torch.randperm(n, generator=generator("blocks", n))
    return list(order.tensor_split(max(n // size, 1)))


@pytest.mark.parametrize("n", [1, 2, 7, 60, 101])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("r", [0.2, 0.5, 0.3, 1, 1.5, 3, 100])
def test_the_rounds_read_every_epoch_exactly_once(n: int, size: int, r: float) -> None:
    epochs, blocks = 15, in_blocks(n, size)
    read = [i for t in range(1, round(epochs * r) + 1) for i in round_images(blocks, t, r, seed=5)]
    images = torch.cat(read)
    whole = len(images) // n
    assert whole >= math.floor(round(epochs * r) / r + 1e-9)
    for epoch in range(whole):
        part = images[epoch * n : (epoch + 1) * n]
        assert part.sort().values.tolist() == list(range(n))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 9), st.floats(0.3, 9))
def test_every_share_of_a_round_consists_of_whole_blocks(
    n: int, size: int, seed: int, r: float
) -> None:
    blocks = in_blocks(n, size)
    for server_round in range(1, 6):
        for share in round_images(blocks, server_round, r, seed):
            chosen = set(share.tolist())
            assert len(chosen) == len(share)
            assert all(set(b.tolist()) <= chosen or not set(b.tolist()) & chosen for b in blocks)


def test_a_round_by_hand() -> None:
    def sizes(r: float, *rounds: int) -> list[list[int]]:
        blocks = [torch.tensor([2 * k, 2 * k + 1]) for k in range(10)]
        return [[len(s) for s in round_images(blocks, t, r, seed=0)] for t in rounds]

    assert sizes(0.5, 1, 2) == [[20, 20], [20, 20]]
    assert sizes(3, 1, 2, 3) == [[6], [6], [8]]
    assert sizes(1.5, 1, 2, 3) == [[12], [8, 6], [14]]


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(2, 9))
def test_no_batch_has_one_image_and_none_is_lost(sizes: list[int], batch_size: int) -> None:
    shares = [torch.arange(n) for n in sizes]
    found = list(batches(shares, batch_size))
    assert all(2 <= len(batch) <= batch_size + 1 for batch in found)
    wanted = [i for n in sizes if n != 1 for i in range(n)]
    assert [i for batch in found for i in batch.tolist()] == wanted


@given(st.lists(st.integers(0, 9), min_size=5, max_size=60), st.integers(2, 9), st.integers(2, 5))
def test_every_batch_has_enough_different_images(images: list[int], size: int, least: int) -> None:
    found = list(batches([torch.tensor(images)], size, least))
    assert torch.cat(found).tolist() == images
    assert len(found) == 1 or all(len({*batch.tolist()}) >= least for batch in found)


def test_batches_by_hand() -> None:
    """A last one of two joins; the image 7, which comes four times, is one image."""
    share = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 9, 10])
    assert [len(b) for b in batches([share], 4, least=3)] == [4, 6]
    assert [len(b) for b in batches([share], 4, least=2)] == [4, 4, 2]
    repeated = torch.tensor([7, 7, 7, 7, 0, 1, 2, 3])
    assert [b.tolist() for b in batches([repeated], 4, least=4)] == [repeated.tolist()]


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


@given(
    st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 20)
)
def test_windows_repeat_no_image_and_are_equal_or_disjoint(
    n: int, block: int, size: int, p: int, first: int
) -> None:
    blocks = in_blocks(n, block)
    found = [b.tolist() for b in windows(blocks, size, p, seed=3, first=0, count=9 * p)]
    assert found == twin.batches([b.tolist() for b in blocks], size, p, 3, 9 * p)
    seen: list[set[int]] = []
    for start in range(0, 9 * p, p):
        window = [i for part in found[start : start + p] for i in part]
        assert len(set(window)) == len(window) >= min(n, p * size)
        assert all(set(window) == other or not set(window) & other for other in seen)
        assert all(
            set(b.tolist()) <= set(window) or not set(b.tolist()) & set(window) for b in blocks
        )
        seen.append(set(window))
    assert set().union(*seen) == set(range(n)) or n // (p * size) > 9
    first = min(first, 9 * p)
    rest = windows(blocks, size, p, seed=3, first=first, count=9 * p - first)
    assert [part.tolist() for part in rest] == found[first:]


def test_windows_by_hand() -> None:
    """Five blocks of two images, two batches of two to a window: windows of six and of four."""
    blocks = [torch.tensor([2 * k, 2 * k + 1]) for k in range(5)]
    read = [list(windows(blocks, 2, 2, 0, 2 * k, 2)) for k in range(20)]
    sets = [frozenset(torch.cat(window).tolist()) for window in read]
    assert set(sets) == {frozenset(range(6)), frozenset(range(6, 10))}
    assert all([len(part) for part in window] in ([3, 3], [2, 2]) for window in read)
    assert all(a != b for a, b in zip(sets[::2], sets[1::2], strict=True))  # an epoch has both
    assert len({tuple(torch.cat(window).tolist()) for window in read}) > 10  # in many orders


def test_windows_of_any_seed_and_size_consist_of_whole_blocks() -> None:
    """The server chooses both, and can combine the sums of all windows that it ever gets."""
    blocks = [set(b.tolist()) for b in in_blocks(90, 8)]
    for seed in range(20):
        for size, p in ((8, 1), (9, 2), (16, 1), (30, 2)):
            window = set(torch.cat([*windows(in_blocks(90, 8), size, p, seed, 0, p)]).tolist())
            assert window == set().union(*(b for b in blocks if b <= window))


def test_joined_blocks_by_hand() -> None:
    blocks = [torch.full((n,), n) for n in (3, 4, 5, 2)]
    assert [len(s) for s in joined(blocks, 3)] == [7, 7]  # three sets would be 7, 5 and 2
    assert [len(s) for s in joined(blocks, 2)] == [3, 4, 5, 2]
    assert [len(s) for s in joined(blocks, 20)] == [14]
    assert joined([], 3) == []


@pytest.mark.parametrize(
    ("images", "r", "steps", "passes"),
    [
        (1000, 1.0, 0, 1),  # off
        (1000, 1.0, 10, 1),  # a pass has ten steps already
        (1000, 1.0, 25, 2.5),
        (100, 1.0, 5, 5),
        (100, 1.0, 50, 10),  # ten at most
        (50, 1.0, 1000, 10),
        (100, 0.05, 50, 20),  # as asked for
        (1000, 4.0, 5, 0.5),  # a round that is shorter than a pass
    ],
)
def test_few_images_are_passed_over_more_often(
    images: int, r: float, steps: int, passes: float
) -> None:
    config = TrainConfig(batch_size=100, rounds_per_epoch=r, steps=steps)
    assert 1 / config.rounds_per_epoch_of(images) == pytest.approx(passes)
    assert config.steps_of(images) == max(1, math.ceil(images * passes / 100))
    blocks = list(torch.arange(images).tensor_split(max(images // 10, 1)))
    taken = [
        sum(map(len, round_images(blocks, t, config.rounds_per_epoch_of(images), 0)))
        for t in (1, 2)
    ]
    assert sum(taken) == pytest.approx(2 * images * passes, abs=10)
