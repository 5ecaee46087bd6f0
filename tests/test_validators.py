"""Validators and estimates of accuracy: against naive twins, and by hand."""

import math

import pytest
import torch
from torch import Tensor

from fedda.maths import estimates, validators
from fedda.train import generator
from tests.reference import validators as twin

SEEDS = range(5)


def drawn(seed: int, N: int = 40, C: int = 4) -> Tensor:
    return (3 * torch.randn(N, C, generator=generator("validators", seed, N, C))).softmax(dim=1)


def one_hot(labels: list[int], C: int = 3) -> Tensor:
    return torch.eye(C)[labels]


# ---- validators --------------------------------------------------------------------------------


def test_sure_and_balanced_predictions_have_the_best_values() -> None:
    p = one_hot([0, 1, 2] * 4)
    assert validators.infomax(p) == pytest.approx(math.log(3), abs=1e-5)
    assert validators.bnm(p) == pytest.approx(1)
    assert validators.largest(p) == pytest.approx(1 / 3)
    assert validators.bnm(p[:2]) == pytest.approx(1)  # fewer images than classes
    # Each image has three others just like it: the entropy is ln 3 of ln 11.
    assert validators.snd(p) == pytest.approx(math.log(3) / math.log(11), abs=1e-4)


def test_one_class_for_all_is_worth_little() -> None:
    """BNM is 1/sqrt(C) then. SND alone is deceived: all images are one dense neighbourhood."""
    p = one_hot([1] * 12)
    assert validators.infomax(p) == pytest.approx(0, abs=1e-5)
    assert validators.bnm(p) == pytest.approx(1 / math.sqrt(3))
    assert validators.ami(torch.randn(12, 2), p, seed=0) == 0
    assert validators.largest(p) == 1
    assert validators.snd(p) == pytest.approx(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_validators_equal_their_twins(seed: int) -> None:
    p = drawn(seed)
    rows = p.double().tolist()
    assert validators.infomax(p) == pytest.approx(twin.infomax(rows), abs=1e-5)
    assert validators.bnm(p) == pytest.approx(twin.bnm(rows), abs=1e-6)
    assert validators.snd(p) == pytest.approx(twin.snd(rows, 0.05), abs=1e-5)


def test_ami_is_1_where_clusters_are_the_predictions() -> None:
    labels = [0, 1, 2] * 5
    z = 10 * one_hot(labels) + 0.01 * torch.randn(15, 3, generator=generator("z"))
    assert validators.ami(z, one_hot(labels), seed=1) == pytest.approx(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_ami_equals_its_twin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p, found = drawn(seed), torch.randint(4, (40,), generator=generator("clusters", seed))
    monkeypatch.setattr("fedda.maths.gap.clusters", lambda z, C, seed: found)
    label = p.argmax(dim=1).tolist()
    expected = twin.ami(label, found.tolist())
    assert validators.ami(torch.zeros(40, 1), p, seed=0) == pytest.approx(expected, abs=1e-9)


def test_a_subset_is_bounded_and_the_same_for_the_same_generator() -> None:
    assert validators.subset(5, generator("a"), most=10).tolist() == [0, 1, 2, 3, 4]
    first = validators.subset(100, generator("a"), most=10)
    assert len(first.unique()) == 10 and first.tolist() == sorted(first.tolist())
    assert torch.equal(first, validators.subset(100, generator("a"), most=10))


# ---- the estimate ------------------------------------------------------------------------------


def test_threshold_by_hand() -> None:
    score = torch.tensor([4.0, 1.0, 3.0, 2.0])
    assert estimates.threshold(score, 0.25) == 1.5
    assert estimates.threshold(score, 0.5) == 2.5
    assert estimates.threshold(score, 0.0) < 1
    assert estimates.threshold(score, 1.0) > 4
    assert estimates.above(score, 2.0) == 0.75


@pytest.mark.parametrize("kind", ["confidence", "entropy"])
@pytest.mark.parametrize("seed", SEEDS)
def test_atc_equals_its_twin_on_the_plain_scores(seed: int, kind: str) -> None:
    """The logarithms change no order, so they change no estimate beyond one image at the edge."""
    source, target = drawn(seed), drawn(seed + 100, N=60)
    y = torch.randint(4, (40,), generator=generator("y", seed))
    wrong = float((source.argmax(dim=1) != y).double().mean())
    t = estimates.threshold(estimates.scores(source)[kind], wrong)
    ours = estimates.above(estimates.scores(target)[kind], t)
    theirs = twin.atc(source.double().tolist(), y.tolist(), target.double().tolist(), kind)
    assert ours == pytest.approx(theirs, abs=1.01 / 60)


@pytest.mark.parametrize("kind", ["confidence", "entropy"])
def test_on_its_own_images_atc_is_the_accuracy(kind: str) -> None:
    p, y = drawn(7), torch.randint(4, (40,), generator=generator("own"))
    accuracy = float((p.argmax(dim=1) == y).double().mean())
    score = estimates.scores(p)[kind]
    assert estimates.above(score, estimates.threshold(score, 1 - accuracy)) == accuracy


def test_scores_tell_predictions_apart_that_are_all_nearly_sure() -> None:
    sure = torch.tensor([[1 - 1e-4, 1e-4], [1 - 1e-5, 1e-5], [1.0, 0.0]])
    even = torch.tensor([[0.5, 0.5], [0.501, 0.499], [0.51, 0.49]])
    for p in (sure, even):
        for score in estimates.scores(p).values():
            assert score[1] - score[0] > 1 and score[2] - score[1] > 1


def test_doc_by_hand() -> None:
    assert estimates.doc(0.9, there=0.95, here=0.75) == pytest.approx(0.7)
    assert estimates.doc(0.1, there=0.9, here=0.2) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_ece_equals_its_twin(seed: int) -> None:
    p, y = drawn(seed).double(), torch.randint(4, (40,), generator=generator("y", seed))
    assert estimates.ece(p, y) == pytest.approx(twin.ece(p.tolist(), y.tolist(), 15), abs=1e-9)


def test_ece_by_hand() -> None:
    """Sure to 0.8, and right in half of the cases."""
    p = torch.tensor([[0.8, 0.2]] * 4)
    assert estimates.ece(p, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.3)


def test_an_estimate_by_hand() -> None:
    """Two sites; the one with three times the examples counts three times."""
    sites = [
        estimates.Calibration(300, 0.9, 0.9, {"confidence": 0.8, "entropy": 0.7}),
        estimates.Calibration(100, 0.8, 0.9, {"confidence": 0.6, "entropy": 0.5}),
    ]
    found = estimates.estimate(sites, here=0.7, images=100)
    assert found.parts == pytest.approx({"confidence": 0.75, "entropy": 0.65, "doc": 0.675})
    assert found.accuracy == pytest.approx((0.75 + 0.65 + 0.675) / 3)
    lowest = 0.5 - 1.96 * math.sqrt(0.25 / 100)  # and one logit further down
    assert found.low == pytest.approx(lowest / (lowest + (1 - lowest) * math.e))
    assert found.high == pytest.approx(0.8 + 1.96 * math.sqrt(0.16 / 100))


def test_answers_that_the_last_step_changed_are_counted_as_wrong_by_hand() -> None:
    """DoC says .675, and 7 in 100 answers changed: .605, which the interval holds."""
    site = estimates.Calibration(300, 0.875, 0.9, {"confidence": 0.8, "entropy": 0.7})
    found = estimates.estimate([site], here=0.7, images=100, changed=0.07)
    assert (found.accuracy, found.changed) == (pytest.approx(0.605), 0.07)
    assert found.parts["doc"] == pytest.approx(0.675)
    lowest = 0.605 - 1.96 * math.sqrt(0.605 * 0.395 / 100)
    assert found.low == pytest.approx(lowest / (lowest + (1 - lowest) * math.e))
    assert estimates.estimate([site], here=0.7, images=100, changed=0.7).accuracy == 0


def test_a_model_without_a_shift_is_estimated_within_the_interval() -> None:
    """Labels drawn from the predictions: source and target are of one domain and calibrated."""
    p = drawn(11, N=4000)
    y = torch.multinomial(p, 1, generator=generator("labels"))[:, 0]
    right = (p.argmax(dim=1) == y).double()
    source, target = slice(0, 2000), slice(2000, None)
    accuracy = float(right[source].mean())
    scores = estimates.scores(p)
    above = {
        k: estimates.above(s[target], estimates.threshold(s[source], 1 - accuracy))
        for k, s in scores.items()
    }
    site = estimates.Calibration(2000, accuracy, estimates.confidence(p[source]), above)
    found = estimates.estimate([site], estimates.confidence(p[target]), 2000)
    assert found.low <= float(right[target].mean()) <= found.high
    assert found.accuracy == pytest.approx(float(right[target].mean()), abs=0.03)
