"""KD3A's target at its site: what the settings change, seen in a tiny federation."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.kd3a import Target
from clients.site import state
from clients.site.memory import Site
from clients.site.workspace import Workspace
from fedda import models, records
from fedda.algorithms import kd3a
from fedda.config.inputs import Inputs
from fedda.data import Unlabelled, load_target
from fedda.maths import mixup
from fedda.settings import RunConfig, Task
from fedda.train import batches, generator
from fedda.wire.packing import Arrays
from tests.local_grid import EXAMPLES, Bench, Node, make_domains
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


@pytest.mark.parametrize(("last", "sizes"), [(20, [5] * 4), (6, [6])])
def test_teachers_with_batch_statistics_see_shuffled_batches_and_answer_in_order(
    last: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single image that is left over joins the batch before it."""
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
    images = torch.arange(1, last + 1)  # a round may leave out images, here image 0
    p = target._probabilities(model, images)
    assert p[:, 0].tolist() == images.tolist()
    assert sorted(value for b in batches for value in b) == images.tolist()
    assert [len(b) for b in batches] == sizes
    assert all(b != sorted(b) for b in batches)


@pytest.mark.parametrize("vote", ["soft", "hard"])
def test_few_images_that_teachers_are_sure_of_weigh_as_much_as_all_others(
    vote: kd3a.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server's teachers that are sure of one image alone would show it by the model."""
    task = RunConfig.parse({"method": "kd3a", "kd3a.mixup": 0}).task("kd3a", 0, (1,), ["a", "b"], 2)
    target = Target(cast(Any, LONELY))
    target.data = Unlabelled(torch.zeros(6, 1))
    target.request = cast(Any, SimpleNamespace(task=task, round=1, draw=(1,)))
    target.model = cast(Any, lambda x: torch.zeros(len(x), 2))
    monkeypatch.setattr(target, "inputs", lambda i: target.data.x[i])
    monkeypatch.setattr(target, "minimise", lambda loss: weights.append(loss(torch.arange(6))))
    monkeypatch.setattr(kd3a, "distillation_loss", lambda logits, p, n: n)
    weights: list[Tensor] = []
    for sure in (1, 2):  # `least_batch` is 2
        p = torch.full((6, 1, 2), 0.5)
        p[:sure, 0] = torch.tensor([0.99, 0.01])
        voted = kd3a.knowledge_vote(p, 0.9, vote)
        target.follow(torch.arange(6), voted.p, voted.n, voted.kept)
    unheard = {"soft": kd3a.NOBODY, "hard": 0}[vote]  # a hard vote learns nothing of them
    assert weights[0].unique().tolist() == pytest.approx([unheard])
    assert weights[1][:2].tolist() == [1, 1] and weights[1][2:].max() <= kd3a.NOBODY


def test_a_model_without_batchnorm_has_no_moments_to_match(tmp_path: Path) -> None:
    nodes = make_domains(tmp_path)
    settings = {"input__size": 16, "model__name": "lenet", "model__hidden": ""}
    bench = Bench(nodes, "kd3a", kd3a__batchnorm="loss", **settings)
    model, _ = bench.round()
    assert not any("running" in name for name in model)

    bench = Bench(nodes, "kd3a", kd3a__weighting="h-divergence", **settings)
    with pytest.raises(Exception, match="no usable reply"):
        bench.round()
    assert any("settings" in text for _, _, text in bench.notices)


def test_a_site_trains_on_what_it_offers_after_its_data_changed(tmp_path: Path) -> None:
    node = make_domains(tmp_path)[0]
    site = Site(node)
    before = site.offer()["examples"]
    images = site.training(Inputs((1, 8, 8)))
    assert len(images) == before
    site.offer()
    assert site.training(Inputs((1, 8, 8))) is images  # read only once, for all runs
    with np.load(node["data"]) as file:
        fewer = {name: array[:-5] for name, array in file.items()}
    np.savez(node["data"], **fewer)
    assert site.offer()["examples"] == len(site.training(Inputs((1, 8, 8)))) == before - 5


def test_a_site_keeps_a_limited_number_of_optimizer_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may begin any number of runs, but must not be able to fill the site's disk."""
    monkeypatch.setattr(state, "FILES", 4)
    place = cast(Any, SimpleNamespace(state_dir=tmp_path, name="anna"))
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    for age, name in enumerate("abcd"):
        for server_round in (1, 2, 3):
            task = Task(run=name, method="kd3a")
            saved = state.SiteState()
            saved.put_optimizer("optimizer", optimizer)
            state.save(place, task, server_round, state.OPTIMIZER, saved)
            for path in (tmp_path / "anna").glob(f"{name}.*"):
                os.utime(path, (1e9 + age, 1e9 + age))
    left = {path.name.split(".optimizer")[0] for path in (tmp_path / "anna").iterdir()}
    assert left == {"c.kd3a-0.2", "c.kd3a-0.3", "d.kd3a-0.2", "d.kd3a-0.3"}


def test_a_site_goes_on_from_its_latest_optimizer(tmp_path: Path) -> None:
    """It may have missed rounds, and another process of it may have served the last one."""
    first, *others = make_domains(tmp_path)
    node = first | {"state-dir": str(tmp_path / "state")}
    bench = Bench([node, *others], "kd3a", train__carry_momentum=True)
    one, other = (Site(node).workspace(bench.task) for _ in range(2))

    def momentum(workspace: Workspace, last: int) -> float | None:
        state = workspace.optimizer(bench.task, 0.1, last).state.values()
        return next((float(of["momentum_buffer"].max()) for of in state), None)

    for workspace, server_round in ((one, 1), (other, 3)):
        optimizer = workspace.optimizer(bench.task, 0.1, 0)
        for p in workspace.model.parameters():
            p.grad = torch.full_like(p, server_round)
        optimizer.step()
        workspace.carry(optimizer, bench.task, server_round)
    assert [momentum(one, last) for last in (0, 1, 2, 3, 5)] == [None, 1, 1, 3, 3]
    assert momentum(other, 2) == 1


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


def test_a_source_that_joins_late_has_no_past_weight(tmp_path: Path) -> None:
    chosen = {"kd3a__teacher_batchnorm": "updated", "kd3a__smoothing": 0.5}
    bench = Bench(make_domains(tmp_path), "kd3a", **chosen)
    bench.grid.offline = {"bert"}
    bench.round(1)
    bench.grid.offline = set()
    bench.round(2)
    asked = records.read(bench.grid.requests[-1].content)[1]["step"]
    assert {k for k in asked if k.startswith("past/")} == {"past/anna", "past/carl", "past/town"}
    assert set(bench.strategy.weights) == set(EXAMPLES)


@pytest.mark.parametrize(
    "settings",
    [
        {"kd3a__weighting": "h-divergence"},
        {"kd3a__weighting": "examples", "wire__dtype": "float16"},
        {"kd3a__batchnorm": "loss", "kd3a__heads": "local"},
        {"train__rounds_per_epoch": 2.5, "train__batch_size": 18},  # the 19th image joins them
    ],
    ids=str,
)
def test_updated_teachers_work_with_every_other_setting(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    nodes = make_domains(tmp_path)
    bench = Bench(nodes, "kd3a", kd3a__teacher_batchnorm="updated", **settings)
    plain = Bench(nodes, "kd3a", kd3a__teacher_batchnorm="batch", **settings)
    model, other = bench.round()[0], plain.round()[0]
    assert bench.notices == []
    assert bench.strategy.weights == plain.strategy.weights  # measured before anything moves
    running = [n for n in model if "running_" in n]
    assert all(np.isfinite(model[n]).all() and np.any(model[n] != other[n]) for n in running)


def test_without_batchnorm_updated_teachers_change_nothing(tmp_path: Path) -> None:
    settings = {"input__size": 16, "model__name": "lenet", "model__hidden": ""}
    updated, wanted = (
        Bench(make_domains(tmp_path), "kd3a", kd3a__teacher_batchnorm=mode, **settings).round()[0]
        for mode in ("updated", "running")
    )
    assert all(np.array_equal(updated[n], wanted[n]) for n in wanted)
