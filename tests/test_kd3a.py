"""KD3A's rounds over four sites: equal to a naive twin, and with every preset and setting."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedda import data, models, plugins, records
from tests.local_grid import EXAMPLES, SOURCES, Bench, Node, assert_close, changed, sent_by
from tests.reference import kd3a_round


def teachers_probabilities(bench: Bench, node: Node) -> torch.Tensor:
    """Compute every source's probabilities for the target's images -> (N, K, C)."""
    target = data.load_target(node["data"])
    predictions = []
    for name in SOURCES:
        network = models.blank(bench.task.model, bench.task.dims, bench.task.classes)
        models.load_arrays(network, sent_by(bench, name))
        predictions.append(models.predict(network, target.x))
    return torch.stack(predictions, dim=1)


def test_a_round_computes_algorithm_1(domains: list[Node]) -> None:
    gate = {"kd3a.gate.low": 0.6, "kd3a.gate.high": 0.6}
    bench = Bench(domains, "kd3a", train__rounds_per_epoch=0.2, **gate)
    bench.round(1)
    model, _ = bench.round(2)
    p = teachers_probabilities(bench, domains[-1])
    assert ((p.amax(dim=2) > 0.6).float().mean(dim=0) > 0).all()  # each teacher passes the gate
    counts = [EXAMPLES[s] for s in SOURCES]
    alpha = kd3a_round.alpha(p.tolist(), 0.6, counts, EXAMPLES["town"])
    assert min(alpha) > 0.01
    assert bench.strategy.weights == pytest.approx(
        dict(zip(["town", *SOURCES], alpha, strict=True)), abs=1e-6
    )
    sites = [sent_by(bench, name) for name in ["town", *SOURCES]]
    flat = [{n: a.astype(float).ravel().tolist() for n, a in m.items()} for m in sites]
    assert_close(model, kd3a_round.mean(flat, alpha), 1e-6)
    counters = [n for n in model if n.endswith("num_batches_tracked")]
    assert counters and all(model[n] == sites[0][n] for n in counters)


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_presets_run(domains: list[Node], preset: str) -> None:
    chosen = plugins.method("kd3a").presets[preset]
    bench = Bench(domains, "kd3a", **{f"kd3a.{k}": v for k, v in chosen.items()})
    for server_round in (1, 2):
        bench.round(server_round)
    assert sum(bench.strategy.weights.values()) == pytest.approx(1)
    assert bench.notices == []
    json_like = bench.strategy.memory.numbers["alpha"]
    assert set(json_like) == {"town", *SOURCES}
    assert all(type(k) is str and type(v) is float for k, v in json_like.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"kd3a__weighting": "focus", "kd3a__focus": "shapley"},
        {"kd3a__weighting": "examples"},
        {"kd3a__weighting": "h-divergence"},
        {"kd3a__target_weight": "kept", "kd3a__focus_by_examples": False},
        {"kd3a__batchnorm": "loss"},
        {"kd3a__batchnorm": "loss", "kd3a__heads": "local", "wire__dtype": "float16"},
        {"kd3a__batchnorm": "linear"},
        {"kd3a__teacher_batchnorm": "batch", "train__batch_size": 47},
        {"kd3a__vote": "mean"},
        {"kd3a__vote": "hard", "kd3a__mixup": 0.0},
        {"kd3a__smoothing": 0.9},
        {"kd3a__vote": "mean", "kd3a__weighting": "examples"},
        {"train__rounds_per_epoch": 0.5},
        {"train__rounds_per_epoch": 3},
        {"train__rounds_per_epoch": 20},
        {"train__optimizer": "adam", "train__lr": 0.01, "train__carry_momentum": True},
        {"wire__dtype": "float16"},
        {"model__name": "digit-cnn", "model__hidden": ""},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_a_round_runs_with_every_setting(domains: list[Node], settings: dict[str, Any]) -> None:
    rounds = 1 if "model__name" in settings else 2
    bench = Bench(domains, "kd3a", **settings)
    start = bench.model
    model, numbers = [bench.round(t) for t in range(1, rounds + 1)][-1]
    assert bench.notices == []
    assert all(np.isfinite(a).all() for a in model.values())
    assert list(model) == list(start)
    assert any(not np.array_equal(model[n], start[n]) for n in model)
    assert {n: a.dtype for n, a in model.items()} == {n: a.dtype for n, a in start.items()}
    assert set(bench.strategy.weights) == {"town", *SOURCES}
    assert sum(bench.strategy.weights.values()) == pytest.approx(1)
    focused = {"focused"} if settings.get("kd3a__weighting", "focus") == "focus" else set()
    assert set(numbers) == {"loss", "distillation", "kept"} | focused
    if settings.get("kd3a__weighting") == "examples":
        total = sum(EXAMPLES.values())
        assert bench.strategy.weights == pytest.approx({s: n / total for s, n in EXAMPLES.items()})
    if settings.get("wire__dtype") == "float16":
        sent = [c for c in bench.grid.requests if c.metadata.message_type == "train"]
        layouts = {m.manifest.floats for c in sent for m in records.read(c.content)[0].values()}
        assert layouts == {"float16"}


@pytest.mark.parametrize(
    ("gate", "least", "focused"), [(0.9999, 0.01, 0.0), (0.9999, 0.0, 1.0), (0.3, 0.0, 1.0)]
)
def test_where_hardly_any_teacher_is_sure_examples_weigh_the_sources(
    domains: list[Node], gate: float, least: float, focused: float
) -> None:
    bench = Bench(domains, "kd3a", kd3a__gate__low=gate, kd3a__focus_from=least)
    numbers = bench.round()[1]
    none_sure = gate > 0.9
    assert (numbers["kept"] == 0) is none_sure
    assert numbers["focused"] == focused
    by_examples = {s: n / sum(EXAMPLES.values()) for s, n in EXAMPLES.items()}
    # Where nobody is sure, the focus per image is too small to leave the target.
    assert (bench.strategy.weights == pytest.approx(by_examples)) is none_sure


def test_smoothing_keeps_part_of_the_last_weights(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a", kd3a__smoothing=0.75, kd3a__weighting="examples")
    bench.begin()
    bench.strategy.memory.numbers["alpha"] = {"town": 1.0, "anna": 0.0, "bert": 0.0, "carl": 0.0}
    bench.round()
    fresh = {s: n / sum(EXAMPLES.values()) for s, n in EXAMPLES.items()}
    wanted = {s: 0.25 * w + 0.75 * (s == "town") for s, w in fresh.items()}
    assert bench.strategy.weights == pytest.approx(wanted)


def test_local_heads_stay_with_their_sites(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a", kd3a__heads="local", rounds=3)
    model, _ = bench.round()
    heads = [n for n in model if n.startswith("head.")]
    own = {s: sent_by(bench, s) for s in SOURCES}
    assert all(np.array_equal(model[n], sent_by(bench, "town")[n]) for n in heads)
    bench.grid.offline = {"carl"}
    bench.round(2)
    bench.grid.offline = set()
    requests = bench.begin(3)
    for name, request in zip(SOURCES, requests, strict=True):
        received = records.read(request.content)[0]["model"].unpack()
        expected = own[name] if name == "carl" else sent_by(bench, name)  # carl missed round 2
        assert all(np.array_equal(received[n], expected[n]) for n in heads), name
        rest = [n for n in model if n not in heads]
        assert all(np.array_equal(received[n], bench.model[n]) for n in rest), name


def test_the_second_request_of_a_round_matches_moments(domains: list[Node]) -> None:
    plain = Bench(domains, "kd3a").round()[0]
    bench = Bench(domains, "kd3a", kd3a__batchnorm="loss")
    model = bench.round()[0]
    to_target = [
        c for c in bench.grid.crossed if (c.way, c.role, c.kind) == ("to", "target", "train")
    ]
    assert [(c.hop, set(c.arrays), c.numbers) for c in to_target] == [
        ("distil", {"model", *(f"teacher/{s}" for s in SOURCES)}, {"round"}),
        ("match_moments", {"model"}, {"round"}),
    ]
    running = [n for n in model if "running_" in n]
    assert all(np.array_equal(model[n], plain[n]) for n in running)  # those of eq. 18 stay
    assert any(not np.array_equal(model[n], plain[n]) for n in model if n not in running)


def test_a_target_cannot_claim_to_keep_more_than_all_its_images(domains: list[Node]) -> None:
    def boast(request: Message, reply: Message) -> list[Message]:
        return [changed(request, reply, numbers={"kept": 1e6})]

    bench = Bench(domains, "kd3a", {"town": boast}, kd3a__target_weight="kept")
    bench.round()
    assert bench.strategy.weights["town"] == pytest.approx(1 / 4)
    assert min(bench.strategy.weights.values()) >= 0
