"""Discriminators and the two halves of their losses, against naive references and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import (
    HALVES,
    Discriminator,
    DiscriminatorConfig,
    Loss,
    Reversal,
)
from fedda.config.sections import validate
from fedda.errors import ConfigError
from fedda.maths.schedule import growth
from fedda.settings import RunConfig
from fedda.train import generator
from fedda.wire import Role, packing
from fedda.wire.packing import Kind
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
    assert packing.pack(state, Kind.MODEL).manifest == discriminators.layout(6, sizes)
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


def test_initial_weights_are_distributed_as_in_torchs_linear_layers() -> None:
    found, usual = Discriminator(64, (400,)), nn.Linear(64, 400)
    first = found.layers[0]
    assert isinstance(first, nn.Linear)
    for a, b in zip(first.parameters(), usual.parameters(), strict=True):
        assert a.requires_grad
        assert float(a.detach().abs().max()) <= 1 / 8
        assert a.std().item() == pytest.approx(b.std().item(), rel=0.1)


@pytest.mark.parametrize("sizes", [(), (5, 4)])
def test_values_match_the_reference(sizes: tuple[int, ...]) -> None:
    DI, z = network(3, sizes), features(6, 3, "values")
    expected = [twin.value(plain(DI), row) for row in z.tolist()]
    assert DI(z).tolist() == pytest.approx(expected)


def test_a_flat_gradient_can_be_set_again() -> None:
    DI, z = network(), features(6, 3, "flat")
    g = discriminators.flat_gradient(DI(z).mean(), DI)
    assert g.shape == (discriminators.count(3, (5, 4)),)
    assert all(w.grad is None for w in DI.parameters())
    discriminators.set_gradient(DI, g)
    found = [w.grad.clone() for w in DI.parameters() if w.grad is not None]
    DI.zero_grad()
    DI(z).mean().backward()
    for ours, w in zip(found, DI.parameters(), strict=True):
        assert w.grad is not None and ours.equal(w.grad)
    discriminators.set_gradient(DI, g)
    for w in DI.parameters():
        assert w.grad is not None
        w.grad.zero_()
    assert g.abs().sum() > 0  # an optimizer may change the parameters' gradients, but not g


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
def test_halves_are_finite_however_sure_the_discriminator_is(loss: Loss) -> None:
    for role in ("source", "target"):
        half = HALVES[loss, role]
        for function in (half.discriminator, half.mapping):
            if function is None:
                continue
            v = torch.tensor([-1e4, 1e4], requires_grad=True)
            value = function(v)
            value.backward()
            assert value.isfinite() and v.grad is not None and v.grad.isfinite().all()
    v = torch.tensor([-1e4])
    assert float(discriminators.called_source(v)) == pytest.approx(1e4)  # no logarithm of 0 occurs


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


@pytest.mark.parametrize("loss", ["grl", "wassda"])
@pytest.mark.parametrize("role", ["source", "target"])
def test_reversal_is_the_negative_gradient_of_the_half(loss: Loss, role: Role) -> None:
    DI, z = network(), features(5, 3, "z").requires_grad_()
    half = HALVES[loss, role]
    (forward,) = torch.autograd.grad(half.discriminator(DI(z)), z)
    (backward,) = torch.autograd.grad(discriminators.reversed_loss(half, DI, z), z)
    torch.testing.assert_close(backward, -forward)
    if role == "target":  # eqs. 13 and 16 reverse the gradient in the same way
        (mapped,) = torch.autograd.grad(discriminators.mapping_loss(half, DI, z), z)
        torch.testing.assert_close(mapped, backward)


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


def test_the_penalty_draws_only_from_its_generator() -> None:
    DI, z = network(), features(8, 3, "z")
    before = torch.get_rng_state()
    first, second, other = (
        discriminators.gradient_penalty(DI, z, generator(name)).item() for name in "aab"
    )
    assert first == second != other
    assert torch.equal(torch.get_rng_state(), before)


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


def test_accuracy_by_hand() -> None:
    v = torch.tensor([2.0, -1.0, 0.5, 0.1])
    assert discriminators.accuracy(v, "source") == 0.75
    assert discriminators.accuracy(v, "target") == 0.25


def test_sizes_are_parsed() -> None:
    assert DiscriminatorConfig(sizes="500,20").hidden == (500, 20)
    assert DiscriminatorConfig(sizes="").hidden == ()
    for wrong in ("0", "5,", "5,x", "-1", "05", "100000"):
        with pytest.raises(ConfigError, match="sizes"):
            validate(DiscriminatorConfig, {"sizes": wrong})


def test_setting_one_value_of_the_network_keeps_the_others() -> None:
    """Also where a method has defaults of its own for a part that several methods have."""
    defaults = RunConfig.parse({}).options
    for method in ("dils", "fada", "fdann", "fwdgrl"):
        changed = RunConfig.parse({f"{method}.discriminator.lr": 0.5}).options[method]
        wanted = defaults[method].discriminator.model_copy(update={"lr": 0.5})
        assert changed.discriminator == wanted
