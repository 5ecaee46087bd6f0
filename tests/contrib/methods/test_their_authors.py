"""What the authors of methods that plug in computed: see tests/test_authors.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedda.algorithms import shot
from fedda.contrib.methods.autodial.algorithm import Aligned
from fedda.contrib.methods.decision import algorithm as decision
from fedda.contrib.methods.fact import algorithm as fact
from fedda.maths.ensemble import Heads
from fedda.maths.mixture import Surest
from tests.local_grid import Bench
from tests.test_authors import FIGURES, close, moved, tensors


def test_decision_takes_the_authors_step() -> None:
    f = FIGURES["decision"]
    x, B, b, C, c, a = tensors(f, "x", "B", "b", "C", "c", "a")
    heads = Heads(3, 3, 3, "logits", "ratio").double()
    heads.load_state_dict({"weight": C, "bias": c, "a": a})
    for moving in (B, b):
        moving.requires_grad_()
    z = torch.einsum("nd,kmd->knm", x, B) + b[:, None]
    logits = heads.each(z.transpose(0, 1).flatten(1))
    v = torch.stack([shot.points(each, "official") for each in z.detach()])
    p = logits.detach().softmax(dim=2)
    mu = torch.stack([shot.pseudo_labels(*pair)[1] for pair in zip(v, p, strict=True)])
    label = decision.nearest_together(v, mu, heads.w.detach())
    assert label.tolist() == f["label"]
    close(heads.together(logits), f["logits"])
    moved([B, b, heads.a], shot.target_loss(heads.together(logits), label, f["beta"]), f["lr"])
    close(B, f["after"]["B"])
    close(heads.a, f["after"]["a"])


def test_fact_compares_heads_as_the_authors_do() -> None:
    f = FIGURES["fact"]
    one, two = tensors({"1": f["logits"][0], "2": f["logits"][1]}, "1", "2")
    assert fact.discrepancy(one, two, "twice").item() == pytest.approx(f["twice"], rel=1e-5)


def test_facts_surer_head_answers_as_the_authors() -> None:
    f = FIGURES["fact"]
    head = Surest(2, 3, 3).double()
    head.weight.copy_(torch.eye(3).expand(2, 3, 3))
    heads = [torch.tensor(logits, dtype=torch.float64) for logits in f["logits"]]
    for row, wanted in enumerate(f["answer"]):
        head.bias.copy_(torch.stack([logits[row] for logits in heads]))
        close(head(torch.zeros(1, 3, dtype=torch.float64)).exp()[0], wanted)


def test_fact_takes_the_authors_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is drawn again, and a head that is refitted, go on with their momentum."""
    f = FIGURES["fact"]["rounds"]
    nodes = []
    for name, x in f["x"].items():
        arrays: dict[str, Any] = dict.fromkeys(("x_train", "x_test"), np.array(x, np.float32))
        arrays |= {"y_test": np.array(f["y"])} | ({} if name == "t" else {"y_train": f["y"]})
        np.savez(tmp_path / f"{name}.npz", **arrays)
        node = {"role": "target" if name == "t" else "source", "name": name, "reproducible": True}
        nodes.append(node | {"data": str(tmp_path / f"{name}.npz"), "min-images": 2})
    settings = {"rounds": len(f["pairs"]), "model.hidden": str(len(f["before"]["bias"]))}
    settings |= {"train.lr": f["lr"], "train.momentum": f["momentum"]}
    settings |= {"train.weight-decay": f["decay"], "train.schedule": "constant"}
    settings |= {"train.carry-momentum": True, "fact.softmax": "twice"}
    bench = Bench(nodes, "fact", **{k.replace(".", "__"): v for k, v in settings.items()})
    for name, value in f["before"].items():
        bench.model[name if "." in name else f"encoder.1.{name}"] = np.array(value, np.float32)
    for t, (pair, gap) in enumerate(zip(f["pairs"], f["discrepancy"], strict=True), start=1):
        drawn = [node for node in bench.roster.sources if node.name in pair]
        monkeypatch.setattr(bench.strategy, "draw", lambda sources, drawn=drawn: drawn)
        _, numbers = bench.round(t)
        assert numbers["discrepancy"] == pytest.approx(gap, abs=0.01)
    names = {"weight": "1.weight", "bias": "1.bias", "scale": "2.weight", "shift": "2.bias"}
    names |= {"mean": "2.running_mean", "variance": "2.running_var"}
    for name, wanted in f["after"].items():
        key = name if "." in name else f"encoder.{names[name]}"
        close(torch.tensor(bench.model[key]), wanted)


def test_autodial_normalises_as_the_authors_layer_does() -> None:
    """Each side with the other's moments of the same batch; alpha's gradient is both sides' sum."""
    f = FIGURES["autodial"]
    x, y, upstream = (t.float() for t in tensors(f, "x", "y", "upstream"))
    total = 0.0
    for side, other, own in (("source", "target", slice(0, 4)), ("target", "source", slice(4, 8))):
        layer = Aligned(nn.BatchNorm1d(2)).train()
        layer.side, layer.mixes = side, True  # type: ignore[assignment]
        layer.alpha.data.fill_(f["alpha"])
        rest = x[4:] if side == "source" else x[:4]
        getattr(layer, f"{other}_mean").copy_(rest.mean(dim=0))
        getattr(layer, f"{other}_square").copy_((rest**2).mean(dim=0))
        found = layer(x[own])
        close(found, y[own].tolist())
        found.backward(upstream[own])
        assert layer.alpha.grad is not None
        total += layer.alpha.grad.item()
    assert total == pytest.approx(f["grad_alpha"], rel=1e-4)
