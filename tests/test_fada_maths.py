"""FADA's formulas against a naive twin, by hand, and against values known in closed form."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedda.adversarial.discriminators import (
    Discriminator,
    discriminator_loss,
    flat_gradient,
    mapping_loss,
)
from fedda.adversarial.disentangle import (
    Estimator,
    Layers,
    Remote,
    branch,
    class_identifier,
    information,
    negative_entropy,
    reconstruction,
)
from fedda.algorithms import fada
from fedda.config.sections import validate
from fedda.errors import ConfigError, ModelError
from fedda.train import generator
from strategies.fada import moved, start
from tests.reference import fada as twin


def drawn(*shape: int, name: str = "fada") -> Tensor:
    return torch.randn(*shape, generator=generator(name, *shape))


# ---- confusion, eq. 7 --------------------------------------------------------------------------


def test_confusion_by_hand() -> None:
    """Two classes: at even odds the entropy is log 2; with odds of 3 to 1, 0.5623."""
    even, odd = torch.zeros(3, 2), torch.tensor([[math.log(3), 0.0]])
    assert float(negative_entropy(even)) == pytest.approx(-math.log(2))
    assert float(negative_entropy(odd)) == pytest.approx(-0.5623351, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_confusion_equals_the_twins(seed: int) -> None:
    logits = 3 * drawn(6, 4, name=f"{seed}")
    rows = logits.double().tolist()
    assert float(negative_entropy(logits)) == pytest.approx(twin.minus_entropy(rows), rel=1e-5)


def test_lower_confusion_means_a_more_even_prediction() -> None:
    logits = (2 * drawn(20, 3)).requires_grad_()
    moves = torch.optim.SGD([logits], lr=5.0)
    for _ in range(300):
        moves.zero_grad()
        negative_entropy(logits).backward()
        moves.step()
    assert float(logits.detach().softmax(dim=1).max()) < 0.45


# ---- mutual information, eq. 8 -----------------------------------------------------------------


class Product(nn.Module):
    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        return (p * q).sum(dim=1)


def test_information_by_hand() -> None:
    """M(p, q) = p q is 1 for the pairs (1, 1) and (-1, -1), and -1 after the exchange of q."""
    x, swap = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    assert float(information(Product(), x, x, swap)) == pytest.approx(2.0)
    assert float(information(Product(), x, x, torch.tensor([0, 1]))) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_information_equals_the_twins(seed: int) -> None:
    torch.manual_seed(seed)
    M, p, q = Estimator(3, 3, 5).double(), torch.randn(7, 3).double(), torch.randn(7, 3).double()
    shuffle = torch.randperm(7)

    def value(a: list[float], b: list[float]) -> float:
        with torch.no_grad():
            return float(M(torch.tensor([a]).double(), torch.tensor([b]).double()))

    wanted = twin.information(value, p.tolist(), q.tolist(), shuffle.tolist())  # type: ignore[arg-type]
    assert float(information(M, p, q, shuffle).detach()) == pytest.approx(wanted, rel=1e-9)


def test_information_of_large_values_does_not_overflow() -> None:
    x = torch.full((4, 1), 20.0)
    assert float(information(Product(), x, x, torch.arange(4))) == pytest.approx(0.0, abs=1e-3)


def estimated(rho: float) -> float:
    """The estimate after training M on pairs of two Gaussians each with this correlation."""
    torch.manual_seed(0)
    draws, M = generator("gaussians"), Estimator(1, 1, 64)
    moves = torch.optim.Adam(M.parameters(), lr=0.005)

    def pairs(n: int) -> tuple[Tensor, Tensor, Tensor]:
        p, noise = torch.randn(2, n, 1, generator=draws)
        q = rho * p + math.sqrt(1 - rho**2) * noise
        return p, q, torch.randperm(n, generator=draws)

    for _ in range(400):
        moves.zero_grad()
        (-information(M, *pairs(1024))).backward()
        moves.step()
    with torch.no_grad():
        return float(information(M, *pairs(50_000)))


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_the_estimate_approaches_the_known_value_for_gaussians(rho: float) -> None:
    """I = -log(1 - rho^2) / 2: 0, 0.223 and 0.830 nats; MINE's bound comes from below."""
    known = -0.5 * math.log(1 - rho**2)
    assert known - 0.12 < estimated(rho) < known + 0.04


# ---- reconstruction and networks ---------------------------------------------------------------


def test_reconstruction_is_the_mean_square_and_leaves_the_features_alone() -> None:
    R = nn.Linear(2, 2, bias=False)
    R.weight.data = torch.eye(2)
    f_di, f_ds = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [2.0]])
    z = torch.tensor([[1.0, 2.0], [0.0, 2.0]], requires_grad=True)
    loss = reconstruction(R, f_di.requires_grad_(), f_ds, z)
    assert float(loss.detach()) == pytest.approx((0 + 4 + 4 + 0) / 4)
    loss.backward()
    assert z.grad is None and f_di.grad is not None


def shapes(module: nn.Module) -> list[str]:
    def text(m: nn.Module) -> str:
        if isinstance(m, nn.Linear):
            return f"FC {m.in_features} {m.out_features}"
        return f"{type(m).__name__} {m.p}" if isinstance(m, nn.Dropout) else type(m).__name__

    return [text(m) for m in module.modules() if not isinstance(m, nn.Sequential)]


@pytest.mark.parametrize(
    ("preset", "d", "wanted"),
    [
        ("paper", 8192, ["FC 8192 3072", "FC 3072 2048"]),
        ("paper-amazon", 128, ["FC 128 64", "FC 64 32"]),
        ("paper-photos", 2048, ["FC 2048 2048", "FC 2048 2048"]),
    ],
)
def test_the_presets_layers_are_those_of_tables_6_to_8(
    preset: str, d: int, wanted: list[str]
) -> None:
    values = {k: v for k, v in fada.PRESETS[preset].items() if k.startswith("layers.")}
    layers = validate(Layers, {k.removeprefix("layers."): v for k, v in values.items()})
    with torch.device("meta"):
        D = branch(d, layers.widths, layers.dropout, layers.dropout_first)
        CI = class_identifier(layers.widths[-1], 10, layers.class_norm)
        M = Estimator(layers.widths[-1], layers.widths[-1], layers.estimator)
    norm = ["BatchNorm1d", "ReLU"]
    first = ["Dropout 0.5"] * (preset == "paper-photos")
    assert shapes(D) == [*first, wanted[0], *norm, "Dropout 0.5", wanted[1], *norm]
    m, units = layers.widths[-1], {"paper-amazon": 16}.get(preset, 512)
    assert shapes(CI) == [f"FC {m} 10", "BatchNorm1d"]
    assert shapes(M)[1:] == [f"FC {m} {units}", f"FC {m} {units}", f"FC {units} 1"]


def test_a_classifier_without_its_disentangler_refuses_features() -> None:
    head = Remote(3, 2)
    with pytest.raises(ModelError, match="no disentangler, which never leaves its site"):
        head(torch.zeros(1, 3))
    z = drawn(4, 3)
    torch.testing.assert_close(head.classified(z), z @ head.weight.T + head.bias)


# ---- alignment, eqs. 4 and 5 -------------------------------------------------------------------


def test_the_exchanged_halves_sum_to_the_central_gradient() -> None:
    """Both of DI's loss, whose halves leave the sites, and of the features' loss."""
    DI = Discriminator(5, (4,), seed=3).double()
    z = {"source": drawn(8, 5).double(), "target": drawn(6, 5).double() + 1}
    wanted = flat_gradient(twin.eq_4(DI, z["source"], z["target"]), DI)
    sent = [flat_gradient(discriminator_loss(fada.HALVES[s], DI, z[s]), DI) for s in z]  # type: ignore[index]
    torch.testing.assert_close(sum(sent), wanted)

    leaf = {side: v.clone().requires_grad_() for side, v in z.items()}
    whole = twin.eq_5(DI, leaf["source"], leaf["target"])
    grads = torch.autograd.grad(whole, list(leaf.values()))
    for side, g in zip(leaf, grads, strict=True):
        at = z[side].clone().requires_grad_()
        mapping_loss(fada.HALVES[side], DI, at).backward()  # type: ignore[index]
        torch.testing.assert_close(at.grad, g)
    assert all(p.grad is None for p in DI.parameters())


def test_alignment_by_hand() -> None:
    """Where DI gives 3/4: -log 3/4 if the label says source, -log 1/4 if it says target."""
    v = torch.tensor([math.log(3)])
    as_source, as_target = -math.log(0.75), -math.log(0.25)
    halves = fada.HALVES
    assert float(halves["source"].discriminator(v)) == pytest.approx(as_source)
    assert float(halves["target"].discriminator(v)) == pytest.approx(as_target)
    for side in ("source", "target"):
        assert float(halves[side].mapping(v)) == pytest.approx(as_source)  # type: ignore[misc]


# ---- line 16 -----------------------------------------------------------------------------------


def test_the_next_model_by_hand() -> None:
    """Sent 0, the target's own 1, sources 2 and 4 with weights 1/4 and 3/4: 1 + 0.5 + 3."""

    def model(encoder: float, variance: float, steps: int) -> dict[str, np.ndarray]:
        one = np.ones(2, np.float32)
        names = ("encoder.w", "head.weight")
        return {n: encoder * one for n in names} | {
            "encoder.running_var": variance * one,
            "encoder.count": np.array(steps),
        }

    sent, own = model(0, 1, 0), model(1, 5, 3)
    sources = {"a": model(2, 2, 7), "b": model(4, 4, 6)}
    w = {"a": 0.25, "b": 0.75}
    found = moved(start(sent, own), sent, sources, w)
    assert found["encoder.w"].tolist() == [4.5, 4.5]
    assert found["head.weight"].tolist() == [3.5, 3.5]  # the target trains no head
    assert found["encoder.running_var"].tolist() == [3.5, 3.5]
    assert found["encoder.count"] == 7
    assert moved(start(sent, None), sent, sources, w)["encoder.w"].tolist() == [3.5, 3.5]
    assert all(found[n].dtype == a.dtype for n, a in sent.items())


@pytest.mark.parametrize("own", [True, False])
def test_the_next_model_equals_the_twins(own: bool) -> None:
    names = ("encoder.w", "encoder.running_mean", "head.weight")
    states = {s: {n: drawn(3, 2, name=f"{s}{n}") for n in names} for s in ("0", "T", "a", "b")}
    arrays = {s: {n: t.numpy() for n, t in of.items()} for s, of in states.items()}
    w, theta_T = {"a": 0.3, "b": 0.7}, states["T"] if own else None
    wanted = twin.updated(states["0"], theta_T, {s: states[s] for s in w}, w, statistics="mean")
    base = start(arrays["0"], arrays["T"] if own else None)
    found = moved(base, arrays["0"], {s: arrays[s] for s in w}, w)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-6, atol=1e-7)


def test_the_alignment_grows_as_ganin_says() -> None:
    weights = fada.LossWeights(alignment=2.0)
    wanted = [2 * (2 / (1 + math.exp(-10 * q)) - 1) for q in (0.0, 0.1, 1.0)]
    assert [weights.alignment_at(q) for q in (0.0, 0.1, 1.0)] == pytest.approx(wanted)
    assert fada.LossWeights(alignment=2.0, schedule="constant").alignment_at(0.0) == 2


def test_layers_are_sizes_with_commas() -> None:
    for bad in ("", "0", "12,", "a"):
        with pytest.raises(ConfigError, match="disentangler"):
            validate(Layers, {"disentangler": bad}, "fada.layers")
