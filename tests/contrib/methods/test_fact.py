"""FACT: the discrepancy, a whole round against one loop, and what crosses."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from clients.site.memory import resident
from fedda import models, records
from fedda.config import ModelConfig
from fedda.contrib.methods.fact import algorithm as fact
from fedda.contrib.methods.fact.client import Answer
from fedda.data import Labelled, load_source, load_target
from fedda.errors import ConfigError, QuorumError
from fedda.train import round_images, seed_for
from tests.local_grid import (
    CLASSES,
    SIDE,
    SOURCES,
    Bench,
    Node,
    ScriptedGrid,
    assert_close,
    never,
    run,
)
from tests.reference import fact as twin
from tests.test_shot import with_state

FACT: dict[str, Any] = {"train.momentum": 0.9, "train.lr": 0.05, "train.schedule": "constant"}
FACT |= {"model.bottleneck": 6}


def test_the_discrepancy_by_hand() -> None:
    """Heads that say 3 to 1 and 1 to 3 differ by one half in each class."""
    one = torch.tensor([[math.log(3.0), 0.0]])
    assert fact.discrepancy(one, -one).item() == pytest.approx(0.5)
    assert fact.discrepancy(one, one + 7).item() == pytest.approx(0, abs=1e-6)
    # Softmax twice of (3/4, 1/4): 1 / (1 + exp(-1/2)); never more than that of (1, 0).
    wanted = 2 / (1 + math.exp(-0.5)) - 1
    assert fact.discrepancy(one, -one, "twice").item() == pytest.approx(wanted)


@pytest.mark.parametrize("softmax", ["once", "twice"])
def test_the_discrepancy_is_that_of_plain_loops(softmax: fact.Softmax) -> None:
    draws = torch.Generator().manual_seed(2)
    one, other = (2 * torch.randn(9, 5, generator=draws, dtype=torch.float64) for _ in range(2))
    wanted = twin.discrepancy(one.tolist(), other.tolist(), softmax == "twice")
    assert fact.discrepancy(one, other, softmax).item() == pytest.approx(wanted)
    answers = fact.answers(one, softmax)
    assert torch.equal(answers, one if softmax == "once" else one.softmax(dim=1))


def batches_of(node: Node, size: int = 16) -> list[tuple[Tensor, Tensor | None]]:
    """The batches of a site's first round."""
    site = resident(tuple(sorted(node.items())))
    data = (load_source if node["role"] == "source" else load_target)(node["data"], size=SIDE)
    (share,) = round_images(site.blocks.blocks, 1, 1, seed_for(0, str(node["name"])))
    y = data.y if isinstance(data, Labelled) else None
    parts = [part for part in share.split(size) if len(part) > 1]
    return [(data.x[p].float() / 255, None if y is None else y[p]) for p in parts]


def one_loop(
    start: models.Model, nodes: dict[str, Node], pair: list[str], twice: bool, refit: bool
) -> dict[str, Tensor]:
    """One round of FACT with all data in one place -> the next model."""

    def sgd(half: nn.Module) -> optim.Optimizer:
        return optim.SGD(half.parameters(), lr=0.05, momentum=0.9)

    def fit(model: models.Model, half: nn.Module, name: str) -> None:
        model.train()
        optimizer = sgd(half)
        for x, y in batches_of(nodes[name]):
            logits = model(x)
            assert y is not None
            optimizer.zero_grad()
            F.cross_entropy(logits.softmax(dim=1) if twice else logits, y).backward()
            optimizer.step()

    trained = {}
    for name in pair:
        trained[name] = copy.deepcopy(start)
        fit(trained[name], trained[name], name)
    states = [trained[name].state_dict() for name in pair]
    mean = {n: (states[0][n] + states[1][n]) / 2 for n in states[0] if n.startswith("encoder.")}
    heads = []
    for name in pair:
        model = trained[name]
        model.load_state_dict(mean, strict=False)
        if refit:
            fit(model, model.head, name)
        heads.append(copy.deepcopy(model.head))
    target = copy.deepcopy(start)
    target.load_state_dict(mean, strict=False)
    target.train()
    optimizer = sgd(target.encoder)
    for x, _ in batches_of(nodes["town"]):
        z = target.features(x)
        p, q = (head(z).softmax(dim=1) for head in heads)
        if twice:
            p, q = p.softmax(dim=1), q.softmax(dim=1)
        optimizer.zero_grad()
        (p - q).abs().mean().backward()
        optimizer.step()
    both = [head.state_dict() for head in heads]
    head = {f"head.{n}": (both[0][n] + both[1][n]) / 2 for n in both[0]}
    return target.state_dict() | head


@pytest.mark.parametrize(("softmax", "refit"), [("once", True), ("twice", True), ("once", False)])
def test_a_round_computes_the_same_as_one_loop(
    domains: list[Node], softmax: str, refit: bool
) -> None:
    settings = {k.replace(".", "__"): v for k, v in FACT.items()}
    bench = Bench(domains, "fact", fact__softmax=softmax, fact__refit=refit, **settings)
    config = bench.task.model
    start = models.build(config, bench.task.dims, CLASSES, seed=0)
    found, numbers = bench.round()
    pair = [node.name for node in bench.strategy.pair]  # type: ignore[attr-defined]
    nodes = {str(node["name"]): node for node in domains}
    wanted = one_loop(start, nodes, pair, softmax == "twice", refit)
    assert_close(found, {n: t.detach().numpy() for n, t in wanted.items()}, 1e-4)
    assert bench.strategy.weights == dict.fromkeys(pair, 0.5)
    assert 0 <= numbers["discrepancy"] < 1 and numbers["loss"] > 0  # told in steps of .01


def test_two_sources_take_part_and_all_in_turn(domains: list[Node], tmp_path: Path) -> None:
    grid = ScriptedGrid(domains)
    results, _ = run(
        domains, FACT | {"method": "fact", "rounds": 6, "run.dir": str(tmp_path)}, grid=grid
    )
    assert results["events"] == []
    (training,) = results["trainings"]["fact"]
    pairs = [tuple(each["weights"]) for each in training["rounds"]]
    assert all(len(pair) == 2 for pair in pairs) and {s for p in pairs for s in p} == {*SOURCES}
    asked = [c.hop for c in grid.crossed if c.way == "to" and c.kind == "train"]
    assert asked == ["train", "train", "refit", "refit", "cross"] * 6
    # Replies to `refit` are heads, much smaller than models.
    for c in grid.crossed:
        if (c.way, c.hop) == ("from", "refit"):
            assert c.arrays == {"head": "model"}


@pytest.mark.parametrize("answer", ["surer", "least"])
def test_the_target_keeps_both_heads_and_predicts_with_the_surer(
    domains: list[Node], tmp_path: Path, answer: str
) -> None:
    nodes = with_state(domains, tmp_path)
    grid = ScriptedGrid(nodes)
    settings = FACT | {"method": "fact", "fact.answer": answer, "run.dir": str(tmp_path / "runs")}
    (training,) = run(nodes, settings | {"rounds": 1}, grid=grid)[0]["trainings"]["fact"]
    (asked,) = [m for m in grid.requests if m.content.get("step", {}).get("hop") == "cross"]
    sent = {name: packed.unpack() for name, packed in records.read(asked.content)[0].items()}
    model, _ = models.load(tmp_path / "state" / training["adapted"]["file"])
    heads = [sent["model"]["head.weight"], sent["head"]["head.weight"]]
    assert torch.equal(model.head.get_buffer("weight"), torch.tensor(np.stack(heads)))
    data = load_target(next(n for n in nodes if n["name"] == "town")["data"], size=SIDE)
    z = model.eval().features(data.x.float() / 255)
    each = model.head.each(z).exp()  # type: ignore[operator]
    surer = each.amax(dim=2).argmax(dim=1)
    wanted = each[torch.arange(len(z)), surer]
    torch.testing.assert_close(models.predict(model, data.x), wanted.detach())
    assert 0 < surer.sum() < len(z)


def test_the_round_in_which_the_heads_differed_least_is_kept() -> None:
    config = ModelConfig(name="mlp", hidden="6")
    extension = models.Extension("fact", {})
    kept = Answer(models.build(config, (5,), 3, seed=0, extension=extension))
    rounds = [models.build(config, (5,), 3, seed=seed) for seed in (1, 2, 3)]
    for t, discrepancy in enumerate((0.3, 0.2, 0.25)):
        kept.consider(rounds[t].encoder, (rounds[t].head, rounds[0].head), discrepancy, "least")
        again = Answer(kept.module)
        again.load_state_dict(kept.state_dict(), torch.device("cpu"))
        kept = again
    weight = kept.module.get_buffer("head.weight")
    assert kept.discrepancy == 0.2
    assert torch.equal(weight[0], rounds[1].head.weight)
    assert torch.equal(weight[1], rounds[0].head.weight)
    kept.consider(rounds[2].encoder, (rounds[2].head, rounds[0].head), 0.9, "surer")
    assert torch.equal(kept.module.get_buffer("head.weight")[0], rounds[2].head.weight)


def test_a_round_needs_both_sources(domains: list[Node], tmp_path: Path) -> None:
    bench = Bench(domains, "fact", {name: never for name in SOURCES}, wait__train=0.5)
    with pytest.raises(QuorumError, match="bert and carl gave no usable reply"):
        bench.round()
    two = [node for node in domains if node["name"] in ("anna", "town")]
    settings = FACT | {"method": "fact", "run.expect": 2, "wait.tries": 1}
    with pytest.raises(ConfigError, match="this run has one; let another source join"):
        run(two, settings | {"run.dir": str(tmp_path)})
    bench = Bench(domains, "fact")
    bench.grid.offline = {"anna", "bert"}
    with pytest.raises(QuorumError, match="1 source is connected, but FACT compares two"):
        bench.begin()
