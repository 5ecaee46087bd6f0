"""MDAN's weights: a case by hand, the naive twin, and what must hold for any losses."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedda import plugins
from fedda.algorithms import mdan
from fedda.algorithms.mdan import Max, Sign, domain_losses, weights
from fedda.errors import ConfigError
from fedda.settings import RunConfig
from tests.reference import mdan as twin

losses = st.floats(0, 20, width=32)
many = st.lists(losses, min_size=1, max_size=6)
some_unknown = st.lists(st.none() | losses, min_size=1, max_size=6)
gammas = st.floats(0.01, 50)
maxima, signs = st.sampled_from(get_args(Max)), st.sampled_from(get_args(Sign))


def tensor(values: list[Any]) -> Tensor:
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)


def close(found: Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(found, tensor(wanted), rtol=1e-9, atol=1e-12)


# ---- by hand -----------------------------------------------------------------------------------


def test_a_loss_larger_by_log_2_over_gamma_counts_twice() -> None:
    gamma = 10.0
    f = tensor([0.5, 0.5 + math.log(2) / gamma])
    close(weights(f, gamma), [1 / 3, 2 / 3])
    close(weights(f, 2 * gamma), [1 / 5, 4 / 5])
    close(weights(f, gamma, "hard"), [0, 1])


def test_the_signs_differ_in_the_source_that_they_favour() -> None:
    """The discriminator can always tell the second source from the target, and never the first."""
    CE, d = tensor([0.7, 0.7]), tensor([2 * math.log(2), 0.0])
    mu = 1 / 10
    paper, code = (domain_losses(CE, d, mu, sign) for sign in ("paper", "code"))
    close(paper, [0.7 - 0.2 * math.log(2), 0.7])
    close(code, [0.7 + 0.2 * math.log(2), 0.7])
    close(weights(paper, 10.0), [1 / 5, 4 / 5])
    close(weights(code, 10.0), [4 / 5, 1 / 5])
    close(weights(paper, 10.0, "hard"), [0, 1])
    close(weights(code, 10.0, "hard"), [1, 0])


def test_an_unknown_loss_counts_as_the_mean_of_the_others() -> None:
    f = tensor([0.1, None, 0.3])
    close(weights(f, 10.0), weights(tensor([0.1, 0.2, 0.3]), 10.0).tolist())
    close(weights(f, 10.0, "hard"), [0, 0, 1])
    for maximum in get_args(Max):
        close(weights(tensor([None, None, None, None]), 10.0, maximum), [1 / 4] * 4)
        close(weights(tensor([None, 0.4]), 10.0, maximum), [1 / 2] * 2)
        # Rounding makes their mean larger than all three.
        assert float(tensor([0.1] * 3).mean()) > 0.1
        close(weights(tensor([0.1, 0.1, 0.1, None]), 10.0, maximum), [1 / 4] * 4)


# ---- against the twin --------------------------------------------------------------------------


@given(st.lists(st.tuples(losses, losses), min_size=1, max_size=6), st.floats(0, 2), signs)
def test_a_sources_term_equals_the_twins(pairs: list[Any], mu: float, sign: Sign) -> None:
    CE, d = tensor(pairs).T
    close(domain_losses(CE, d, mu, sign), [twin.domain_loss(a, b, mu, sign) for a, b in pairs])


@given(some_unknown, gammas, maxima)
def test_the_weights_equal_the_twins(f: list[Any], gamma: float, maximum: Max) -> None:
    known = {v for v in f if v is not None}
    if maximum == "hard" and len(known) == 1:  # the twin's mean may be off by a rounding
        f = [next(iter(known)) for _ in f]
    close(weights(tensor(f), gamma, maximum), twin.weights(f, gamma, maximum))


@given(many, st.floats(0.1, 20))
def test_the_weights_are_the_gradient_of_the_soft_maximum(f: list[float], gamma: float) -> None:
    at = tensor(f).requires_grad_()
    value = torch.logsumexp(gamma * at, dim=0) / gamma
    value.backward()
    assert at.grad is not None
    close(weights(at.detach(), gamma), at.grad.tolist())
    if gamma * max(f) < 100:
        assert value.item() == pytest.approx(twin.objective(f, gamma), abs=1e-6)


@given(some_unknown, gammas, maxima)
def test_the_weights_are_shares(f: list[Any], gamma: float, maximum: Max) -> None:
    w = weights(tensor(f), gamma, maximum)
    assert w.shape == (len(f),) and w.dtype == torch.float64
    assert float(w.sum()) == pytest.approx(1) and float(w.min()) >= 0


@given(some_unknown, gammas, maxima, st.randoms(use_true_random=False))
def test_the_weights_follow_the_order_of_the_sources(
    f: list[Any], gamma: float, maximum: Max, draws: Any
) -> None:
    order = list(range(len(f)))
    draws.shuffle(order)
    moved = weights(tensor([f[i] for i in order]), gamma, maximum)
    close(moved, weights(tensor(f), gamma, maximum)[order].tolist())


@given(some_unknown, gammas, st.floats(-50, 50))
def test_adding_the_same_to_all_losses_changes_no_weight(
    f: list[Any], gamma: float, more: float
) -> None:
    w = weights(tensor(f), gamma)
    torch.testing.assert_close(weights(tensor(f) + more, gamma), w, rtol=1e-6, atol=1e-9)


@given(many)
def test_a_large_gamma_gives_the_hard_maximum(f: list[float]) -> None:
    f = [round(v, 2) for v in f]  # equal, or a hundredth or more apart
    for gamma in (1e5, 1e300):
        close(weights(tensor(f), gamma), weights(tensor(f), 1.0, "hard").tolist())


@given(some_unknown)
def test_a_small_gamma_gives_equal_weights(f: list[Any]) -> None:
    w = weights(tensor(f), 1e-12)
    torch.testing.assert_close(w, torch.full_like(w, 1 / len(f)), rtol=1e-9, atol=0)


@given(many, gammas)
def test_a_source_with_a_larger_loss_counts_no_less(f: list[float], gamma: float) -> None:
    w = weights(tensor(f), gamma).tolist()
    for a, u in zip(f, w, strict=True):
        for b, v in zip(f, w, strict=True):
            assert not a > b or u >= v


# ---- what must hold ----------------------------------------------------------------------------


@given(many, losses, st.floats(0, 2), gammas, maxima)
def test_the_signs_agree_if_mu_is_zero_or_all_d_are_equal(
    CE: list[float], d: float, mu: float, gamma: float, maximum: Max
) -> None:
    CE = [round(v, 2) for v in CE]
    alike = torch.full((len(CE),), d, dtype=torch.float64)
    apart = torch.linspace(0, 9, len(CE), dtype=torch.float64)
    for of, by in ((alike, mu), (apart, 0.0)):
        one, other = (
            weights(domain_losses(tensor(CE), of, by, s), gamma, maximum) for s in get_args(Sign)
        )
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("f", [[1e300, -1e300, 0.0], [1e307, 1e307, -1e308], [710.0, 0.0, 711.0]])
def test_no_exponential_overflows(f: list[float]) -> None:
    w = weights(tensor(f), 10.0)
    assert bool(w.isfinite().all())
    close(w, twin.weights(f, 10.0))


# ---- settings ----------------------------------------------------------------------------------


def test_the_gradient_reversal_has_the_strength_mu() -> None:
    options = RunConfig.parse({"mdan.mu": 0.3}).options["mdan"]
    assert [options.reversal.at(q) for q in (0.0, 0.5, 1.0)] == [0.3] * 3


def test_pairs_is_always_on_and_no_setting() -> None:
    assert RunConfig.parse({}).options["mdan"].pairs
    assert "mdan.pairs" not in RunConfig.parse({}).flat()
    with pytest.raises(ConfigError, match=r"no setting 'mdan.pairs'"):
        RunConfig.parse({"mdan.pairs": False})


@pytest.mark.parametrize(("preset", "sign"), [("paper", "paper"), ("official", "code")])
def test_the_presets_differ_in_the_sign(preset: str, sign: str) -> None:
    chosen = plugins.method("mdan").presets[preset]
    assert chosen["sign"] == sign
    assert (chosen["gamma"], chosen["mu"], chosen["max"]) == (10.0, 0.01, "soft")
    flat = {plugins.full_key("mdan", name): value for name, value in chosen.items()}
    assert RunConfig.parse(flat).options["mdan"].discriminator.hidden == ()  # linear


def test_only_the_gradients_of_pairs_cross() -> None:
    for part in mdan.ALIGN.hops["align"].values():
        assert part.gradients == {"gradient/*"}
        assert "discriminator" not in {**part.enters.optional, **part.leaves.optional}
