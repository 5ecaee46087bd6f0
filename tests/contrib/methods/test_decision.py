"""DECISION: SHOT's models adapt together, by weights that the target learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, optim
from torch.nn import functional as F

from clients.site.memory import resident
from fedda import models
from fedda.algorithms import shot
from fedda.config import ModelConfig
from fedda.contrib.methods.decision import algorithm as decision
from fedda.data import load_target
from fedda.train import generator, round_images, seed_for
from tests.local_grid import CLASSES, SIDE, SOURCES, Node, ScriptedGrid, run
from tests.reference import shot as twin
from tests.test_shot import sent_models, with_state

DECISION: dict[str, Any] = {"method": "decision", "rounds": 3, "decision.epochs": 3}
DECISION |= {"train.lr": 0.05, "train.momentum": 0.9, "run.name": "d"}


def test_the_nearest_weighted_centroid_by_hand() -> None:
    """The first model sees an image as class 0, the second as class 1: the weights decide."""
    v = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # (K, N, d)
    mu = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]] * 2)  # (K, C, d)
    assert decision.nearest_together(v, mu, torch.tensor([0.9, 0.1])).tolist() == [0]
    assert decision.nearest_together(v, mu, torch.tensor([0.1, 0.9])).tolist() == [1]
    # (.6, .4) is nearer to (1, 0) than to (0, 1), unless class 0 has no image.
    w = torch.tensor([0.6, 0.4])
    assert decision.nearest_together(v, mu, w).tolist() == [0]
    mu[:, 0] = 0
    assert decision.nearest_together(v, mu, w).tolist() == [1]


def test_labels_are_those_of_plain_loops() -> None:
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        z = torch.randn(3, 12, 4, generator=draws, dtype=torch.float64)
        p = (2 * torch.randn(3, 12, 5, generator=draws, dtype=torch.float64)).softmax(dim=2)
        w = torch.randn(3, generator=draws, dtype=torch.float64).softmax(dim=0)
        v = torch.stack([shot.points(each, "official") for each in z])
        mu = torch.stack([shot.pseudo_labels(*pair)[1] for pair in zip(v, p, strict=True)])
        plain = [[twin.unit_with_one(row) for row in each] for each in z.tolist()]
        found = [twin.labels(rows, q)[1] for rows, q in zip(plain, p.tolist(), strict=True)]
        centroids = [[row or [0.0] * 5 for row in of_model] for of_model in found]
        wanted = twin.together(plain, centroids, w.tolist())
        assert decision.nearest_together(v, mu, w).tolist() == wanted


def loop_of_the_target(
    sources: dict[str, dict[str, Tensor]], node: Node, a: Tensor, ratio: bool, estimated: bool
) -> tuple[list[models.Model], Tensor]:
    """Adapt all models and their weights in one loop, rounds 2 and 3 -> models, weights."""
    site = resident(tuple(sorted(node.items())))
    x = load_target(node["data"], size=SIDE).x.float() / 255
    every = []
    for weights in sources.values():
        model = models.build(ModelConfig(name="mlp", hidden="16"), (1, SIDE, SIDE), CLASSES, seed=0)
        model.load_state_dict(weights)
        every.append(model)
    q = torch.full((CLASSES,), 1 / CLASSES)
    if estimated:  # by the weighted logits, as DECISION predicts
        w = a.sigmoid() / a.sigmoid().sum() if ratio else a.softmax(dim=0)
        with torch.no_grad():
            p = torch.stack([m.eval()(x) for m in every])
        q = torch.einsum("k,knc->nc", w, p).softmax(dim=1).sum(dim=0) + 0.3
        q = q / q.sum()
    a = a.clone().requires_grad_()
    learnt = [p for m in every for p in m.encoder.parameters()]
    optimizer = optim.SGD([*learnt, a], lr=0.05, momentum=0.9)
    for t in (2, 3):
        (share,) = round_images(site.blocks.blocks, t, 1, seed_for(0, "town"))
        points, centroids = [], []
        for model in every:
            model.eval()
            with torch.no_grad():
                z = model.features(x)
                p = model.head(z).softmax(dim=1)
            points.append([twin.unit_with_one(row) for row in z.tolist()])
            found = twin.labels(points[-1], p.tolist())[1]
            centroids.append([row or [0.0] * (z.shape[1] + 1) for row in found])
            model.train()
        for part in share.split(16):
            w = a.sigmoid() / a.sigmoid().sum() if ratio else a.exp() / a.exp().sum()
            seen = [[rows[i] for i in part.tolist()] for rows in points]
            label = torch.tensor(twin.together(seen, centroids, w.tolist()))
            logits = sum(w[k] * m(x[part]) for k, m in enumerate(every))
            assert isinstance(logits, Tensor)
            p = logits.softmax(dim=1)
            mean = p.mean(dim=0)
            loss = -(p * p.log()).sum(dim=1).mean() + (mean * (mean / (CLASSES * q)).log()).sum()
            loss = loss + 0.4 * F.cross_entropy(logits, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    w = a.sigmoid() / a.sigmoid().sum() if ratio else a.softmax(dim=0)
    return [m.eval() for m in every], w.detach()


@pytest.mark.parametrize(
    ("weights", "shares"), [("softmax", "even"), ("ratio", "even"), ("softmax", "estimated")]
)
def test_the_target_computes_the_same_as_one_loop(
    domains: list[Node], tmp_path: Path, weights: str, shares: str
) -> None:
    nodes = with_state(domains, tmp_path)
    grid = ScriptedGrid(nodes)
    settings = DECISION | {"decision.beta": 0.4, "decision.weights": weights}
    settings |= {"train.schedule": "constant", "run.dir": str(tmp_path / "runs")}
    settings["decision.shares"] = shares
    (training,) = run(nodes, settings, grid=grid)[0]["trainings"]["decision"]
    target = next(node for node in nodes if node["name"] == "town")
    a = torch.ones(3)
    if weights == "ratio":
        a = 2 * torch.rand(3, generator=generator(0, "town", 2, "weights")) - 1
    about = weights == "ratio", shares == "estimated"
    wanted, w = loop_of_the_target(sent_models(grid), target, a, *about)
    file = tmp_path / "state" / training["adapted"]["file"]
    found = load_file(file)
    for k, model in enumerate(wanted):
        for entry, value in model.encoder.state_dict().items():
            mine = found[f"encoder.members.{k}.{entry}"]
            torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-4)
    # The server reports the weights by source, and they are no longer those of the beginning.
    told = training["rounds"][-1]["weights"]
    torch.testing.assert_close(torch.tensor([told[s] for s in SOURCES]), w, rtol=1e-3, atol=1e-4)
    assert sum(told.values()) == pytest.approx(1, abs=1e-5)
    assert len({round(share, 5) for share in told.values()}) > 1
    # The file predicts by the weighted logits.
    x = load_target(target["data"], size=SIDE).x
    logits = [m(x.float() / 255) for m in wanted]
    p = torch.stack([share * each for share, each in zip(w, logits, strict=True)]).sum(dim=0)
    torch.testing.assert_close(
        models.predict(models.load(file)[0], x), p.softmax(dim=1).detach(), rtol=1e-2, atol=1e-3
    )
