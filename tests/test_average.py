"""The running mean is the weighted mean; its bits do not depend on the order of the models."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedda.maths.average import RunningMean
from fedda.wire.packing import Arrays


def some_models(count: int, seed: int = 0, scale: float = 1.0) -> list[Arrays]:
    rng = np.random.default_rng(seed)
    return [
        {
            "w": (scale * rng.normal(size=(3, 4))).astype(np.float32),
            "tiny": (1e-6 * rng.normal(size=5)).astype(np.float32),
            "wide": scale * rng.normal(size=8),  # float64 shows bits that float32 would hide
            "half": rng.normal(size=2).astype(np.float16),
            "n": np.array(rng.integers(100)),
        }
        for _ in range(count)
    ]


def mean(models: list[Arrays], weights: list[float]) -> Arrays:
    running = RunningMean(models[0])
    for model, weight in zip(models, weights, strict=True):
        running.add(model, weight)
    return running.result()


def naive(values: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """Compute the mean one number at a time."""
    flat = [[float(x) for x in v.ravel()] for v in values]
    total = math.fsum(weights)
    return np.array(
        [
            math.fsum(w * v[i] for w, v in zip(weights, flat, strict=True)) / total
            for i in range(len(flat[0]))
        ]
    ).reshape(values[0].shape)


def bits(model: Arrays) -> dict[str, tuple[bytes, np.dtype]]:
    return {name: (a.tobytes(), a.dtype) for name, a in model.items()}


def test_a_mean_by_hand() -> None:
    models = [{"w": np.array([0, 4], np.float32)}, {"w": np.array([8, 4], np.float32)}]
    np.testing.assert_array_equal(mean(models, [0.75, 0.25])["w"], np.array([2, 4], np.float32))
    np.testing.assert_array_equal(mean(models, [0.3, 0.3])["w"], np.array([4, 4], np.float32))


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.integers(0, 99))
def test_it_matches_the_naive_mean(weights: list[float], seed: int) -> None:
    models = some_models(len(weights), seed)
    found = mean(models, weights)
    for name in ("w", "tiny", "wide", "half"):
        wanted = naive([m[name] for m in models], weights)
        assert found[name].dtype == models[0][name].dtype
        grid = len(weights) * 2.0**-42 / math.fsum(weights)  # the models' values are below 4
        rounding = np.abs(wanted) * np.finfo(found[name].dtype).eps + grid
        assert (np.abs(found[name] - wanted) <= rounding).all()


@given(st.permutations(range(7)), st.integers(0, 30), st.sampled_from([1e-3, 1.0, 37.0, 1e4]))
@example([6, 5, 4, 3, 2, 1, 0], 0, 1.0)
def test_any_order_gives_the_same_bits(order: list[int], seed: int, scale: float) -> None:
    models = some_models(7, seed, scale)
    weights = np.random.default_rng(seed).dirichlet(np.ones(7)).tolist()
    like = models[0]

    def add_in(order: list[int]) -> Arrays:
        running = RunningMean(like)
        for k in order:
            running.add(models[k], weights[k])
        return running.result()

    assert bits(add_in(order)) == bits(add_in(list(range(7))))


def test_the_weights_of_the_sites_that_took_part_sum_to_one() -> None:
    """Two of three sites took part: their shares of 1/4 and 1/2 become 1/3 and 2/3."""
    models = [{"w": np.array([3], np.float32)}, {"w": np.array([6], np.float32)}]
    assert mean(models, [0.25, 0.5])["w"] == np.float32(5)


def test_the_mean_of_counters_is_the_largest_one() -> None:
    models = [{"n": np.array(k), "w": np.ones(1, np.float32)} for k in (3, 9, 5)]
    found = mean(models, [0.2, 0.2, 0.6])["n"]
    assert found == 9 and found.dtype == np.int64 and found.shape == ()


def test_the_mean_of_equal_models_is_that_model() -> None:
    model = some_models(1, scale=5)[0]
    assert bits({"w": mean([model] * 3, [0.2, 0.5, 0.3])["w"]}) == bits({"w": model["w"]})


def test_a_mean_without_any_weight_is_refused() -> None:
    running = RunningMean(some_models(1)[0])
    with pytest.raises(ValueError, match="no model with a positive weight"):
        running.result()


def test_memory_does_not_grow_with_the_models() -> None:
    like = {"w": np.zeros(100_000, np.float32)}
    tracemalloc.start()
    running = RunningMean(like)
    for k in range(20):
        running.add({"w": np.full(100_000, k, np.float32)}, 0.05)
    assert running.result()["w"][0] == np.float32(9.5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.5 * 800_000  # sum, one term and one arriving model in float64
