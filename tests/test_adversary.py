"""Discriminators and the two halves of their losses, against naive references and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedda import wire
from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import (
    HALVES,
    Discriminator,
    DiscriminatorConfig,
    Loss,
    Reversal,
)
from fedda.algorithms import dils, fdann, fwdgrl
from fedda.config import validate
from fedda.maths.schedule import growth
from fedda.train import generator
from fedda.wire import Kind, Role
from tests.reference import adversary as twin

LOSSES: list[Loss] = ["adda", "grl", "wassda", "cada"]
few = settings(max_examples=40, deadline=None)
values = st.lists(st.floats(-15, 15), min_size=1, max_size=6)


def features(N: int, d: int, name: str, shift: float = 0.0) -> Tensor:
    return torch.randn(N, d, generator=generator(name), dtype=torch.float64) + shift


def network(d: int = 3, sizes: tuple[int, ...] = (5, 4), seed: int = 0) -> Discriminator:
    return Discriminator(d, sizes, seed).double()


def plain(DI: Discriminator) -> list[tuple[list[list[float]], list[float]]]:
    found = [m for m in DI.layers if isinstance(m, nn.Linear)]
    return [(m.weight.tolist(), m.bias.tolist()) for m in found]


# ---- the network -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(), (3,), (5, 4), (2, 3, 4)])
def test_layout_and_count_match_the_network(sizes: tuple[int, ...]) -> None:
    DI = Discriminator(6, sizes)
    state = {name: t.numpy() for name, t in DI.state_dict().items()}
    assert wire.pack(state, Kind.MODEL).manifest == discriminators.layout(6, sizes)
    assert discriminators.count(6, sizes) == sum(w.numel() for w in DI.parameters())
    assert DI(torch.rand(4, 6)).shape == (4,)
    # state_dict and the gradient list the parameters in the same order
    assert list(state) == [name for name, _ in DI.named_parameters()]


def test_count_by_hand() -> None:
    # (10 + 1) * 4 + (4 + 1) * 3 + (3 + 1) * 1
    assert discriminators.count(10, (4, 3)) == 44 + 15 + 4
    assert discriminators.count(10, ()) == 11


def test_a_seed_gives_equal_copies_and_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    one, two, other = (Discriminator(6, (5,), seed) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b, c in zip(one.parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("sizes", [(), (5, 4)])
def test_values_match_the_reference(sizes: tuple[int, ...]) -> None:
    DI, z = network(3, sizes), features(6, 3, "values")
    expected = [twin.value(plain(DI), row) for row in z.tolist()]
    assert DI(z).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_equal_gradients_keep_equal_copies_equal(name: str) -> None:
    config = validate(DiscriminatorConfig, {"optimizer": name, "lr": 0.1})
    copies = [Discriminator(6, (5,), 1) for _ in range(2)]
    optimizers = [discriminators.make_optimizer(DI, config) for DI in copies]
    start = copies[0].state_dict()["layers.0.weight"].clone()
    for step in range(3):
        g = torch.randn(discriminators.count(6, (5,)), generator=generator(step))
        for DI, optimizer in zip(copies, optimizers, strict=True):
            discriminators.set_gradient(DI, g)
            optimizer.step()
    states = [DI.state_dict() for DI in copies]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not torch.allclose(states[0]["layers.0.weight"], start, atol=0.01)


# ---- the losses --------------------------------------------------------------------------------


def test_losses_by_hand() -> None:
    """DI gives 3/4 at v = log 3 and 1/2 at v = 0."""
    v = torch.tensor([math.log(3), 0.0])
    by_hand = (math.log(4 / 3) + math.log(2)) / 2
    assert float(discriminators.called_source(v)) == pytest.approx(by_hand)
    assert float(discriminators.called_target(v)) == pytest.approx((math.log(4) + math.log(2)) / 2)
    assert float(discriminators.high(v)) == pytest.approx(-math.log(3) / 2)
    assert float(discriminators.low(v)) == pytest.approx(math.log(3) / 2)


@few
@given(values, values, st.sampled_from(LOSSES))
def test_halves_match_the_reference(f_S: list[float], f_T: list[float], loss: Loss) -> None:
    source, target = HALVES[loss, "source"], HALVES[loss, "target"]
    v_S, v_T = (torch.tensor(f, dtype=torch.float64) for f in (f_S, f_T))
    whole = float(source.discriminator(v_S) + target.discriminator(v_T))
    assert whole == pytest.approx(twin.discriminator(loss, f_S, f_T), rel=1e-6, abs=1e-9)
    assert target.mapping is not None
    mapped = target.mapping(v_T)
    if source.mapping is not None:
        mapped = mapped + source.mapping(v_S)
    elif loss == "wassda":  # the source's term of eq. 16 is a constant for the target's encoder
        mapped = mapped + twin.mean(f_S)
    assert float(mapped) == pytest.approx(twin.mapping(loss, f_S, f_T), rel=1e-6, abs=1e-9)
    assert (source.mapping is not None) == (loss == "cada")


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_the_halves_add_up_to_that_of_the_whole_loss(loss: Loss) -> None:
    DI, z_S, z_T = network(), features(7, 3, "S"), features(4, 3, "T", 1.0)
    draws = [generator("e", role) for role in ("source", "target")]
    parts = [
        discriminators.flat_gradient(
            discriminators.discriminator_loss(HALVES[loss, role], DI, z, 10.0, g), DI
        )
        for role, z, g in zip(("source", "target"), (z_S, z_T), draws, strict=True)
    ]
    f_S, f_T = DI(z_S), DI(z_T)
    if loss == "wassda":
        draws = [generator("e", role) for role in ("source", "target")]
        own = [
            discriminators.gradient_penalty(DI, z, g)
            for z, g in zip((z_S, z_T), draws, strict=True)
        ]
        whole = -(f_S.mean() - f_T.mean()) + 10 * (own[0] + own[1]) / 2
        without = discriminators.discriminator_loss(HALVES[loss, "source"], DI, z_S)
        assert without.item() == pytest.approx(-f_S.mean().item())
    else:
        whole = -torch.sigmoid(f_S).log().mean() - (1 - torch.sigmoid(f_T)).log().mean()
    together = discriminators.flat_gradient(whole, DI)
    torch.testing.assert_close(parts[0] + parts[1], together)
    assert together.norm() > 0.1


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("role", ["source", "target"])
def test_each_loss_has_a_gradient_in_its_own_network_only(loss: Loss, role: Role) -> None:
    DI, half = network(), HALVES[loss, role]
    E = nn.Linear(2, 3).double()
    z = E(features(5, 2, "x"))
    discriminators.discriminator_loss(half, DI, z, 10.0, generator("e")).backward()
    assert E.weight.grad is None
    assert all(w.grad is not None for w in DI.parameters())
    DI.zero_grad()
    losses = [discriminators.reversed_loss]
    if half.mapping:
        losses.append(discriminators.mapping_loss)
    for objective in losses:
        E.zero_grad()
        objective(half, DI, E(features(5, 2, "x"))).backward()
        assert E.weight.grad is not None and E.weight.grad.norm() > 0
        assert all(w.grad is None for w in DI.parameters())


# ---- the penalty -------------------------------------------------------------------------------


def test_penalty_by_hand() -> None:
    """A linear critic with the slope |(3, 4)| = 5 has the penalty (5 - 1)^2 at every point."""
    DI = network(2, ())
    with torch.no_grad():
        for w, value in zip(DI.parameters(), ([[3.0, 4.0]], [7.0]), strict=True):
            w.copy_(torch.tensor(value))
    z = features(5, 2, "z")
    assert discriminators.gradient_penalty(DI, z, generator("e")).item() == pytest.approx(16)
    half = HALVES["wassda", "target"]
    loss = discriminators.discriminator_loss(half, DI, z, 10.0, generator("e"))
    assert loss.item() == pytest.approx(DI(z).mean().item() + 10 / 2 * 16)
    logits = discriminators.discriminator_loss(
        HALVES["adda", "target"], DI, z, 10.0, generator("e")
    )
    assert logits.item() == pytest.approx(discriminators.called_target(DI(z)).item())  # no penalty


def test_penalty_matches_the_reference() -> None:
    DI, z = network(), features(8, 3, "z")
    found = discriminators.gradient_penalty(DI, z, generator("e"))
    draws = generator("e")
    partner = torch.randperm(8, generator=draws).tolist()
    e = torch.rand(8, 1, generator=draws)[:, 0].tolist()
    expected = twin.penalty(plain(DI), z.tolist(), partner, e)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_penalty_has_a_gradient_in_the_critic_even_where_it_is_flat() -> None:
    z = features(4, 3, "z").requires_grad_()
    DI = network()
    g = torch.autograd.grad(
        discriminators.gradient_penalty(DI, z, generator("e")),
        [z, *DI.parameters()],
        allow_unused=True,
    )
    assert g[0] is None  # the samples are held fixed
    assert g[1] is not None and g[1].norm() > 0
    with torch.no_grad():
        for w in DI.parameters():
            w.zero_()
    half = HALVES["wassda", "source"]
    flat = discriminators.flat_gradient(
        discriminators.discriminator_loss(half, DI, z, 10.0, generator("e")), DI
    )
    assert flat.isfinite().all()


# ---- schedule, accuracy, settings --------------------------------------------------------------


def test_reversal_by_hand() -> None:
    # q = log(3) / 10: 2 / (1 + 1/3) - 1 = 1/2
    assert growth(math.log(3) / 10) == pytest.approx(0.5)
    assert growth(0.0) == 0.0
    assert Reversal(strength=3.0).at(math.log(3) / 10) == pytest.approx(1.5)
    assert Reversal(strength=3.0, schedule="constant").at(0.0) == 3.0


@given(st.floats(0, 1))
def test_reversal_schedule_matches_the_paper(q: float) -> None:
    assert growth(q) == pytest.approx(twin.reversal(q), abs=1e-12)


def test_the_targets_model_stays_at_the_target_in_dils_by_default() -> None:
    pretrain, adapt = dils.METHOD.phases
    assert "target" not in pretrain.parts
    hop = adapt.hops["adapt"]
    leaves = hop["target"].leaves
    assert leaves.arrays == {} and set(leaves.optional) == {"model"}
    assert not dils.Config().share and dils.METHOD.stays(dils.Config())
    numbers = {"loss", "steps", "seconds", "discriminator-loss", "discriminator-accuracy"}
    numbers |= {"clipped"}
    assert leaves.numbers == numbers
    for method in (fdann, fwdgrl):
        hops = [hop for phase in method.METHOD.phases for hop in phase.hops.values()]
        parts = [part for hop in hops for part in hop.values()]
        assert [set(hop["source"].leaves.arrays) for hop in hops] == [{"model"}]
        assert [part.enters.arrays.get("model") for part in parts] == [Kind.MODEL] * 2
