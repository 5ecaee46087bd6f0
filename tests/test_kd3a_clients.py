"""KD3A's target at its site: what its settings change, driven over a tiny federation."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.kd3a import Target
from clients.site import Site, resident
from fedda import models
from fedda.algorithms import kd3a
from fedda.config import RunConfig
from fedda.data import Unlabelled
from tests.local_grid import Bench, make_domains

Mixed = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _fresh_sites() -> Iterator[None]:
    resident.cache_clear()
    yield
    resident.cache_clear()


def test_the_gate_is_at_high_in_the_last_round_only_if_it_is_to_reach_it(tmp_path: Path) -> None:
    nodes = make_domains(tmp_path)
    kept = {}
    for reach in (True, False):
        given = {"kd3a__gate__low": 0.9999, "kd3a__gate__high": 0.0, "kd3a__gate__reach": reach}
        bench = Bench(nodes, "kd3a", kd3a__vote="hard", **given)
        bench.round(1)
        kept[reach] = bench.round(2)[1]["kept"]
    # Of two rounds the second has gate 0, which every teacher is above, or .9999 / 2, which hardly
    # any is so early.
    assert kept[True] == 1
    assert kept[False] < 0.5


@pytest.mark.parametrize("mixed", [True, False])
def test_mixup_mixes_the_weights_only_if_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    calls: list[bool] = []
    plain = kd3a.mixup

    def spy(x: Tensor, p: Tensor, n: Tensor, lam: float, perm: Tensor, *rest: Any) -> Mixed:
        found = plain(x, p, n, lam, perm, *rest)
        expected = lam * n + (1 - lam) * n[perm] if mixed else n
        torch.testing.assert_close(found[2], expected)
        calls.append(bool((n != n[perm]).any()))
        return found

    monkeypatch.setattr(kd3a, "mixup", spy)
    settings = {"kd3a__gate__low": 0.3, "kd3a__mixup": 2.0, "kd3a__mixup_weights": mixed}
    Bench(make_domains(tmp_path), "kd3a", **settings).round()
    assert any(calls)  # else mixing would change nothing


def test_teachers_with_batch_statistics_see_mixed_batches_and_keep_the_images_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"kd3a.teacher-batchnorm": "batch", "train.batch-size": 5, "model.name": "mlp"}
    task = RunConfig.parse({"method": "kd3a", **options}).task("kd3a", 0, (1,), list("abc"), 2)
    x = torch.arange(21.0)[:, None]
    target = Target(cast(Any, SimpleNamespace(name="town", device=torch.device("cpu"))))
    target.data = Unlabelled(x)
    request = cast(Any, SimpleNamespace(task=task, round=1))
    batches: list[list[float]] = []

    def predict(model: Any, x: Tensor, batch: int) -> Tensor:
        batches.append(x[:, 0].tolist())
        return x.expand(-1, 3)

    monkeypatch.setattr(models, "predict", predict)
    model = cast(Any, torch.nn.Linear(1, 3))
    images = torch.arange(1, 21)  # a round may be without some, here without image 0
    found = target._probabilities(model, images, request)
    assert found[:, 0].tolist() == images.tolist()
    assert sorted(value for b in batches for value in b) == images.tolist()
    assert [len(b) for b in batches] == [5, 5, 5, 5]
    assert all(b != sorted(b) for b in batches)


def test_a_lone_last_image_votes_with_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"kd3a.teacher-batchnorm": "batch", "train.batch-size": 5}
    task = RunConfig.parse({"method": "kd3a", **options}).task("kd3a", 0, (1,), list("abc"), 2)
    target = Target(cast(Any, SimpleNamespace(name="town", device=torch.device("cpu"))))
    target.data = Unlabelled(torch.arange(6.0)[:, None])
    monkeypatch.setattr(models, "predict", lambda model, x, batch: x.expand(len(x) and batch, 3))
    model = cast(Any, torch.nn.Linear(1, 3))
    request = cast(Any, SimpleNamespace(task=task, round=1))
    found = target._probabilities(model, torch.arange(6), request)
    assert found[:, 0].tolist() == list(range(6))


def test_a_model_without_batchnorm_has_no_moments_to_match(tmp_path: Path) -> None:
    nodes = make_domains(tmp_path)
    settings = {"input__size": 16, "model__name": "lenet", "model__sizes": ""}
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
    kept = site.training((1, 8, 8))
    assert len(kept) == before
    site.offer()
    assert site.training((1, 8, 8)) is kept  # read once, however many runs
    with np.load(node["data"]) as file:
        fewer = {name: array[:-5] for name, array in file.items()}
    np.savez(node["data"], **fewer)
    assert site.offer()["examples"] == len(site.training((1, 8, 8))) == before - 5
