"""Co-MDA: its formulas by hand and as plain loops, and two networks that learn from answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, optim

from clients.site.memory import resident
from fedda import models
from fedda.config import ModelConfig
from fedda.contrib.methods.comda import algorithm as comda
from fedda.contrib.methods.comda.client import redrawn
from fedda.contrib.methods.decision import algorithm as decision
from fedda.data import load_target
from fedda.train import generator, round_images, seed_for
from tests.local_grid import CLASSES, SIDE, SOURCES, Node, ScriptedGrid, run
from tests.reference import comda as twin
from tests.test_model_cache import Forgetful
from tests.test_shot import sent_models, with_state

COMDA: dict[str, Any] = {"method": "comda", "rounds": 5, "comda.epochs": 6, "train.lr": 0.05}
COMDA |= {"train.schedule": "constant", "train.momentum": 0.0, "run.name": "c"}
MLP = ModelConfig(name="mlp", hidden="16")


def close(found: Tensor | float, wanted: Any) -> None:
    found = torch.as_tensor(found)
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=found.dtype))


def test_otsus_variance_by_hand() -> None:
    """Two pairs, .7 apart in their means: 1/2 1/2 .7^2; any other threshold has less."""
    c = torch.tensor([[0.8, 0.1, 0.9, 0.2], [0.5, 0.5, 0.5, 0.5]])
    close(comda.between_classes(c), [0.1225, 0.0])
    close(comda.between_classes(c[:, :1]), [0.0, 0.0])


def test_the_consensus_over_three_rounds_by_hand() -> None:
    """Answers 1, 0, 1: .4 / .4, then .24 / .64, then .544 / .784."""
    wanted = {"sum": (1.0, 0.375, 0.544 / 0.784), "corrected": (1.0, 0.9375, 0.9625 / 0.784)}
    for carried in ("sum", "corrected"):
        Z = torch.zeros(1, 1, dtype=torch.float64)
        for t, (p, result) in enumerate(zip((1, 0, 1), wanted[carried], strict=True), start=1):
            Z, consensus = comda.agreed(Z, torch.full_like(Z, p), t, carried)
            close(consensus, [[result]])


def test_the_share_that_is_kept_by_hand() -> None:
    """Forgetting .2 in the first half, then less and less, and nothing in the last round."""
    shares = [comda.kept_share(done, 0.2) for done in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert shares == pytest.approx([0.8, 0.8, 0.8, 0.9, 1.0])
    assert [comda.kept(10, share, 2) for share in shares] == [8, 8, 8, 9, 10]
    # A site's smallest step is a bound, and no more images than there are can be kept.
    assert [comda.kept(10, 0.2, 5), comda.kept(3, 0.2, 5), comda.kept(10, 0.7, 2)] == [5, 3, 7]


def test_each_network_learns_what_the_other_finds_easy_by_hand() -> None:
    """The first is right about image 0 and wrong about 1, the second the other way round."""
    label = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    logits = torch.tensor([[[30.0, 0.0], [0.0, 30.0]], [[0.0, 30.0], [30.0, 0.0]]])
    logits.requires_grad_()
    losses = comda.co_teaching_loss(logits, label, 1)
    close(losses.detach(), [30.0, 30.0])  # each is given the image that it is wrong about
    losses.sum().backward()
    assert logits.grad is not None
    close(logits.grad.abs().sum(dim=2) > 0.5, [[False, True], [True, False]])
    close(comda.co_teaching_loss(logits, label, 2).detach(), [15.0, 15.0])


def test_formulas_are_those_of_plain_loops() -> None:
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(3, 11, 4, generator=draws, dtype=torch.float64)
        p = logits.softmax(dim=2)
        c = p.amax(dim=2).mul(5).round().div(5)  # with ties
        close(comda.between_classes(c), [twin.between_classes(row) for row in c.tolist()])
        close(comda.source_weights(p), twin.weights(p.tolist()))
        count = seed % 11 + 1
        wanted = twin.co_teaching(logits[:2].tolist(), p[2].tolist(), count)
        close(comda.co_teaching_loss(logits[:2], p[2], count), wanted)
        for carried in ("sum", "corrected"):
            Z = consensus = torch.zeros_like(p[0])
            for t, answers in enumerate(p, start=1):
                Z, consensus = comda.agreed(Z, answers, t, carried)
            close(consensus, twin.consensus(p.tolist(), carried))


def loop_of_the_target(
    sources: dict[str, dict[str, Tensor]], node: Node, rounds: list[int], forget: float
) -> tuple[list[models.Model], list[float]]:
    """Train both networks on what the sources' models say, in a loop -> networks, weights."""
    site = resident(tuple(sorted(node.items())))
    x = load_target(node["data"], size=SIDE).x
    shape = (1, SIDE, SIDE)
    p = []
    for weights in sources.values():
        model = models.build(MLP, shape, CLASSES, seed=0)
        model.load_state_dict(weights)
        p.append(models.predict(model, x))
    w = twin.weights(torch.stack(p).tolist())
    mean = sum(share * each for share, each in zip(w, p, strict=True))
    assert isinstance(mean, Tensor)
    own = generator(0, "town", rounds[0], "second").initial_seed()
    both = [models.build(MLP, shape, CLASSES, seed=seed) for seed in (0, own)]
    optimizer = optim.SGD([q for model in both for q in model.train().parameters()], lr=0.05)
    for i, t in enumerate(rounds):
        label = torch.tensor(twin.consensus([mean.tolist()] * (i + 1), "sum"))
        kept = 1 - (1 - max(0.0, 2 * i / (len(rounds) - 1) - 1)) * forget
        draws = generator(0, "town", t, "mixup")
        beta = np.random.default_rng(draws.initial_seed())
        (images,) = round_images(site.blocks.blocks, t, 1, seed_for(0, "town"))
        for part in images.split(16):
            lam = float(beta.beta(0.3, 0.3))
            lam = max(lam, 1 - lam)
            other = part[torch.randperm(len(part), generator=draws)]
            mixed = lam * x[part].float() / 255 + (1 - lam) * x[other].float() / 255
            q = lam * label[part] + (1 - lam) * label[other]
            losses = [-(q * model(mixed).log_softmax(dim=1)).sum(dim=1) for model in both]
            n = int(kept * len(part) + 1e-9)
            chosen = [each.detach().argsort()[:n] for each in losses]
            optimizer.zero_grad()
            (losses[0][chosen[1]].mean() + losses[1][chosen[0]].mean()).backward()
            optimizer.step()
    return [model.eval() for model in both], w


@pytest.mark.parametrize("sources", [SOURCES, SOURCES[:2]])
def test_the_target_computes_the_same_as_one_loop(
    domains: list[Node], tmp_path: Path, sources: list[str]
) -> None:
    """With as many networks as sources, too: both are kept side by side, and stay apart."""
    nodes = with_state([n for n in domains if n["name"] in (*sources, "town")], tmp_path)
    grid = ScriptedGrid(nodes)
    settings = COMDA | {"comda.forget": 0.4, "run.dir": str(tmp_path / "runs")}
    settings |= {"run.expect": len(nodes)}
    (training,) = run(nodes, settings, grid=grid)[0]["trainings"]["comda"]
    target = next(node for node in nodes if node["name"] == "town")
    wanted, w = loop_of_the_target(sent_models(grid), target, [2, 3, 4, 5], 0.4)
    file = tmp_path / "state" / training["adapted"]["file"]
    found = load_file(file)
    for k, model in enumerate(wanted):
        mine = {n: found[f"encoder.members.{k}.{n}"] for n in model.encoder.state_dict()}
        for name, value in model.encoder.state_dict().items():
            torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-4)
        for name, value in model.head.state_dict().items():
            torch.testing.assert_close(found[f"head.{name}"][k], value, rtol=1e-3, atol=1e-4)
    told = training["rounds"][-1]["weights"]
    assert [told[s] for s in sources] == pytest.approx(w, abs=1e-3)
    # The file predicts by the mean of both networks' probabilities.
    x = load_target(target["data"], size=SIDE).x
    mean = torch.stack([models.predict(m, x) for m in wanted]).mean(dim=0)
    torch.testing.assert_close(models.predict(models.load(file)[0], x), mean, rtol=1e-3, atol=1e-3)


def test_a_target_that_restarts_goes_on_as_if_it_had_not(
    domains: list[Node], tmp_path: Path
) -> None:
    found = []
    for name, forgets in (("whole", ()), ("restarts", (3, 4))):
        nodes = with_state(domains, tmp_path / name)
        grid = Forgetful(nodes)
        grid.forgets = forgets
        settings = COMDA | {"rounds": 4, "comda.epochs": 2, "run.dir": str(tmp_path / name)}
        (training,) = run(nodes, settings, grid=grid)[0]["trainings"]["comda"]
        found.append(load_file(tmp_path / name / "state" / training["adapted"]["file"]))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def adapted(domains: list[Node], folder: Path, **more: Any) -> dict[str, Tensor]:
    """What the target has after a short run with further settings."""
    settings = COMDA | {"rounds": 3, "comda.epochs": 2, "run.dir": str(folder / "runs")}
    settings |= {"model.bottleneck": 8}  # its BatchNorm answers in another way in training
    settings |= {f"comda.{name}": value for name, value in more.items()}
    (training,) = run(with_state(domains, folder), settings)[0]["trainings"]["comda"]
    return load_file(folder / "state" / training["adapted"]["file"])


def test_heads_that_stay_as_drawn(domains: list[Node], tmp_path: Path) -> None:
    config = ModelConfig(name="mlp", hidden="16", bottleneck=8)
    first = models.build(config, (1, SIDE, SIDE), CLASSES, seed=0).head.weight.detach()
    drawn = adapted(domains, tmp_path / "drawn", heads="drawn")
    learnt = adapted(domains, tmp_path / "learnt")
    assert torch.equal(drawn["head.weight"][0], first)
    assert not torch.equal(learnt["head.weight"][0], first)
    assert not torch.equal(drawn["head.weight"][1], first)
    for found in (drawn, learnt):
        assert torch.equal(found["head.a"], torch.ones(2))


@pytest.mark.parametrize("pretrained", [False, True])
def test_the_second_network_has_draws_of_its_own_but_for_pretrained_layers(
    pretrained: bool,
) -> None:
    config = ModelConfig(name="mlp", hidden="6", bottleneck=4)
    begun = models.to_arrays(models.build(config, (5,), 3, seed=0))
    other = models.blank(config, (5,), 3, seed=1)
    other.pretrained = pretrained
    found = redrawn(begun, other)
    matrices = {name for name, array in begun.items() if array.ndim == 2}
    same = {name for name in matrices if np.array_equal(found[name], begun[name])}
    network = {name for name in matrices if name.startswith("encoder.network.")}
    assert network and same == (network if pretrained else set())


def test_each_setting_changes_what_is_learnt(domains: list[Node], tmp_path: Path) -> None:
    plain = adapted(domains, tmp_path / "plain")
    others: list[dict[str, Any]] = [{"carried": "corrected"}, {"mixup": 0.0}]
    for other in (*others, {"forget": 0.6}, {"answers": "training"}):
        changed = adapted(domains, tmp_path / "".join(other), **other)
        assert any(not torch.equal(plain[n], changed[n]) for n in plain), other


def test_what_may_cross(domains: list[Node], tmp_path: Path) -> None:
    """What crosses with DECISION, and the model from which the first network begins."""
    assert [p.hops for p in comda.METHOD.phases] == [p.hops for p in decision.METHOD.phases]
    grid = ScriptedGrid(domains)
    results, _ = run(domains, COMDA | {"rounds": 3, "run.dir": str(tmp_path)}, grid=grid)
    assert results["events"] == []
    crossed = [c for c in grid.crossed if c.kind != "query"]
    came = [set(c.arrays) for c in crossed if (c.way, c.hop) == ("to", "adapt")]
    assert came == [{"model", *(f"model/{s}" for s in SOURCES)}, set()]
    assert not any(c.arrays for c in crossed if (c.way, c.hop) == ("from", "adapt"))
    told = [c.numbers for c in crossed if (c.way, c.hop) == ("from", "adapt")]
    every = {"loss", "steps", "seconds", *(f"weight/{s}" for s in SOURCES)}
    assert told == [every, every]
    asked = {(c.site, c.hop) for c in crossed if c.way == "to"}
    assert asked == {*((s, "train") for s in SOURCES), ("town", "adapt"), ("town", "test")}
