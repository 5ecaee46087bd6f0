"""KD3A's formulas: against naive twins, by hand, and their symmetries."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedda.algorithms import kd3a
from fedda.config.sections import flatten, unflatten, validate
from fedda.errors import ConfigError
from fedda.maths import focus, gap, mixup, moments
from tests.reference import kd3a as twin

FORMS: list[kd3a.Form] = ["soft", "hard", "mean"]
Naive = Callable[[list[twin.Image], float, str], list[float]]
VALUES: dict[kd3a.Value, Naive] = {"marginal": twin.marginal, "shapley": twin.shapley}
PAPER = validate(kd3a.Config, unflatten(kd3a.PRESETS["paper"] | {"focus-from": 0.01}))
few = settings(max_examples=40, deadline=None)


def probabilities(
    N: int, K: int, C: int, seed: int = 0, peak: float = 3.0, agreement: float = 2.0
) -> Tensor:
    """Draw probabilities: some images are clear to all teachers, some to a few, some to none."""
    g = torch.Generator().manual_seed(seed)
    logits = peak * torch.randn(N, K, C, generator=g, dtype=torch.float64)
    common = agreement * torch.randn(N, 1, C, generator=g, dtype=torch.float64)
    ease = 2 * torch.rand(N, 1, 1, generator=g, dtype=torch.float64)
    return (ease * (logits + common)).softmax(dim=2)


def mixed(K: int, C: int = 6) -> Tensor:
    return torch.cat([probabilities(6, K, C, seed, peak, 2.0) for seed, peak in enumerate((1, 3))])


def confident(label: int, top: float, C: int = 3) -> list[float]:
    return [top if c == label else (1 - top) / (C - 1) for c in range(C)]


@st.composite
def votes(draw: st.DrawFn) -> tuple[Tensor, float]:
    K, C = draw(st.integers(1, 5)), draw(st.integers(2, 8))
    seed, peak = draw(st.integers(0, 10**6)), draw(st.floats(0.2, 8))
    return probabilities(9, K, C, seed, peak), draw(st.floats(0.05, 0.97))


# The gate


def test_gate_by_hand():
    # five rounds from .90 to .95: a step is .05 / 4 = .0125
    found = [kd3a.gate(t, 5, 0.9, 0.95) for t in range(1, 6)]
    assert found == pytest.approx([0.9, 0.9125, 0.925, 0.9375, 0.95])
    assert kd3a.gate(1, 1, 0.9, 0.95) == 0.9
    # without reaching .95 a step is .05 / 5 = .01
    found = [kd3a.gate(t, 5, 0.9, 0.95, reach=False) for t in range(1, 6)]
    assert found == pytest.approx([0.9, 0.91, 0.92, 0.93, 0.94])
    assert kd3a.gate(1, 1, 0.9, 0.95, reach=False) == 0.9


# The vote


def test_soft_vote_by_hand():
    p = torch.tensor(
        [
            [[0.92, 0.06, 0.02], [0.96, 0.02, 0.02], [0.01, 0.98, 0.01], [0.2, 0.2, 0.6]],
            [[0.60, 0.30, 0.10], [0.20, 0.70, 0.10], [0.10, 0.80, 0.10], [0.3, 0.2, 0.5]],
        ]
    )
    found = kd3a.knowledge_vote(p, 0.9)
    # Image 1: three are sure; class 0 has .92 + .96 + .01 = 1.89, class 1 .06 + .02 + .98 = 1.06.
    # The third is dropped: p = ((.92 + .96) / 2, (.06 + .02) / 2, .02), n = 2, n max p = 1.88.
    # Image 2: nobody is sure: p = (1.2, 2.0, 0.8) / 4, n = .001, n max p = .0005.
    torch.testing.assert_close(found.p, torch.tensor([[0.94, 0.04, 0.02], [0.30, 0.50, 0.20]]))
    torch.testing.assert_close(found.n, torch.tensor([2.0, 0.001]))
    torch.testing.assert_close(found.support, torch.tensor([1.88, 0.0005]))
    assert found.kept.tolist() == [True, False]
    assert float(kd3a.quality(found)) == pytest.approx(1.8805)


@pytest.mark.parametrize("form", ["soft", "hard"])
def test_a_teacher_at_the_gate_itself_is_not_above_it(form: kd3a.Form):
    p = torch.tensor([[[0.75, 0.25], [0.25, 0.75]]])
    assert kd3a.knowledge_vote(p, 0.75, form).kept.tolist() == [False]
    assert kd3a.knowledge_vote(p, 0.74, form).kept.tolist() == [True]
    assert kd3a.consensus_focus(p, 0.75, form).abs().max() < 0.001


def test_hard_vote_by_hand():
    p = torch.tensor(
        [
            [[0.92, 0.06, 0.02], [0.96, 0.02, 0.02], [0.01, 0.98, 0.01]],
            [[0.60, 0.30, 0.10], [0.20, 0.70, 0.10], [0.80, 0.10, 0.10]],
        ]
    )
    found = kd3a.knowledge_vote(p, 0.9, "hard")
    # Image 1: .92 + .96 for class 0 against .98. Image 2: nobody is sure, so all are heard:
    # .6 + .8 for class 0 against .7; but the mask is 0.
    assert found.p.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert found.n.tolist() == [1, 0]
    torch.testing.assert_close(found.support, torch.tensor([1.88, 0.0]))


def test_a_class_that_is_no_teachers_first_choice_can_win_at_a_low_gate_without_support():
    # Class 2 gathers .45 + .45 against .55 each, yet neither teacher's first choice is class 2.
    p = torch.tensor([[[0.55, 0.0, 0.45], [0.0, 0.55, 0.45]]])
    found = kd3a.knowledge_vote(p, 0.5)
    torch.testing.assert_close(found.p, torch.tensor([[0.275, 0.275, 0.45]]))
    assert found.n.tolist() == pytest.approx([0.001])
    assert found.kept.tolist() == [False]


@few
@given(votes())
def test_votes_equal_the_twins(vote: tuple[Tensor, float]):
    p, gate = vote
    soft, hard = kd3a.knowledge_vote(p, gate), kd3a.knowledge_vote(p, gate, "hard")
    for i, image in enumerate(p.tolist()):
        p_i, n_i = twin.soft_vote(image, gate)
        assert soft.p[i].tolist() == pytest.approx(p_i)
        assert float(soft.n[i]) == pytest.approx(n_i)
        p_i, n_i, confidence = twin.hard_vote(image, gate)
        assert hard.p[i].tolist() == p_i
        assert float(hard.n[i]) == n_i
        assert float(hard.support[i]) == pytest.approx(n_i * confidence)


@few
@given(votes(), st.randoms(use_true_random=False))
def test_votes_do_not_depend_on_the_order_of_teachers(vote: tuple[Tensor, float], random):
    p, gate = vote
    order = random.sample(range(p.shape[1]), p.shape[1])
    for form in FORMS:
        for a, b in zip(
            kd3a.knowledge_vote(p, gate, form),
            kd3a.knowledge_vote(p[:, order], gate, form),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_mean_ensemble_by_hand():
    found = kd3a.mean_ensemble(torch.tensor([[[0.9, 0.1], [0.3, 0.7]]]))
    torch.testing.assert_close(found.p, torch.tensor([[0.6, 0.4]]))
    assert found.n.tolist() == [1.0]
    assert found.kept.tolist() == [True]


# Loss and mixup


def test_distillation_loss_by_hand():
    # q = (1/2, 1/2). Image 1: 2 * 1 log(1 / .5) = 2 log 2; image 2: p = q, so 0. Mean: log 2.
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    loss = kd3a.distillation_loss(torch.zeros(2, 2), p, torch.tensor([2.0, 1.0]))
    assert float(loss) == pytest.approx(math.log(2))


def test_distillation_loss_equals_the_twins_with_a_finite_gradient():
    p = torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.2, 0.7], [0.0, 0.0, 1.0]])
    n = torch.tensor([3.0, 0.001, 1.0])
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = kd3a.distillation_loss(logits, p, n)
    expected = twin.distillation_loss(logits.tolist(), p.tolist(), n.tolist())
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    # d/dlogits of KL is q - p
    assert logits.grad is not None
    torch.testing.assert_close(
        logits.grad, n[:, None] / 3 * (logits.detach().softmax(dim=1) - p), rtol=1e-4, atol=1e-7
    )


def test_mixup_by_hand():
    x, p = torch.tensor([[1.0], [5.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    n, perm = torch.tensor([4.0, 0.0]), torch.tensor([1, 0])
    mixed_x, mixed_p, mixed_n = mixup.mixup(x, p, n, 0.75, perm)
    # .75 * 1 + .25 * 5 = 2 and .75 * 5 + .25 * 1 = 4
    assert mixed_x.tolist() == [[2.0], [4.0]]
    assert mixed_p.tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert mixed_n.tolist() == [3.0, 1.0]
    official_x, official_p, official_n = mixup.mixup(x, p, n, 0.75, perm, weights=False)
    assert official_n.tolist() == [4.0, 0.0]
    assert official_x.equal(mixed_x) and official_p.equal(mixed_p)


# Quality and focus


def test_marginal_focus_by_hand():
    p = torch.tensor([[confident(0, 0.95), confident(0, 0.97), confident(1, 0.91)]])
    # All: teachers 0 and 1 agree on class 0: Q = .95 + .97 = 1.92. Without 0: .97 (+ .045) beats
    # .91 (+ .015), Q = .97. Without 1: .95 beats .91, Q = .95. Without 2: Q = 1.92.
    found = kd3a.consensus_focus(p, 0.9)
    assert found.tolist() == pytest.approx([0.95, 0.97, 0.0])


def test_shapley_focus_by_hand():
    p = torch.tensor([[confident(0, 0.95), confident(1, 0.91)]])
    # Q{} = 0, Q{0} = .95, Q{1} = .91, Q{0, 1} = .95 (class 0 wins).
    # 0 joins first: .95, second: .95 - .91 = .04; mean .495. 1: .91 and 0; mean .455.
    found = kd3a.consensus_focus(p, 0.9, value="shapley")
    assert found.tolist() == pytest.approx([0.495, 0.455])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [0.0, 0.3, 0.5, 2 / 3, 0.9, 0.999])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_focus_equals_the_twins(value: kd3a.Value, form: kd3a.Form, gate: float, K: int):
    p = mixed(K)
    expected = VALUES[value](p.tolist(), gate, form)
    found = kd3a.consensus_focus(p, gate, form, value)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_focus_of_five_sources_equals_the_twins_for_any_block_size(
    form: kd3a.Form, monkeypatch: pytest.MonkeyPatch
):
    p = mixed(5)
    expected = twin.shapley(p.tolist(), 0.6, form)
    for block in (1, 700, 1 << 18):
        monkeypatch.setattr(focus, "BLOCK", block)
        found = kd3a.consensus_focus(p, 0.6, form, "shapley")
        assert found.tolist() == pytest.approx(expected, rel=1e-9)


@few
@given(votes())
def test_focus_agrees_with_votes_of_teams(vote: tuple[Tensor, float]):
    p, gate = vote
    K = p.shape[1]
    for form in FORMS:
        whole = kd3a.quality(kd3a.knowledge_vote(p, gate, form))
        marginal = kd3a.consensus_focus(p, gate, form)
        for k in range(K if K > 1 else 0):
            rest = kd3a.knowledge_vote(p[:, [j for j in range(K) if j != k]], gate, form)
            assert float(whole - kd3a.quality(rest)) == pytest.approx(float(marginal[k]), abs=1e-9)
        # Shapley values share out the whole
        shapley = kd3a.consensus_focus(p, gate, form, "shapley")
        assert float(shapley.sum()) == pytest.approx(float(whole), rel=1e-9)


@few
@given(votes(), st.randoms(use_true_random=False), st.integers(0, 9))
def test_focus_follows_the_order_of_teachers_and_adds_up_over_images(
    vote: tuple[Tensor, float], random, cut: int
):
    p, gate = vote
    order = random.sample(range(p.shape[1]), p.shape[1])
    for form in FORMS:
        for value in VALUES:
            whole = kd3a.consensus_focus(p, gate, form, value)
            torch.testing.assert_close(
                kd3a.consensus_focus(p[:, order], gate, form, value), whole[order]
            )
            parts = [kd3a.consensus_focus(x, gate, form, value) for x in (p[:cut], p[cut:])]
            torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("form", ["soft", "hard"])
@pytest.mark.parametrize("value", VALUES)
def test_an_unsure_teacher_adds_nothing_beside_a_sure_one(form: kd3a.Form, value: kd3a.Value):
    sure = torch.tensor([confident(i % 3, 0.96) for i in range(6)])
    unsure = torch.tensor([confident(i % 2, 0.5) for i in range(6)])
    p = torch.stack([sure, sure, unsure, unsure], dim=1)
    found = kd3a.consensus_focus(p, 0.9, form, value)
    # Marginal: without an unsure teacher a sure one is still left, so it adds exactly 0. Shapley
    # also counts teams of unsure teachers alone, to which the soft vote gives .001 per image.
    assert found[2:].abs().max() <= (0.002 if (form, value) == ("soft", "shapley") else 1e-12)
    assert found[0] == found[1]
    torch.testing.assert_close(found[0].float(), torch.tensor(6 * 0.96), rtol=1e-3, atol=0)


def test_a_teacher_that_overrules_a_better_supported_class_has_negative_focus():
    p = torch.tensor([[[0.45, 0.55], [0.45, 0.55], [1.0, 0.0]]])
    # All: class 0 wins by 1.9 to 1.1, but only the third stands behind it: Q = 1.
    # Without the third, both others stand behind class 1: Q = 1.1. Without another: Q = 1.
    found = kd3a.consensus_focus(p, 0.5)
    assert found.tolist() == pytest.approx([0, 0, -0.1], abs=1e-6)


def test_leading_classes_by_hand():
    # K = 2, so a class needs half of a teacher's best: .4 / 2 = .2 or .6 / 2 = .3.
    p = torch.tensor([[[0.4, 0.25, 0.15, 0.2], [0.05, 0.29, 0.6, 0.06]]])
    assert focus.may_lead(p).tolist() == [[True, True, True, True]]
    p = torch.tensor([[[0.4, 0.19, 0.31, 0.1], [0.05, 0.29, 0.6, 0.06]]])
    assert focus.may_lead(p).tolist() == [[True, False, True, False]]
    torch.testing.assert_close(focus.leading_classes(p), p[:, :, [0, 2]])


def test_leading_classes_keep_every_teams_winner():
    logits = torch.randn(40, 4, 30, generator=torch.Generator().manual_seed(5)).double()
    p = (4 * logits).softmax(dim=2)
    leading = focus.leading_classes(p)
    assert leading.shape[2] < p.shape[2]
    teams, _ = focus.teams_and_shares(4, "shapley")
    torch.testing.assert_close((teams @ leading).amax(dim=2), (teams @ p).amax(dim=2))


def test_without_images_quality_and_focus_are_zero():
    empty = torch.zeros(0, 3, 4)
    assert kd3a.consensus_focus(empty, 0.9).tolist() == [0, 0, 0]
    assert float(kd3a.quality(kd3a.knowledge_vote(empty, 0.9))) == 0


def test_the_focus_of_sampled_orders_is_the_mean_gain_of_who_joins():
    """Against loops over the same orders, each of which is followed by its reverse."""
    p, K = mixed(4), 4
    teams, share = focus.sampled_orders(K, 6, seed=1)
    found = focus.team_quality(p, 0.6, teams) @ share
    draw, gains = torch.Generator().manual_seed(1), [0.0] * K
    drawn = [torch.randperm(K, generator=draw).tolist() for _ in range(3)]
    for order in (*drawn, *(each[::-1] for each in drawn)):
        before = 0.0
        for j, k in enumerate(order, start=1):
            after = float(kd3a.quality(kd3a.knowledge_vote(p[:, sorted(order[:j])], 0.6)))
            gains[k] += (after - before) / 6
            before = after
    assert found.tolist() == pytest.approx(gains, rel=1e-9)


def test_the_focus_of_many_sources_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch):
    """Of twelve, where both can be had: a twentieth of the mean focus at most."""
    p = probabilities(200, 12, 20, seed=3, peak=4.0)
    exact = kd3a.consensus_focus(p, 0.8, value="shapley")
    monkeypatch.setattr(focus, "MOST_TEAMS", 1)
    found = kd3a.consensus_focus(p, 0.8, value="shapley")
    assert 0 < float((found - exact).abs().max()) < 0.05 * float(exact.mean())
    assert float(found.sum()) == pytest.approx(float(exact.sum()), rel=1e-9)


@pytest.mark.parametrize("K", [12, 17, 40])
def test_the_focus_of_many_sources_shares_out_the_whole(K: int):
    p = probabilities(30, K, 20, seed=3, peak=4.0).float()
    whole = kd3a.quality(kd3a.knowledge_vote(p, 0.8))
    found = kd3a.consensus_focus(p, 0.8, value="shapley")
    assert float(found.sum()) == pytest.approx(float(whole), rel=1e-5)
    assert torch.equal(found, kd3a.consensus_focus(p, 0.8, value="shapley"))


# Weights


def test_the_focus_counts_only_from_a_share_of_kept_images_by_hand():
    """N is 100, 300 and 100 at the target: the target's weight is .2, and .8 is left."""
    examples, numbers = {"a": 100, "b": 300, "t": 100}, {"focus/a": 3.0, "focus/b": 1.0}

    def weights(kept: float, **options: Any) -> list[float]:
        made = kd3a.site_weights(
            PAPER.model_copy(update=options), examples, "t", numbers | {"kept": kept}, {}
        )
        return [made[name] for name in "tab"]

    # N CF is 300 and 300; N alone is 100 and 300.
    assert weights(0.01) == pytest.approx([0.2, 0.4, 0.4])
    assert weights(0.0099) == pytest.approx([0.2, 0.2, 0.6])
    assert weights(0.0, focus_from=0.0) == pytest.approx([0.2, 0.4, 0.4])
    assert weights(0.0, focus_by_examples=False) == pytest.approx([0.2, 0.4, 0.4])
    assert weights(0.9, focus_from=0.95) == pytest.approx([0.2, 0.2, 0.6])
    assert kd3a.is_focused(kd3a.Config(), 0.01)
    assert not kd3a.is_focused(kd3a.Config(weighting="examples"), 0.9)


def test_domain_weights_by_hand():
    # Target 100 / (100 + 300 + 100) = .2. Sources: 100 * 3 and 300 * 1, half of .8 each.
    alpha = kd3a.domain_weights(torch.tensor([3.0, 1.0]), torch.tensor([100, 300]), 100)
    assert alpha.tolist() == pytest.approx([0.2, 0.4, 0.4])
    # Official: .6 / 3 = .2, then 3 : 1 of .8.
    alpha = kd3a.domain_weights(
        torch.tensor([3.0, 1.0]), torch.tensor([100, 300]), 100, by_examples=False, kept=0.6
    )
    assert alpha.tolist() == pytest.approx([0.2, 0.6, 0.2])


def test_without_positive_focus_the_numbers_of_examples_decide():
    alpha = kd3a.domain_weights(torch.tensor([-1.0, 0.0]), torch.tensor([100, 300]), 100)
    assert alpha.tolist() == pytest.approx([0.2, 0.2, 0.6])


numbers = st.floats(-1e6, 1e6)


@few
@given(
    st.lists(st.tuples(numbers, st.integers(1, 10**6)), min_size=1, max_size=8),
    st.integers(1, 10**6),
    st.floats(0, 1),
)
def test_domain_weights_equal_the_twins(
    sources: list[tuple[float, int]], target_examples: int, kept: float
):
    values, examples = [s[0] for s in sources], [s[1] for s in sources]
    cf = torch.tensor(values, dtype=torch.float64)
    paper = kd3a.domain_weights(cf, torch.tensor(examples), target_examples)
    official = kd3a.domain_weights(
        cf, torch.tensor(examples), target_examples, by_examples=False, kept=kept
    )
    expected = twin.weights(values, examples, target_examples)
    assert paper.tolist() == pytest.approx(expected, rel=1e-9)
    assert official.tolist() == pytest.approx(twin.official_weights(values, kept), rel=1e-9)
    for alpha in (paper, official):
        assert float(alpha.sum()) == pytest.approx(1, abs=1e-12)
        assert float(alpha.min()) >= 0


def test_focus_near_the_limits_of_numbers_still_gives_weights():
    for values in ([1e308, 1e308], [5e-324, 5e-324]):
        cf = torch.tensor(values, dtype=torch.float64)
        alpha = kd3a.domain_weights(cf, torch.tensor([10, 10]), 20)
        assert alpha.tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_smoothing_by_hand():
    # a: .9 * .5 + .1 * .2 = .47, b: .9 * .5 + .1 * .8 = .53
    old, new = {"a": 0.5, "b": 0.5}, {"a": 0.2, "b": 0.8}
    assert kd3a.smooth(old, new, 0.9) == pytest.approx({"a": 0.47, "b": 0.53})
    assert kd3a.smooth(old, new, 0.0) == pytest.approx(new)
    assert kd3a.smooth({}, new, 0.9) == pytest.approx(new)


def test_smoothing_when_sites_join_and_leave():
    # b left, c joined: a: .9 * .6 + .1 * .5 = .59, c: .5; over 1.09
    found = kd3a.smooth({"a": 0.6, "b": 0.4}, {"a": 0.5, "c": 0.5}, 0.9)
    assert found == pytest.approx({"a": 0.59 / 1.09, "c": 0.5 / 1.09})


def test_divergence_weights_by_hand_and_far_apart():
    # 100 * 1 against 300 * exp(-log 3) = 100
    found = kd3a.divergence_weights(torch.tensor([0.0, math.log(3)]), torch.tensor([100, 300]))
    assert found.tolist() == pytest.approx([0.5, 0.5])
    found = kd3a.divergence_weights(torch.tensor([1e4, 1e4 + 1]), torch.tensor([1, 1]))
    assert found.tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)], rel=1e-3)
    assert found.tolist() == pytest.approx(twin.divergence_weights([0.0, 1.0], [1, 1]))


def test_with_target_by_hand():
    assert kd3a.with_target(torch.tensor([1.0, 3.0]), 0.2).tolist() == pytest.approx(
        [0.2, 0.2, 0.6]
    )


# BatchNorm


def test_moments_by_hand():
    # Means 0 and 2, variances 1 and 3, halves: mu = 1, second = (1 + 0)/2 + (3 + 4)/2 = 4, var = 3.
    means, variances = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    mu, var = moments.mix_moments(means, variances, torch.tensor([0.5, 0.5]))
    assert (mu.tolist(), var.tolist()) == ([1.0], [3.0])
    mu, var = moments.mix_moments(means, variances, torch.tensor([0.5, 0.5]), "linear")
    assert (mu.tolist(), var.tolist()) == ([1.0], [2.0])


def test_moments_equal_the_twins_and_large_means_lose_no_variance():
    g = torch.Generator().manual_seed(2)
    means, variances = torch.randn(4, 5, generator=g), torch.rand(4, 5, generator=g)
    alpha = torch.rand(4, generator=g, dtype=torch.float64)
    alpha /= alpha.sum()
    mu, var = moments.mix_moments(means, variances, alpha)
    first, second = twin.mixed_moments(means.tolist(), variances.tolist(), alpha.tolist())
    assert mu.tolist() == pytest.approx(first, abs=1e-6)
    assert var.tolist() == pytest.approx(second, abs=1e-6)
    _, var = moments.mix_moments(means * 0 + 1e4, variances * 0 + 1e-3, alpha)
    assert var.tolist() == pytest.approx([1e-3] * 5, rel=1e-6)


def test_batchnorm_distance_by_hand():
    # Means 1 and 3: 4. Second moments 2 + 1 = 3 and 1 + 9 = 10: 49. A second layer alike: 0.
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    found = moments.batchnorm_distance(
        [one, two], [two, one], [torch.tensor([3.0]), two], [one, one]
    )
    assert float(found) == 53


def test_batchnorm_loss_equals_the_twins_and_is_lowest_at_the_mixed_moments():
    g = torch.Generator().manual_seed(4)
    widths, alpha = (2, 3), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    mu = [torch.randn(3, d, generator=g, dtype=torch.float64) for d in widths]
    var = [torch.rand(3, d, generator=g, dtype=torch.float64) for d in widths]
    second = [v + m**2 for m, v in zip(mu, var, strict=True)]
    best = [moments.mix_moments(m, v, alpha) for m, v in zip(mu, var, strict=True)]
    mu_T = [m.clone().requires_grad_() for m, _ in best]
    second_T = [(v + m**2).requires_grad_() for m, v in best]
    loss = moments.batchnorm_mmd_loss(mu_T, second_T, mu, second, alpha)
    expected = twin.mmd_loss(
        [a.tolist() for a in mu_T],
        [a.tolist() for a in second_T],
        [a.tolist() for a in mu],
        [a.tolist() for a in second],
        alpha.tolist(),
    )
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    # Eq. 18 is the optimum of eq. 12, so no gradient is left there.
    for a in (*mu_T, *second_T):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, torch.zeros_like(a), rtol=0, atol=1e-12)


# FADA's gap statistic


def test_gap_statistic_by_hand():
    # Cluster 0 at 0 and 2: pairs 2 * 4 over 2 * 2 = 2. Cluster 1 is a single point: 0.
    z = torch.tensor([[0.0], [2.0], [9.0]])
    assert float(gap.gap_statistic(z, torch.tensor([0, 0, 1]))) == 2.0


def test_the_share_of_the_scatter_by_hand():
    z = torch.tensor([[0.0], [2.0], [4.0]])  # mean 2, scatter 8; clusters {0, 2} and {4} leave 2
    I, T = gap.gap_statistic(z, torch.tensor([0, 0, 1])), gap.scatter(z)  # noqa: E741
    assert (float(I), float(T)) == (2.0, 8.0)
    assert gap.share(float(I), float(T)) == gap.share(float(9 * I), float(9 * T)) == 0.25
    assert gap.share(0.0, 0.0) == 1.0  # features that are all equal have no clusters


@few
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_gap_statistic_equals_the_twins(seed: int, N: int):
    g = torch.Generator().manual_seed(seed)
    z, assignment = torch.randn(N, 3, generator=g) + 100, torch.randint(4, (N,), generator=g)
    expected = twin.gap_statistic(z.tolist(), assignment.tolist())
    assert float(gap.gap_statistic(z, assignment)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_clusters_find_the_clumps_and_obey_the_seed():
    g = torch.Generator().manual_seed(0)
    z = torch.cat([torch.randn(20, 2, generator=g) + at for at in (0, 50)])
    found = gap.clusters(z, 2, seed=1)
    assert len(found[:20].unique()) == len(found[20:].unique()) == 1
    assert found[0] != found[-1]
    torch.testing.assert_close(found, gap.clusters(z, 2, seed=1))


def test_tighter_clusters_weigh_more():
    expected = [math.e / (1 + math.e), 1 / (1 + math.e)]
    assert gap.gap_weights(torch.tensor([1.0, 0.0])).tolist() == pytest.approx(expected)


# Configuration


# Benchmarks set the gate, and who averages changes nothing in the result.
GATE = {"gate.low": 0.9, "gate.high": 0.95, "relay": "auto"}


def test_the_defaults_are_the_official_code_s_but_for_four_named_choices():
    ours = {"vote": "soft", "heads": "average", "gate.reach": True, "focus-from": 0.01}
    assert kd3a.Config().flat() == kd3a.PRESETS["official"] | GATE | ours


def test_official_preset_names_every_setting_and_parses():
    official = kd3a.PRESETS["official"]
    assert {*official, *GATE} == kd3a.Config().flat().keys()
    assert validate(kd3a.Config, unflatten(official)).flat() == official | GATE
    assert official["teacher-batchnorm"] == "updated"
    assert {k for k, v in official.items() if v != kd3a.PRESETS["paper"][k]} == {
        "vote",
        "focus",
        "focus-by-examples",
        "target-weight",
        "smoothing",
        "batchnorm",
        "teacher-batchnorm",
        "heads",
        "mixup",
        "mixup-weights",
        "gate.reach",
    }


def test_settings_are_described_and_out_of_range_ones_refused():
    for model in (kd3a.ConfidenceGate, kd3a.Config):
        for name, field in model.model_fields.items():
            assert name == "gate" or field.description, name
    for bad in ({"gate": {"low": 1.5}}, {"vote": "loud"}, {"smoothing": 1.0}, {"mixup": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(flatten(bad)))):
            validate(kd3a.Config, bad)
