"""What the authors' own programs compute, as figures that came from running them on small inputs.

A twin in this folder can share a misreading with the code that it checks; these figures cannot.
`tests/reference/authors.json` has, for each program that is public, its address, its commit, the
part that ran, what went in and what came out. No program of the authors is public for FADA (DAL is
its parent) and for FRUDA's methods: f-DANN, f-WDGRL, f-DAN and DILS have no figures here.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedda.adversarial import disentangle
from fedda.adversarial.discriminators import called_source, called_target
from fedda.algorithms import kd3a, mdan, shot
from fedda.config import TrainConfig
from fedda.maths import optimal_transport, schedule
from fedda.train import learning_rate, make_optimizer

FIGURES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "reference" / "authors.json").read_text()
)


def tensors(figures: dict[str, Any], *names: str) -> list[Tensor]:
    return [torch.tensor(figures[name], dtype=torch.float64) for name in names]


# Their entropies are of p + 1e-5, and figures have seven digits.
def close(found: Tensor, wanted: Any, atol: float = 1e-4) -> None:
    wanted = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-4, atol=atol)


def moved(parameters: list[Tensor], loss: Tensor, lr: float) -> None:
    """One step of the optimizer that SHOT and DECISION share, at the rate after their last one."""
    train = TrainConfig(lr=lr, weight_decay=0.001, schedule="ganin", nesterov=True)
    optimizer = make_optimizer(parameters, train, learning_rate(train, 2, 2))
    loss.backward()
    optimizer.step()


def test_shot_takes_the_authors_step() -> None:
    """With the first of DECISION's models; the labels are those after both passes."""
    f, models = FIGURES["shot"], FIGURES["decision"]
    x, *every = tensors(models, "x", "B", "b", "C", "c")
    B, b, C, c = (each[0] for each in every)
    B.requires_grad_()
    z = x @ B.T + b
    logits = z @ C.T + c
    v = shot.points(z.detach(), "official")
    label, _ = shot.pseudo_labels(v, logits.detach().softmax(dim=1))
    assert label.tolist() == f["label"] != logits.argmax(dim=1).tolist()
    smooth = F.cross_entropy(logits, torch.tensor(f["y"]), label_smoothing=0.1)
    assert smooth.item() == pytest.approx(f["smooth"], rel=1e-5)
    moved([B], shot.target_loss(logits, label, f["beta"]), f["lr"])
    close(B, f["after"])


def test_kd3a_gives_the_authors_weights() -> None:
    f = FIGURES["kd3a"]
    x, W = tensors(f, "x", "W")
    p = torch.einsum("nd,kcd->knc", x, W).softmax(dim=2).transpose(0, 1)
    low, high = f["gates"]
    vote = kd3a.knowledge_vote(p, low, "hard")
    assert vote.p.argmax(dim=1).tolist() == f["label"]
    assert vote.n.tolist() == f["mask"] and 0 in f["mask"]
    (support,) = tensors(f, "support")
    close(vote.support[vote.kept], support[vote.kept].tolist())
    close(kd3a.consensus_focus(p, low, "hard", "shapley"), f["focus"])
    alpha: dict[str, float] = {}
    for t, (wanted, mean) in enumerate(zip(f["alpha"], f["mean"], strict=True), start=1):
        gate = schedule.gate(t, f["rounds"], low, high, reach=False)
        focus = kd3a.consensus_focus(p, gate, "hard", "shapley")
        kept = float(kd3a.knowledge_vote(p, gate, "hard").kept.double().mean())
        new = kd3a.domain_weights(focus, torch.ones(3), 1, by_examples=False, kept=kept)
        alpha = kd3a.smooth(alpha, dict(zip("tabc", new.tolist(), strict=True)), 0.9)
        assert list(alpha.values()) == pytest.approx(wanted, abs=2e-4)  # theirs have four digits
        assert sum(a * (k + 1) for k, a in enumerate(alpha.values())) == pytest.approx(
            mean, abs=1e-3
        )


def test_mdan_takes_the_authors_gradient() -> None:
    f = FIGURES["mdan"]
    net = {name: torch.tensor(t, dtype=torch.float64) for name, t in f["before"].items()}
    moving = [net[n].requires_grad_() for n in f["grad"]]
    (t,) = tensors(f, "t")

    def features(x: Tensor) -> Tensor:
        return F.linear(x, net["hiddens.0.weight"], net["hiddens.0.bias"]).relu()

    def value(j: int, z: Tensor) -> Tensor:
        """Their two logits as one: how much more the source's."""
        both = F.linear(z, net[f"domains.{j}.weight"], net[f"domains.{j}.bias"])
        return both[:, 1] - both[:, 0]

    CE, d = [], []
    for j, (x, y) in enumerate(zip(f["x"], f["y"], strict=True)):
        z = features(torch.tensor(x, dtype=torch.float64))
        logits = F.linear(z, net["softmax.weight"], net["softmax.bias"])
        CE.append(F.cross_entropy(logits, torch.tensor(y)))
        d.append(called_source(value(j, z)) + called_target(value(j, features(t))))
    every = torch.stack(CE), torch.stack(d)
    close(every[0], f["CE"])
    close(every[1], f["d"])
    w = mdan.weights(mdan.domain_losses(*every, f["mu"], "code").detach(), f["gamma"], "soft")
    loss = (w * (every[0] - f["mu"] * every[1])).sum()
    for found, wanted in zip(torch.autograd.grad(loss, moving), f["grad"].values(), strict=True):
        close(found, wanted, atol=1e-6)


def test_fadas_losses_are_those_of_its_parent() -> None:
    f = FIGURES["dal"]
    p, q, w, rebuilt = tensors(f, "p", "q", "w", "rebuilt")

    class M(nn.Module):
        def forward(self, p: Tensor, q: Tensor) -> Tensor:
            return (p * q * w).sum(dim=1)

    class R(nn.Module):
        def forward(self, both: Tensor) -> Tensor:
            return rebuilt

    found = disentangle.information(M(), p, q, torch.tensor(f["order"]))
    assert found.item() == pytest.approx(f["information"], abs=1e-5)
    lost = disentangle.reconstruction(R(), p, q, p).item()
    assert lost == pytest.approx(f["reconstruction"], abs=1e-5)


def test_feddadils_transport_is_that_of_its_authors() -> None:
    f = FIGURES["dadil"]
    z, y, x, labels, alpha, v = tensors(f, "z", "y", "x", "labels", "alpha", "v")
    cost, _ = optimal_transport.labelled_cost(optimal_transport.feature_cost(z[0], x), y[0], labels)
    plan = optimal_transport.solve(cost)
    assert optimal_transport.moved_cost(plan, cost) == pytest.approx(f["labelled"], rel=1e-5)
    found, b, _ = optimal_transport.reconstruction(z, y, alpha, x, labels, most=20)
    close(b.z, f["barycenter"])
    close(b.y, f["barycenter_y"])
    assert found.loss == pytest.approx(f["loss"], rel=1e-5)
    close(found.z, f["grad_z"])
    close(found.alpha, f["grad_alpha"])
    close(optimal_transport.project_simplex(v), f["simplex"])
    assert math.isclose(sum(f["simplex"]), 1)
