"""What f-DANN, f-WDGRL and f-DAN have in common: windows, limits, discriminators that travel."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clients import fdann
from clients.site import output_privacy
from clients.site.memory import Site, resident
from clients.site.output_privacy import check_spread, check_window
from clients.site.request import Exchange, Request
from fedda import models
from fedda.adversarial import discriminators, travelling
from fedda.adversarial.discriminators import Discriminator, DiscriminatorConfig
from fedda.adversarial.travelling import load_state, state_of, travelling_layout
from fedda.config import LazyConfig
from fedda.config.sections import validate
from fedda.data import load_source
from fedda.errors import Code, FeddaError, QuorumError, WireError
from fedda.exchange import Group, LocalHost
from fedda.settings import RunConfig
from fedda.train import generator
from fedda.wire.packing import Kind, pack
from tests.adversarial_runs import METHODS, SETTINGS, run
from tests.local_grid import EXAMPLES, SIDE, Bench, Node, stop_after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "overlap"), [("fdann", True), ("fdan", False), ("fwdgrl", False), ("fdan", True)]
)
def test_a_resumed_run_gives_the_model_of_an_uninterrupted_one(
    domains: list[dict[str, Any]], tmp_path: Path, method: str, overlap: bool
) -> None:
    """Only the server's checkpoint is left; all files and memory of the sites are deleted."""
    settings = {"exchange.overlap": overlap}
    whole = load_file(run(domains, tmp_path / "whole", method, **settings)["model"])
    with pytest.raises(KeyboardInterrupt):
        run(domains, tmp_path / "cut", method, stop_after(1), **settings)
    resident.cache_clear()
    for path in (tmp_path / "cut" / "four" / "sites").rglob("*.safetensors"):
        path.unlink()
    cut = load_file(
        run(domains, tmp_path / "cut", method, **settings, **{"run.resume": True})["model"]
    )
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("method", ["fdann", "fdan", "mdan"])
def test_runs_with_some_sources_per_round_and_half_precision_work(
    domains: list[dict[str, Any]], tmp_path: Path, method: str
) -> None:
    """With two of three sources per round, a source goes on from the others' discriminator."""
    events: list[dict[str, Any]] = []
    settings = {"sources-per-round": 2, "rounds": 3, "wire.dtype": "float16"}
    found = run(domains, tmp_path, method, events.append, **settings)
    assert {name for entry in found["rounds"] for name in entry["weights"]} == set(EXAMPLES)
    assert all(len(entry["weights"]) == 3 for entry in found["rounds"])
    assert not [e for e in events if e["event"] == "trouble"]


@pytest.mark.parametrize("method", METHODS)
def test_a_sites_own_limit_ends_the_round_for_all(
    domains: list[dict[str, Any]], tmp_path: Path, method: str
) -> None:
    events: list[dict[str, Any]] = []
    careful = [n | {"min-examples": 64} if n["name"] == "anna" else n for n in domains]
    with pytest.raises(Exception, match=r"left in this round|gave no usable reply"):
        run(careful, tmp_path, method, events.append, **{"wait.tries": 1})
    failed = {e["site"]: e["text"] for e in events if e.get("what") == "failed"}
    assert failed == dict.fromkeys(EXAMPLES, Code.EXCHANGE.public) | {"anna": Code.CONFIG.public}
    assert "anna" in next(e["text"] for e in events if e.get("what") == "exchange ended")


def test_a_round_that_ends_within_a_window_is_refused(domains: list[dict[str, Any]]) -> None:
    """Otherwise a sum would span parts of two windows, which can contain the same image."""
    site = Site(domains[0])
    client, told = fdann.Source(site), Group("gradient", 3, 1, (site.name,))
    client.data = load_source(domains[0]["data"], size=SIDE)
    with LocalHost().open([told], join=5, wait=5) as session:
        exchange = Exchange(session.invitations[site.name], LazyConfig(p=3))
    client.request = asked("source", exchange)
    assert len(list(client.whole_windows(6))) == 6
    with pytest.raises(WireError, match=r"for 7 steps, which is not a multiple of exchange\.p, 3"):
        client.whole_windows(7)


@pytest.mark.slow
def test_a_sites_own_noise_is_added_whatever_the_run_sets(
    domains: list[dict[str, Any]], tmp_path: Path
) -> None:
    def trained(name: str, sites: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Any]:
        found = run(sites, tmp_path / name, "fdann", **{"exchange.clip": 1.0})
        return load_file(found["model"]), found["rounds"]

    plain, rounds = trained("plain", domains)
    again, _ = trained("again", domains)
    blurred, _ = trained("blurred", [n | {"noise": 0.5 * (n["name"] == "anna")} for n in domains])
    assert all(torch.equal(again[name], value) for name, value in plain.items())
    assert not torch.equal(blurred["encoder.1.weight"], plain["encoder.1.weight"])
    assert [entry["gradient-examples"] for entry in rounds] == [min(EXAMPLES.values())] * 2


# ---- requests to a site ------------------------------------------------------------------------


def asked(part: str, exchange: Exchange | None = None, **numbers: Any) -> Request:
    """Return the first round's request to a site, without arrays."""
    task = RunConfig.parse(SETTINGS).task("fdann", 0, (1, SIDE, SIDE), ("a", "b"), 4)
    return Request(task, 1, task.stage(1), "align", part, {}, numbers, exchange)


@pytest.mark.parametrize(("role", "most"), [("source", 1), ("target", 3)])
def test_a_site_sends_gradients_only_of_the_discriminators_of_its_own_groups(
    domains: list[dict[str, Any]], role: str, most: int
) -> None:
    """Otherwise a server could name many groups and learn more about a window from each of them."""
    site = Site(next(node for node in domains if node["role"] == role))
    client = fdann.Source(site) if role == "source" else fdann.Target(site)
    for count in (most, most + 1):
        groups = [Group(f"gradient/{i}", 3, 1, (site.name,)) for i in range(count)]
        with LocalHost().open(groups, join=5, wait=5) as session:
            exchange = Exchange(session.invitations[site.name], LazyConfig(p=1))
            client.request = asked(role, exchange)
            if count > most:
                with pytest.raises(WireError, match=rf"{role} for .* {count} groups.* {most} at"):
                    client.stream().__enter__()
            else:
                with client.stream() as stream:
                    assert stream.sent("gradient/0") == 0


@pytest.mark.parametrize("steps", [None, 0, -3, 4.5, float("inf")])
def test_a_request_without_a_number_of_steps_is_refused(steps: Any) -> None:
    told = {} if steps is None else {"steps": steps}
    with pytest.raises(WireError, match="no whole number of steps"):
        _ = asked("source", **told).steps
    assert asked("source", steps=4).steps == 4


def test_a_request_without_p_is_refused() -> None:
    with LocalHost().open([Group("gradient", 3, 1, ("anna",))], join=5, wait=5) as session:
        invited = session.invitations["anna"].flat()
        assert Exchange.read(LazyConfig(p=1).flat() | invited).lazy.p == 1
        with pytest.raises(WireError, match=r"leaves exchange\.p open"):
            Exchange.read(LazyConfig().flat() | invited)


# ---- a discriminator that moves between sites --------------------------------------------------


@pytest.mark.parametrize("name", ["exp_avg_sq", "step"])
def test_an_unusable_discriminator_is_refused_and_names_the_target(
    domains: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def spoilt(*held: Any, honest: Any = state_of) -> dict[str, Tensor]:
        state = honest(*held)
        return state | {name: -state[name]}

    monkeypatch.setattr(travelling, "state_of", spoilt)
    events: list[dict[str, Any]] = []
    with pytest.raises(QuorumError, match=rf"{name} of 'discriminator' from town is negative"):
        run(domains, tmp_path, "fdann", events.append, **{"wait.tries": 1})
    assert not [e for e in events if e["event"] == "round"]


@pytest.mark.parametrize(
    ("optimizer", "momentum", "before"),
    [
        ("adam", 0.9, 3),
        ("adadelta", 0.9, 3),
        ("sgd", 0.9, 3),
        ("sgd", 0.0, 3),
        ("adam", 0.9, 0),
        ("sgd", 0.9, 0),
    ],
)
def test_a_discriminator_trains_on_at_another_site_bit_for_bit(
    optimizer: str, momentum: float, before: int
) -> None:
    """Also one that has made no step yet: with overlap, the first window applies no sum."""
    given = {"sizes": "5,4", "optimizer": optimizer, "momentum": momentum, "lr": 0.1}
    network = validate(DiscriminatorConfig, given)
    here, P = Discriminator(3, (5, 4), seed=1), discriminators.count(3, (5, 4))
    moves = discriminators.make_optimizer(here, network)
    g = torch.randn(6, P, generator=generator("travels"))
    for step in g[:before]:
        discriminators.set_gradient(here, step)
        moves.step()
    state = state_of(here, moves, g[2])
    packed = pack({n: t.numpy() for n, t in state.items()}, Kind.MODEL)
    assert packed.manifest == travelling_layout(3, network)

    there = Discriminator(3, (5, 4), seed=2)
    carried = discriminators.make_optimizer(there, network)
    arrived = {n: torch.tensor(a) for n, a in packed.unpack().items()}
    assert load_state(there, carried, arrived).equal(g[2])
    for DI, mover in ((here, moves), (there, carried)):
        for step in g[3:]:
            discriminators.set_gradient(DI, step)
            mover.step()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b)
    fresh = state_of(there, carried, g[5])
    assert any(not torch.equal(fresh[n], arrived[n]) for n in fresh)
    assert float(arrived["step"]) == (0 if optimizer == "sgd" else before)


SUMMING = ["dils", "fada", "fdan", "fdann", "fruda", "fwdgrl", "mdan"]


@pytest.mark.parametrize("lit", [False, True])
@pytest.mark.parametrize("method", SUMMING)
def test_no_gradient_leaves_over_features_of_few_images(
    domains: list[Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    lit: bool,
) -> None:
    """A made encoder gives all images but one the same features; an honest one is not refused."""

    def features(model: models.Model, x: Tensor) -> Tensor:
        z = honest(model, x)
        return z * (torch.arange(len(z)) == 0)[:, None] if lit else z

    honest = models.Model.features
    monkeypatch.setattr(models.Model, "features", features)
    real = [n | {"reproducible": False, "state-dir": str(tmp_path / n["name"])} for n in domains]
    bench = Bench(real, method, fada__layers__dropout=0.0)  # whose noise differs by image
    with pytest.raises(FeddaError) if lit else nullcontext():
        bench.round()
    assert ("of the features' variance" in caplog.text) == lit


def test_through_a_sites_own_noise_no_refusal_tells_of_its_images(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_privacy, "check_window", lambda *_: pytest.fail("asked"))
    real = [n | {"reproducible": False, "state-dir": str(tmp_path / n["name"])} for n in domains]
    Bench([n | {"noise": 1.0} for n in real], "fdann").round()


def test_one_huge_feature_hides_no_image() -> None:
    z = torch.randn(64, 6, generator=generator("huge"))
    check_window(z, 6)
    z[:, 0] *= 1e9
    check_window(z, 6)
    z[1:, 1:] = 0.0
    check_spread(z, 6)
    with pytest.raises(WireError, match=r"6 of 64 images have 8.% of .* may be 80% at most"):
        check_window(z, 6)
    check_window(torch.ones(64, 6), 6)  # of a network that died
