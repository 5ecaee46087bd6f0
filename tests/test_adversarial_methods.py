"""f-DANN, f-WDGRL and f-DAN over four sites against loops that have all the data in one place."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from clients import fdann
from clients.base import Client
from clients.site.memory import Site, resident
from clients.site.request import Exchange, Request
from fedda import models
from fedda.adversarial import discriminators, travelling
from fedda.adversarial.discriminators import Discriminator, Network
from fedda.adversarial.travelling import load_state, state_of, travelling_layout
from fedda.config import LazyConfig, validate
from fedda.data import load_source
from fedda.errors import Code, QuorumError, WireError
from fedda.exchange import Group, LocalHost
from fedda.maths import fourier
from fedda.settings import RunConfig
from fedda.train import generator, seed_for
from fedda.wire import Kind, pack
from server.journal import Journal
from server.simulation import simulate
from tests.local_grid import CLASSES, EXAMPLES, SIDE, stop_after
from tests.reference import adversarial as twin
from tests.reference import fourier as exact
from tests.reference import windows

METHODS = ["fdann", "fwdgrl", "fdan"]
SOURCES = ("anna", "bert", "carl")
BATCH, LR, DI_LR, GAMMA, WIDTH = 16, 0.02, 0.01, 10.0, 16
SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "run.name": "four",
    "model.name": "mlp",
    "model.sizes": str(WIDTH),
    "train.batch-size": BATCH,
    "train.lr": LR,
    "train.schedule": "constant",
    "exchange.p": 2,
    "exchange.min-examples": 1,
    "exchange.expose-features": True,
    "exchange.clip": 1e9,
    "track.tensorboard": False,
    "fdann.discriminator.sizes": "8",
    "fdann.discriminator.lr": DI_LR,
    "fwdgrl.discriminator.sizes": "8",
    # Not Adam: a critic's bias may have a gradient that is 0 but for rounding, which it blows up.
    "fwdgrl.discriminator.optimizer": "sgd",
    "fwdgrl.discriminator.lr": DI_LR / 5,
    "fwdgrl.critic-steps": 2,
    "fwdgrl.penalty": GAMMA,
    "fdan.frequencies": 20,
    "fdan.scale": 3.0,
}


def run(
    domains: list[dict[str, Any]], folder: Path, method: str, listener: Any = None, **settings: Any
) -> dict[str, Any]:
    flat = SETTINGS | {"method": method, "run.dir": str(folder)} | settings
    journal = Journal(None, *([listener] if listener else []))
    sites = [node | {"threads": 1} for node in domains]
    return simulate(RunConfig.parse(flat), sites, journal, "process")["trainings"][method][0]


# ---- the same data, in one place ---------------------------------------------------------------


def images(node: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    with np.load(node["data"]) as file:
        x = torch.from_numpy(file["x_train"]).float().unsqueeze(1) / 255
        return x, torch.from_numpy(file["y_train"]) if "y_train" in file else None


Read = dict[str, list[list[twin.Batch]]]


def batches(domains: list[dict[str, Any]], method: str, p: int, rounds: int) -> tuple[Read, Any]:
    """What each site reads, by round and step, and what its critic reads besides."""
    steps = -(-4 // p) * p  # 60 images in batches of 16
    many = 2 if method == "fwdgrl" else 1  # of each two batches the first is the critic's alone
    data: Read = {}
    extra: dict[str, list[list[Tensor]]] = {}
    for node in domains:
        (x, y), name = images(node), node["name"]
        parts = windows.batches(len(x), BATCH, p, seed_for(0, name), rounds * steps * many)
        read = [(x[part], None if y is None else y[part]) for part in parts]
        cut = [read[t * steps * many : (t + 1) * steps * many] for t in range(rounds)]
        data[name] = [part[many - 1 :: many] for part in cut]
        extra[name] = [[x for x, _ in part[::2]] for part in cut]
    return data, extra if many > 1 else {}


def groups(pairs: bool) -> dict[str, list[str]]:
    return {f"/{s}": [s] for s in SOURCES} if pairs else {"": list(SOURCES)}


def centralised(
    method: str, domains: list[dict[str, Any]], p: int, pairs: bool, rounds: int
) -> Any:
    config = RunConfig.parse(SETTINGS)
    start = models.build(config.model, (1, SIDE, SIDE), CLASSES, seed=0)
    data, extra = batches(domains, method, p, rounds)
    members = groups(pairs)
    if method == "fdan":
        multiples = (0.25, 0.5, 1.0, 2.0, 4.0)
        W = fourier.frequencies(WIDTH, 20, 3.0, multiples, generator(0, "frequencies"))
        return twin.matching(start, W, members, data, EXAMPLES, p, LR)
    DIs = {d: Discriminator(WIDTH, (8,), seed_for(0, f"gradient{d}")) for d in members}
    if method == "fdann":
        adam = partial(optim.Adam, lr=DI_LR)
        return twin.adversarial("grl", start, DIs, members, data, {}, EXAMPLES, p, LR, adam)
    draws: dict[str, torch.Generator] = {}
    calls = dict.fromkeys(EXAMPLES, 0)
    per_round = 2 * len(data["town"][0])  # critic steps

    def penalty(DI: nn.Module, z: Tensor, site: str) -> Tensor:
        each = len(members) if site == "town" else 1
        if calls[site] % (per_round * each) == 0:
            draws[site] = generator(0, site, calls[site] // (per_round * each) + 1, "penalty")
        calls[site] += 1
        return GAMMA * discriminators.gradient_penalty(DI, z.detach(), draws[site])

    sgd = partial(optim.SGD, lr=DI_LR / 5, momentum=0.9)
    return twin.adversarial(
        "wassda", start, DIs, members, data, extra, EXAMPLES, p, LR, sgd, penalty
    )


def alone(domains: list[dict[str, Any]], method: str, p: int) -> dict[str, Tensor]:
    """What the sites would compute if no other domain moved their encoders."""
    start = models.build(RunConfig.parse(SETTINGS).model, (1, SIDE, SIDE), CLASSES, seed=0)
    data, _ = batches(domains, method, p, 2)
    return twin.matching(start, torch.zeros(1, WIDTH), {}, data, EXAMPLES, p, LR).state_dict()


QUICK = {("fdann", 3, False), ("fdann", 1, True), ("fwdgrl", 3, False), ("fdan", 3, False)}
CASES = [(method, p, pairs) for method in METHODS for p in (1, 3) for pairs in (False, True)]


@pytest.mark.parametrize(
    ("method", "p", "pairs"),
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES],
)
def test_four_sites_compute_what_one_place_would(
    domains: list[dict[str, Any]], tmp_path: Path, method: str, p: int, pairs: bool
) -> None:
    settings = {"exchange.p": p, f"{method}.pairs": pairs}
    found = load_file(run(domains, tmp_path, method, **settings)["model"])
    wanted = centralised(method, domains, p, pairs, rounds=2)
    plain = alone(domains, method, p)
    moved = 0.0
    for name, value in wanted.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5)
            if not name.endswith(("running_mean", "running_var")):
                moved = max(moved, float((found[name] - plain[name]).abs().max()))
    assert moved > 1e-3  # the other domains had their part in it


# ---- what crosses ------------------------------------------------------------------------------


def arrays(entry: dict[str, Any]) -> set[str]:
    return {k for k in entry["bytes"] if "scalars" not in k}


def size(method: str) -> int:
    """Bytes of one gradient."""
    return 40 * 4 if method == "fdan" else discriminators.count(WIDTH, (8,)) * 4


@pytest.mark.parametrize("method", METHODS)
def test_models_and_gradients_cross_and_are_counted(
    domains: list[dict[str, Any]], tmp_path: Path, method: str
) -> None:
    found = run(domains, tmp_path, method)
    ways = [f"{way} {role}" for way in ("to", "from") for role in ("source", "target")]
    syncs = 4 if method == "fwdgrl" else 2  # of 4 steps, p = 2; the critic has twice as many
    for t, entry in enumerate(found["rounds"]):
        assert arrays(entry) == {f"{way} {kind}" for way in ways for kind in ("model", "gradient")}
        for way in ways:
            members = 3 if "source" in way else 1
            least = members * syncs * size(method)
            spare = members * (syncs * 64 + 400)  # frames' heads, and f-DAN's witness itself
            assert least < entry["bytes"][f"{way} gradient"] < least + spare
        assert set(entry["weights"]) == set(EXAMPLES)
        assert entry["weights"]["bert"] == pytest.approx(50 / 198)
        numbers = {"fdan": {"mmd"}, "fwdgrl": {"discriminator-loss"}}.get(
            method, {"discriminator-loss", "discriminator-accuracy"}
        )
        assert numbers | {"loss"} <= set(entry)
        m = entry["bytes"]["from source model"] / 3
        D = entry["bytes"]["from target model"] - m
        if method == "fdan":
            assert D == 0
        else:
            network = RunConfig.parse(SETTINGS).options[method].discriminator
            assert 0 <= D - travelling_layout(WIDTH, network).nbytes < 300
        sent = D if t else 0  # in the first round the sites make it
        assert entry["bytes"]["to source model"] == 3 * (m + sent)
        assert entry["bytes"]["to target model"] == 2 * m + sent  # once more to test it
    assert found["rounds"][-1]["loss"] < found["rounds"][0]["loss"]


def test_without_a_scale_the_first_round_finds_it(
    domains: list[dict[str, Any]], tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    found = run(domains, tmp_path, "fdan", events.append, **{"fdan.scale": 0.0, "rounds": 3})
    first, *others = found["rounds"]
    assert arrays(first) == {"to source model", "from source model", "to target model"}
    assert all("from target gradient" in arrays(entry) for entry in others)
    assert set(first["weights"]) == set(SOURCES)
    folder = Path(found["model"]).parent
    scale = json.loads((folder / "checkpoint.json").read_text())["numbers"]["scale"]
    # It is of the first round's mean, a round of FedAvg over the sources.
    once = run(domains, tmp_path / "once", "fedavg", **{"rounds": 1})
    network = models.build(RunConfig.parse(SETTINGS).model, (1, SIDE, SIDE), CLASSES, seed=0)
    network.load_state_dict(load_file(once["model"]))
    network.eval()
    town = next(node for node in domains if node["name"] == "town")
    with torch.no_grad():
        z = network.features(images(town)[0])
    expected = exact.median_distance(z.tolist())
    assert scale == pytest.approx(expected, rel=0.05)  # 3 rounds have another schedule than 1
    assert not [e for e in events if e["event"] == "trouble"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "overlap"),
    [
        ("fdann", True),
        ("fdan", False),
        ("fwdgrl", False),
        ("fdan", True),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    domains: list[dict[str, Any]], tmp_path: Path, method: str, overlap: bool
) -> None:
    """Nothing but the server's checkpoint is left: no site keeps anything."""
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


@pytest.mark.parametrize("method", ["fdann", "fdan"])
def test_sites_that_come_later_and_half_precision(
    domains: list[dict[str, Any]], tmp_path: Path, method: str
) -> None:
    """Two of three sources a round: each finds the discriminator as the others left it."""
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
    with pytest.raises(Exception, match=r"sources are left|gave no usable reply"):
        run(careful, tmp_path, method, events.append, **{"wait.tries": 1})
    failed = {e["site"]: e["text"] for e in events if e.get("what") == "failed"}
    assert failed == dict.fromkeys(EXAMPLES, Code.EXCHANGE.public) | {"anna": Code.CONFIG.public}
    assert "anna" in next(e["text"] for e in events if e.get("what") == "exchange ended")


def test_a_round_of_one_window_that_only_sends(
    domains: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"exchange.overlap": True, "exchange.p": 4}
    found = run(domains, tmp_path, "fdann", **settings)
    assert len(found["rounds"]) == 2


def test_a_round_of_part_of_a_window_is_refused(domains: list[dict[str, Any]]) -> None:
    """Else its sums would be over parts of two windows, which can have images in common."""
    site = Site(domains[0])
    client, told = fdann.Source(site), Group("gradient", 3, 1, (site.name,))
    client.data = load_source(domains[0]["data"], size=SIDE)
    with LocalHost().open([told], join=5, wait=5) as session:
        exchange = Exchange(session.invitations[site.name], LazyConfig(p=3))
    client.request = asked("source", exchange)
    assert len(list(client.whole_windows(6))) == 6
    with pytest.raises(WireError, match=r"for 7 steps, which are no whole windows of 3"):
        client.whole_windows(7)


def test_a_target_with_few_images_does_not_tell_their_distances(
    domains: list[dict[str, Any]], tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    careful = [n | {"min-images": 49} if n["name"] == "town" else n for n in domains]
    with pytest.raises(QuorumError):
        run(careful, tmp_path, "fdan", events.append, **{"fdan.scale": 0.0, "wait.tries": 1})
    failed = {e["site"]: e["text"] for e in events if e.get("what") == "failed"}
    assert failed == {"town": Code.CONFIG.public}


@pytest.mark.slow
def test_a_sites_own_noise_is_added_whatever_the_run_says(
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


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_gradient_that_leaves_is_over_an_image_twice(
    domains: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Over three rounds, several epochs, and at a site that has fewer images than a window."""
    read: dict[str, list[list[int]]] = {name: [] for name in EXAMPLES}

    def spy(self: Any, indices: Tensor, honest: Any = Client.inputs) -> Any:
        read[self.site.name].append(indices.tolist())
        return honest(self, indices)

    monkeypatch.setattr(Client, "inputs", spy)
    run(domains, tmp_path, method, **{"rounds": 3, "exchange.p": 3})
    for name, parts in read.items():
        assert len(parts) == 3 * 6 * (2 if method == "fwdgrl" else 1)
        for at in range(0, len(parts), 3):
            window = [i for part in parts[at : at + 3] for i in part]
            assert len(window) == max(EXAMPLES[name], 3 * BATCH)
            assert set(window) == set(range(EXAMPLES[name]))


# ---- what a site is asked for ------------------------------------------------------------------


def asked(part: str, exchange: Exchange | None = None, **numbers: Any) -> Request:
    """The first round's request to a site, without any array."""
    task = RunConfig.parse(SETTINGS).task("fdann", 0, (1, SIDE, SIDE), ("a", "b"), 4)
    return Request(task, 1, task.stage(1), "align", part, {}, numbers, exchange)


@pytest.mark.parametrize(("role", "most"), [("source", 1), ("target", 3)])
def test_a_site_sends_gradients_of_no_more_discriminators_than_it_has_a_part_in(
    domains: list[dict[str, Any]], role: str, most: int
) -> None:
    """A server could name any number of groups, and learn more of a window by each."""
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


def test_a_request_that_leaves_p_open_is_refused() -> None:
    with LocalHost().open([Group("gradient", 3, 1, ("anna",))], join=5, wait=5) as session:
        invited = session.invitations["anna"].flat()
        assert Exchange.read(LazyConfig(p=1).flat() | invited).lazy.p == 1
        with pytest.raises(WireError, match=r"leaves exchange\.p open"):
            Exchange.read(LazyConfig().flat() | invited)


# ---- a discriminator that travels --------------------------------------------------------------


@pytest.mark.parametrize("name", ["exp_avg_sq", "step"])
def test_a_discriminator_that_would_spoil_the_next_round_is_the_targets_fault(
    domains: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def spoilt(*held: Any, honest: Any = state_of) -> dict[str, Tensor]:
        found = honest(*held)
        return found | {name: -found[name]}

    monkeypatch.setattr(travelling, "state_of", spoilt)
    events: list[dict[str, Any]] = []
    with pytest.raises(QuorumError, match=rf"{name} of 'discriminator' from town is negative"):
        run(domains, tmp_path, "fdann", events.append, **{"wait.tries": 1})
    assert not [e for e in events if e["event"] == "round"]


@pytest.mark.parametrize(
    ("optimizer", "momentum", "before"),
    [("adam", 0.9, 3), ("sgd", 0.9, 3), ("sgd", 0.0, 3), ("adam", 0.9, 0), ("sgd", 0.9, 0)],
)
def test_a_discriminator_goes_on_elsewhere_as_it_would_have_here(
    optimizer: str, momentum: float, before: int
) -> None:
    """Also one that has not moved yet: with overlap the first window only sends."""
    given = {"sizes": "5,4", "optimizer": optimizer, "momentum": momentum, "lr": 0.1}
    network = validate(Network, given)
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
    assert float(arrived["step"]) == (before if optimizer == "adam" else 0)
