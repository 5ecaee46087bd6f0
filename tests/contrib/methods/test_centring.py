"""Centring: sources move each class onto the target's, of which only means over many leave."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.site.memory import resident
from fedda import data, models, records
from fedda.contrib.methods.centring import algorithm as centring
from fedda.contrib.methods.centring.client import MEANS
from fedda.errors import ConfigError, QuorumError
from fedda.train import generator
from fedda.wire.packing import Arrays
from tests.local_grid import CLASSES, SOURCES, Bench, Node, run, sent_by
from tests.reference import centring as twin

pytestmark = pytest.mark.usefixtures("fresh_sites")

LATER: dict[str, Any] = {"centring__plain_share": 0.5}
AT_ONCE: dict[str, Any] = {"centring__plain_share": 0.0}


def rewritten(
    nodes: list[Node], folder: Path, change: Callable[[Node, Arrays], dict[str, Any]]
) -> list[Node]:
    """The same sites with other arrays."""
    folder.mkdir()
    made = []
    for node in nodes:
        with np.load(node["data"]) as file:
            np.savez(folder / f"{node['name']}.npz", **change(node, dict(file)))
        made.append(node | {"data": str(folder / f"{node['name']}.npz")})
    return made


def vectors(node: Node, arrays: Arrays) -> Arrays:
    """Images as vectors in [0, 1]."""
    flat = {
        n: a.reshape(len(a), -1).astype(np.float32) / 255 for n, a in arrays.items() if "x_" in n
    }
    return arrays | flat


def probabilities(bench: Bench, node: Node) -> Tensor:
    """What the bench's model predicts for the target's images."""
    network = models.blank(bench.task.model, bench.task.dims, bench.task.classes)
    models.load_arrays(network, bench.model)
    return models.predict(network, data.load_target(node["data"]).x)


def counts(bench: Bench, node: Node) -> list[int]:
    """How many examples the model gives each class."""
    p = probabilities(bench, node)
    return torch.bincount(p.argmax(dim=1), minlength=CLASSES).tolist()


def trained(sites: list[Node], **settings: Any) -> Bench:
    """A run of two rounds after its first one, which is FedAvg's and teaches the classes."""
    bench = Bench(sites, "centring", train__rounds_per_epoch=0.1, **LATER, **settings)
    bench.round(1)
    assert len(probabilities(bench, sites[-1]).argmax(dim=1).unique()) > 1
    return bench


def replies_with(bench: Bench, name: str) -> list[Arrays]:
    """The arrays of this name in all replies."""
    found = (records.read(r.content)[0] for r in bench.grid.replies if "arrays" in r.content)
    return [arrays[name].unpack() for arrays in found if name in arrays]


def test_a_class_moves_by_hand() -> None:
    """Class 0 has its mean at 1 here and at 11 there, so 0 and 2 become 10 and 12; 1 stays."""
    mu, known = centring.class_means(
        torch.tensor([[10.0], [12.0], [7.0]]), torch.tensor([0, 0, 1]), 2, 2
    )
    assert (mu.tolist(), known.tolist()) == ([[11.0], [0.0]], [True, False])
    x, y = torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([0, 0, 1])
    assert centring.shift(x, y, mu, known).tolist() == [[10.0], [0.0]]


@pytest.mark.parametrize("least", [1, 3, 6, 40])
def test_moved_examples_are_the_twins(least: int) -> None:
    draws = generator("centring")
    x, target = (
        torch.randn(30, 5, generator=draws).double(),
        torch.randn(20, 5, generator=draws).double(),
    )
    y, there = (torch.randint(4, (n,), generator=draws) for n in (30, 20))
    y[y == 3], there[0] = 0, 3  # a class that the source has not, and the target has
    mu, known = centring.class_means(target, there, 4, least)
    found = x + centring.shift(x, y, mu, known)[y]
    wanted = twin.moved(x.tolist(), y.tolist(), target.tolist(), there.tolist(), least)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    assert bool(known.any()) == (least < 40)


@pytest.mark.parametrize("least", [1, 12, 90])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.7, 1.0])
def test_the_surest_of_each_class_are_the_twins(share: float, least: int) -> None:
    p = torch.rand(50, 4, generator=generator("surest")).double()
    p[:, 3] = 0  # nothing is predicted to be of this class
    found = centring.surest(p, share, least).nonzero()[:, 0].tolist()
    assert found == twin.surest(p.tolist(), share, least)


def test_the_surest_by_hand() -> None:
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    assert centring.surest(p, 0.5).tolist() == [True, False, True, True]


def test_noise_is_as_large_as_it_says_and_only_on_what_is_told() -> None:
    x = torch.zeros(400, 2000)
    x[0, 0] = 3.0  # R
    y = torch.tensor([0] * 100 + [1] * 299 + [2])
    mu, known = centring.class_means(x, y, 3, 50)
    found = centring.noisy(mu, known, x, y, 2.0, np.random.default_rng(0)) - mu
    assert not found[2].any()
    assert found[0].std().item() == pytest.approx(2 * 3 / 100, rel=0.1)
    assert found[1].std().item() == pytest.approx(2 * 3 / 299, rel=0.1)
    # Of a seed of torch only 32 bits would count, which are tried in hours.
    far = centring.noisy(mu, known, x, y, 2.0, np.random.default_rng(2**32)) - mu
    assert not far.equal(found)


def test_sources_train_on_what_the_twin_moves(domains: list[Node], tmp_path: Path) -> None:
    """FedAvg's sources on data that were moved beforehand send the same models."""
    sites = rewritten(domains, tmp_path / "vectors", vectors)
    bench = trained(sites)
    p, x_target = probabilities(bench, sites[-1]), np.load(sites[-1]["data"])["x_train"]
    kept = twin.surest(p.tolist(), 0.5, 2)
    there, target = p[kept].argmax(dim=1).tolist(), x_target[kept].tolist()
    assert 24 <= len(kept) < 48

    def moved(node: Node, arrays: Arrays) -> Arrays:
        if node["role"] == "target":
            return arrays
        x = twin.moved(arrays["x_train"].tolist(), arrays["y_train"].tolist(), target, there, 2)
        assert not np.allclose(x, arrays["x_train"], atol=0.01)
        return arrays | {"x_train": np.asarray(x, np.float32)}

    plain = Bench(
        rewritten(sites, tmp_path / "moved", moved), "fedavg", train__rounds_per_epoch=0.1
    )
    plain.model = bench.model
    bench.round(2)
    plain.round(2)
    (means,) = replies_with(bench, "means")
    assert means["known"].tolist() == [there.count(c) >= 2 for c in range(CLASSES)]
    for name in SOURCES:
        found, wanted = sent_by(bench, name), sent_by(plain, name)
        for entry in wanted:
            np.testing.assert_allclose(found[entry], wanted[entry], rtol=1e-3, atol=1e-4)


def test_until_then_it_is_fedavg_and_the_target_is_asked_once(domains: list[Node]) -> None:
    bench, plain = Bench(domains, "centring", rounds=4, **LATER), Bench(domains, "fedavg", rounds=4)
    for server_round in (1, 2, 3, 4):
        (found, _), (wanted, _) = bench.round(server_round), plain.round(server_round)
        same = all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)
        assert same == (server_round <= 2)
        assert len(replies_with(bench, "means")) == (server_round > 2)


def test_means_and_round_survive_a_restart_of_the_server(domains: list[Node]) -> None:
    bench, again = Bench(domains, "centring", **AT_ONCE), Bench(domains, "centring", **AT_ONCE)
    bench.round(1)
    again.model = {n: a.copy() for n, a in bench.model.items()}
    again.strategy.memory = bench.strategy.memory.copy()
    found, wanted = again.round(2)[0], bench.round(2)[0]
    assert all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)
    assert not replies_with(again, "means")


def told(domains: list[Node], **changes: Any) -> Arrays:
    """The means that a target with other settings sends; its steps are over all its examples."""
    bench = trained([*domains[:-1], domains[-1] | changes], train__batch_size=64)
    bench.round(2)
    (means,) = replies_with(bench, "means")
    return means


def test_a_class_of_few_examples_stays_untold(domains: list[Node], tmp_path: Path) -> None:
    def uneven(node: Node, arrays: Arrays) -> Arrays:
        """A target with few examples of the last class."""
        rare = np.arange(len(arrays["x_train"])) % CLASSES == CLASSES - 1
        kept = ~rare | (np.arange(len(rare)) < 24)
        return arrays | {"x_train": arrays["x_train"][kept]} if node["role"] == "target" else arrays

    sites = rewritten(domains, tmp_path / "uneven", uneven)
    found = counts(trained(sites, train__batch_size=64), sites[-1])
    least = sorted(found)[-2]
    assert min(found) < least
    means = told(sites, **{"min-images": least})
    assert means["known"].tolist() == [n >= least for n in found]
    assert not means["mu"][~means["known"]].any() and means["mu"][means["known"]].any()


FORBIDDEN = json.dumps({"leaving": {"statistics": False}})


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"min-images": 48}, "gives no class to 48 or more of this site's 48 examples"),
        ({"policy": FORBIDDEN}, "The policy lets no statistics leave (leaving.statistics)"),
    ],
)
def test_a_target_without_any_class_of_enough_examples_or_leave_refuses(
    domains: list[Node], caplog: pytest.LogCaptureFixture, own: dict[str, Any], why: str
) -> None:
    with pytest.raises(QuorumError):
        told(domains, **own)
    assert why in caplog.text


def test_a_policys_noise_is_on_the_means(domains: list[Node]) -> None:
    plain = told(domains)
    noisy = told(domains, policy=json.dumps({"protect": {"noise": 1.0}}))
    assert (plain["known"] == noisy["known"]).all()
    assert np.abs(plain["mu"] - noisy["mu"])[plain["known"]].mean() > 0.01


def test_a_site_never_draws_the_same_noise_twice(domains: list[Node], tmp_path: Path) -> None:
    """The same noise twice would vanish from the difference of two answers."""
    site = {"noise": 1.0, "state-dir": str(tmp_path), "reproducible": False}
    one = told(domains, **site)
    resident.cache_clear()  # a site that has lost what it told
    for file in tmp_path.glob(f"*/**/*.{MEANS}.safetensors"):
        file.unlink()
    two = told(domains, **site)
    assert (one["known"] == two["known"]).all()
    assert np.abs(one["mu"] - two["mu"]).max() > 0.01


def test_a_training_is_told_once_whatever_the_server_asks(
    domains: list[Node], tmp_path: Path
) -> None:
    """Another model in the same training gets the same answer, also after the site's restart."""
    site = domains[-1] | {"noise": 1.0, "state-dir": str(tmp_path), "reproducible": False}
    bench = trained([*domains[:-1], site], train__batch_size=64)
    for other in (False, True, True):
        bench.strategy.memory.arrays.pop("means", None)
        bench.model = {n: 0.9 * a if other else a for n, a in bench.model.items()}
        bench.round(2)
        resident.cache_clear()
    first, *again = replies_with(bench, "means")
    assert len(again) == 2 and first["mu"].any()
    assert all(first[n].tobytes() == other[n].tobytes() for other in again for n in first)


def test_convolutions_and_noise_on_steps_are_refused(domains: list[Node]) -> None:
    """A convolution's inputs would be images, and noise would not hide what moves the examples."""
    with pytest.raises(ConfigError, match=r"convolution.*model\.train=bottleneck"):
        Bench(domains, "centring", **LATER, model__name="digit-cnn", model__hidden="").begin(1)
    with pytest.raises(ConfigError, match="sources of centring send more"):
        Bench(domains, "centring", privacy__noise=1.0, model__norm="group")


def test_bytes_are_counted_by_their_own_kind(domains: list[Node], tmp_path: Path) -> None:
    settings = {"run.dir": str(tmp_path), "method": "centring", "centring.plain-share": 0.5}
    results, _ = run(domains, settings)
    rounds = results["trainings"]["centring"][0]["rounds"]
    sent = [r["bytes"].get("from target statistics", 0) for r in rounds]
    values = CLASSES * 8 * 8
    assert sent == [0, 4 * values + 8]  # C d floats, and C flags


def test_which_classes_are_told_has_noise_and_none_of_too_few() -> None:
    """Else whether one example is of a class could be asked, through any noise on its mean."""
    y = torch.tensor([0] * 53 + [1] * 52 + [2] * 30)
    draws = np.random.default_rng(0)
    told = [centring.noisily_known(y, 3, 50, 1.5, draws).tolist() for _ in range(60)]
    assert {t[0] for t in told} == {t[1] for t in told} == {True, False}
    least = torch.tensor([0] * 50 + [1] * 49 + [2] * 90)
    assert centring.noisily_known(least, 3, 50, 1.5, draws).tolist() == [False, False, True]
