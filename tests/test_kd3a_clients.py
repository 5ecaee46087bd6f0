"""KD3A's target at its site: what the settings change, seen in a tiny federation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.kd3a import Target
from fedda import models, records
from fedda.data import Unlabelled, load_target
from fedda.maths import mixup
from fedda.settings import RunConfig
from fedda.train import batches, generator
from fedda.wire import Arrays
from tests.local_grid import (
    EXAMPLES,
    Bench,
    Node,
    make_domains,
)
from tests.reference import kd3a as twin

pytestmark = pytest.mark.usefixtures("fresh_sites")

Mixed = tuple[Tensor, Tensor, Tensor]


def test_the_gate_reaches_high_in_the_last_round_only_with_gate_reach(tmp_path: Path) -> None:
    nodes = make_domains(tmp_path)
    share = {}
    for reach in (True, False):
        gate = {"kd3a__gate__low": 0.9999, "kd3a__gate__high": 0.0, "kd3a__gate__reach": reach}
        bench = Bench(nodes, "kd3a", kd3a__vote="hard", **gate)
        bench.round(1)
        share[reach] = bench.round(2)[1]["kept"]
    # In round 2 of 2 the gate is 0, which every teacher passes, or .9999 / 2, which hardly any
    # teacher passes so early.
    assert share[True] == 1
    assert share[False] < 0.5


@pytest.mark.parametrize("mixed", [True, False])
def test_mixup_mixes_the_weights_only_with_mixup_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    calls: list[bool] = []
    plain = mixup.mixup

    def spy(x: Tensor, p: Tensor, n: Tensor, lam: float, perm: Tensor, *rest: Any) -> Mixed:
        result = plain(x, p, n, lam, perm, *rest)
        expected = lam * n + (1 - lam) * n[perm] if mixed else n
        torch.testing.assert_close(result[2], expected)
        calls.append(bool((n != n[perm]).any()))
        return result

    monkeypatch.setattr(mixup, "mixup", spy)
    settings = {"kd3a__gate__low": 0.3, "kd3a__mixup": 2.0, "kd3a__mixup_weights": mixed}
    Bench(make_domains(tmp_path), "kd3a", **settings).round()
    assert any(calls)  # otherwise mixing would change nothing


LONELY = SimpleNamespace(
    name="town", device=torch.device("cpu"), chance=lambda task: (task.seed, "town"), least_batch=2
)


def test_teachers_with_batch_statistics_see_shuffled_batches_and_answer_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"kd3a.teacher-batchnorm": "batch", "train.batch-size": 5, "model.name": "mlp"}
    task = RunConfig.parse({"method": "kd3a", **options}).task("kd3a", 0, (1,), list("abc"), 2)
    x = torch.arange(21.0)[:, None]
    target = Target(cast(Any, LONELY))
    target.data = Unlabelled(x)
    target.request = cast(Any, SimpleNamespace(task=task, round=1, draw=(1,)))
    batches: list[list[float]] = []

    def predict(model: Any, x: Tensor, batch: int) -> Tensor:
        batches.append(x[:, 0].tolist())
        return x.expand(-1, 3)

    monkeypatch.setattr(models, "predict", predict)
    model = cast(Any, torch.nn.Linear(1, 3))
    images = torch.arange(1, 21)  # a round may leave out images, here image 0
    p = target._probabilities(model, images)
    assert p[:, 0].tolist() == images.tolist()
    assert sorted(value for b in batches for value in b) == images.tolist()
    assert [len(b) for b in batches] == [5, 5, 5, 5]
    assert all(b != sorted(b) for b in batches)


# ---- teachers whose statistics move ------------------------------------------------------------


def sent_by(bench: Bench, name: str) -> Arrays:
    """Return the model of a site's last reply."""
    number = bench.grid.id_of(name)
    replies = [r for r in bench.grid.replies if r.metadata.src_node_id == number]
    return records.read(replies[-1].content)[0]["model"].unpack()


def moved(bench: Bench, source: str, target: Node, server_round: int) -> dict[str, np.ndarray]:
    """Compute a source's statistics after its vote: per batch, 0.9 of the old + 0.1 of its own."""
    network = models.blank(bench.task.model, bench.task.dims, bench.task.classes)
    models.load_arrays(network, sent_by(bench, source))
    x = load_target(target["data"]).x.float() / 255
    draws = generator(bench.task.seed, "town", server_round, "vote")
    order = torch.randperm(len(x), generator=draws)
    statistics = {
        n: b.double().numpy().copy() for n, b in network.named_buffers() if "running_" in n
    }
    layers = {layer: name for name, layer in models.batchnorms(network).items()}
    seen: dict[str, np.ndarray] = {}

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        seen[layers[layer]] = inputs[0].double().numpy()

    for layer in layers:
        layer.register_forward_pre_hook(note)
    with torch.no_grad(), models.batch_statistics(network):
        for part in batches([order], bench.task.train.batch_size):
            network(x[part])
            for name, z in seen.items():
                new = {"running_mean": z.mean(axis=0), "running_var": z.var(axis=0, ddof=1)}
                for what, value in new.items():
                    statistics[f"{name}.{what}"] = 0.9 * statistics[f"{name}.{what}"] + 0.1 * value
    assert seen
    return statistics


@pytest.mark.parametrize("form", ["linear", "moments"])
def test_the_updated_statistics_are_averaged(tmp_path: Path, form: str) -> None:
    nodes = make_domains(tmp_path)
    chosen: dict[str, Any] = {
        "kd3a__batchnorm": form,
        "kd3a__smoothing": 0.9,
        "kd3a__target_weight": "kept",
        "kd3a__gate__low": 0.4,
        "kd3a__gate__high": 0.4,
    }
    bench = Bench(nodes, "kd3a", kd3a__teacher_batchnorm="updated", **chosen)
    other = Bench(nodes, "kd3a", kd3a__teacher_batchnorm="batch", **chosen)
    for server_round in (1, 2):
        if server_round == 2:
            other.model = bench.model  # the statistics that sources start from differ by now
        model, numbers = bench.round(server_round)
        plain, wanted = other.round(server_round)
        assert bench.notices == [] and numbers == wanted
        # The vote is the same, and so are the student, its own statistics and all weights.
        assert bench.strategy.weights == other.strategy.weights
        alpha = list(bench.strategy.weights.values())
        assert list(bench.strategy.weights) == list(EXAMPLES)[-1:] + list(EXAMPLES)[:-1]
        sets = [sent_by(other, "town")]
        sets += [moved(bench, s, nodes[-1], server_round) for s in ("anna", "bert", "carl")]
        for name in model:
            if "running_" not in name:
                assert np.array_equal(model[name], plain[name]), name
                continue
            mean = name.replace("running_var", "running_mean")
            var = mean.replace("running_mean", "running_var")
            if form == "linear":
                expected = sum(a * s[name].astype(float) for a, s in zip(alpha, sets, strict=True))
            else:
                means, variances = ([s[n].tolist() for s in sets] for n in (mean, var))
                mixed = twin.mixed_moments(means, variances, alpha)
                expected = np.array(mixed[name == var])
            np.testing.assert_allclose(model[name], expected, rtol=1e-4, atol=1e-6)
            assert not np.allclose(model[name], plain[name], rtol=0.05), name


def test_updated_teachers_need_no_further_array(tmp_path: Path) -> None:
    """The target gets the numbers for the weights and mixes the statistics into its own model."""
    bench = Bench(make_domains(tmp_path), "kd3a", kd3a__teacher_batchnorm="updated")
    for server_round in (1, 2):
        bench.round(server_round)
    to, back = (
        [c for c in bench.grid.crossed if (c.way, c.role, c.kind) == (way, "target", "train")]
        for way in ("to", "from")
    )
    counts = {f"examples/{s}" for s in EXAMPLES}
    assert [c.numbers for c in to] == [
        {"round", *counts},
        {"round", *counts, *(f"past/{s}" for s in EXAMPLES)},
    ]
    assert all(set(c.arrays) == {"model"} for c in back)
