"""FADA over four sites: rounds against one place with all data, the contract, what stays."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from clients import fada
from clients.shared import disentangling
from clients.site.memory import resident
from clients.site.output_privacy import check_spread
from fedda import models, plugins, records
from fedda.adversarial.discriminators import Discriminator, count
from fedda.adversarial.disentangle import Estimator, branch, class_identifier
from fedda.errors import Code, ConfigError, ModelError, QuorumError, WireError
from fedda.exchange import in_process
from fedda.models import Extension
from fedda.settings import RunConfig
from fedda.train import generator, seed_for
from tests.adversarial_runs import batches, images
from tests.local_grid import (
    CLASSES,
    EXAMPLES,
    FAST,
    ONE_STEP,
    SIDE,
    SOURCES,
    Bench,
    Node,
    ScriptedGrid,
    run,
    stop_after,
)
from tests.reference import fada as twin

pytestmark = pytest.mark.usefixtures("fresh_sites")

LR, WIDTHS, UNITS, d = 0.05, (12, 10), 7, 16
MODELS: dict[str, dict[str, Any]] = {
    "I": {"fada.parts": "attention"},
    "II": {"fada.parts": "adversarial"},
    "III": {"fada.parts": "all"},
    "III, mean": {"fada.parts": "all", "fada.disentanglers": "mean"},
}
SETTINGS: dict[str, Any] = ONE_STEP | {
    "method": "fada",
    "wait.train": 300.0,
    "train.lr": LR,
    "train.schedule": "constant",
    "fada.weighting": "attention",
    "fada.gain": "sum",  # the weights differ most
    "fada.weights.alignment": 1.0,
    "fada.pace": 1.0,
    "fada.discriminator.sizes": "8",
    "fada.discriminator.optimizer": "sgd",
    "fada.discriminator.lr": 0.5,
    "fada.layers.disentangler": ",".join(map(str, WIDTHS)),
    "fada.layers.dropout": 0.0,  # draws from torch's own generator, which all sites share here
    "fada.layers.estimator": UNITS,
    "fada.weights.information": 0.1,
    "fada.weights.reconstruction": 0.5,
}
WEIGHED: dict[str, Any] = {
    "fada__parts": "attention",
    "fada__weighting": "attention",
    "wait__train": 300.0,
}
ATTENTIVE = {key.replace("__", "."): value for key, value in WEIGHED.items()}


def entries(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    assert results["events"] == []
    return results["trainings"]["fada"][0]["rounds"]


def model_of(results: Mapping[str, Any]) -> dict[str, Tensor]:
    return load_file(results["trainings"]["fada"][0]["model"])


def with_state(nodes: list[Node], folder: Path) -> list[Node]:
    return [node | {"state-dir": str(folder)} for node in nodes]


# ---- against one place with all data -----------------------------------------------------------


def networks(sources: list[str]) -> dict[str, dict[str, nn.Module]]:
    """The networks of model III by site, as all sites begin with them."""
    made = {
        "invariant": ("disentangler-invariant", lambda: branch(d, WIDTHS, 0.0, False)),
        "specific": ("disentangler-specific", lambda: branch(d, WIDTHS, 0.0, False)),
        "M": ("estimator", lambda: Estimator(WIDTHS[-1], WIDTHS[-1], UNITS)),
        "R": ("reconstructor", lambda: nn.Linear(2 * WIDTHS[-1], d)),
        "CI": ("class-identifier", lambda: class_identifier(WIDTHS[-1], CLASSES, True)),
    }
    return {
        site: {
            short: disentangling.seeded(0, name, make)
            for short, (name, make) in made.items()
            if short != "CI" or site != "town"
        }
        for site in (*sources, "town")
    }


@pytest.mark.parametrize(
    ("form", "sources"),
    [
        ("II", ["bert"]),
        pytest.param("II", SOURCES, marks=pytest.mark.slow),
        ("III", ["bert"]),
        pytest.param("III", SOURCES, marks=pytest.mark.slow),
    ],
)
def test_two_rounds_compute_the_same_as_one_central_loop(
    domains: list[Node], tmp_path: Path, form: str, sources: list[str]
) -> None:
    """With one source, two parties over the exchange at p = 1; with three, weighed by eq. 3."""
    nodes = [node for node in domains if node["name"] in (*sources, "town")]
    flat = SETTINGS | MODELS[form] | {"run.dir": str(tmp_path), "run.expect": len(nodes)}
    results, _ = run(with_state(nodes, tmp_path / "sites"), flat)
    rounds = entries(results)
    config = RunConfig.parse(FAST | flat)
    task = config.task("fada", 0, (1, SIDE, SIDE), ("a", "b", "c", "d"), len(nodes))
    extension = Extension.of(plugins.method("fada"), task.options)
    start = models.build(config.model, (1, SIDE, SIDE), CLASSES, 0, extension)
    width = start.head.in_features
    DIs = {s: Discriminator(width, (8,), seed_for(0, f"gradient/{s}")) for s in sources}
    nets = networks(sources) if "III" in form else None
    shuffles = {n["name"]: [generator(0, n["name"], t, "marginal") for t in (1, 2)] for n in nodes}
    (data, _), (town, _) = batches(domains, "fada", 1, 2), images(domains[3])
    data = {s: data[s] for s in (*sources, "town")}
    if len(sources) == 3:  # all sites then take as many steps as the largest
        assert len(data["town"][0]) == 4
    else:
        steps = -(-max(EXAMPLES[s] for s in data) // FAST["train.batch-size"])
        data = {s: [part[:steps] for part in of] for s, of in data.items()}
    seeds = [seed_for(0, "town", t, "clusters") % 2**32 for t in (1, 2)]
    wanted, past = twin.training(
        *(start, DIs, data, task.options),
        lr=LR,
        images=town,
        cluster_seeds=seeds,
        nets=nets,
        shuffles=shuffles,
    )
    found = model_of(results)
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=5e-5)
    for entry, w in zip(rounds, past, strict=True):
        assert entry["weights"] == pytest.approx(w, abs=2e-3)
    if nets is not None:  # the target keeps its branch of f_di in the file of its whole model
        kept = load_file(next((tmp_path / "sites" / "town").glob("*.model.safetensors")))
        for name, value in nets["town"]["invariant"].state_dict().items():
            found_D = kept[f"encoder.disentangler.{name}"]
            torch.testing.assert_close(found_D, value, rtol=2e-3, atol=5e-5)


def test_attention_alone_is_fedavg_with_other_weights(domains: list[Node], runs: Any) -> None:
    """Model I's first round: FedAvg's models of the sources, weighed by the softmax of gains."""
    bench = Bench(domains, "fada", **WEIGHED, fada__gain="sum")
    sent = bench.model
    model, _ = bench.round()
    w = bench.strategy.weights
    assert sum(w.values()) == pytest.approx(1) and sorted(w) == SOURCES
    trained_by = {
        bench.grid.nodes[r.metadata.src_node_id]["name"]: records.read(r.content)
        for r in bench.grid.replies
        if "metrics" in r.content
    }
    gains = trained_by["town"][1]["metrics"]
    trained = {s: trained_by[s][0]["model"].unpack() for s in SOURCES}
    wanted = twin.attention({s: float(gains[f"gain/{s}"]) for s in SOURCES})  # type: ignore[arg-type]
    assert w == pytest.approx(wanted, rel=1e-8)
    assert w["carl"] < 0.36 < EXAMPLES["carl"] / sum(EXAMPLES[s] for s in SOURCES)
    for name, value in model.items():
        if value.dtype.kind == "f":
            mean = sum(w[s] * trained[s][name].astype(float) for s in SOURCES)
            np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)
    assert sent.keys() == model.keys()


@pytest.mark.parametrize(("unit", "divisor"), [("sum", 1), ("share", 0)])
def test_gains_have_the_unit_that_the_settings_name_and_are_coarse(
    domains: list[Node], unit: str, divisor: int
) -> None:
    """Against eq. 3 for the models that the target was sent, to a thousandth of it before."""
    bench = Bench(domains, "fada", **WEIGHED, fada__gain=unit)
    bench.round()
    asked = bench.grid.requests[-1]
    assert asked.content["step"]["hop"] == "attend"  # type: ignore[index]
    packed, _ = records.read(asked.content)
    town, _ = images(domains[3])
    network = models.build(RunConfig.parse(FAST).model, (1, SIDE, SIDE), CLASSES, 0)

    def gap(name: str) -> twin.Gap:
        state = {n: torch.tensor(a) for n, a in packed[name].unpack().items()}
        seed = seed_for(0, "town", 1, "clusters") % 2**32
        return twin.gap(network, state, town, CLASSES, seed)

    numbers = records.read(bench.grid.replies[-1].content)[1]["metrics"]
    before = gap("model")
    for s in SOURCES:
        told, after = float(numbers[f"gain/{s}"]), gap(f"candidate/{s}")  # type: ignore[arg-type]
        if unit == "share":
            wanted, step = before[0] / before[1] - after[0] / after[1], 1e-3
        else:
            wanted, step = (before[0] - after[0]) / divisor, before[0] / divisor / 1000
        # A step and the gain are told to three digits; half a step is lost by rounding.
        assert abs(told - wanted) <= 0.501 * step + 0.01 * abs(wanted)
        assert told == pytest.approx(twin.coarse(before, after, unit), rel=1e-6)


@pytest.mark.parametrize(("most", "compared"), [(0, 48), (20, 32), (47, 48), (48, 48)])
def test_gains_are_over_fixed_blocks_of_many_images(
    domains: list[Node],
    runs: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    compared: int,
) -> None:
    """Whole blocks of 16 images, and the same ones in every round and for every candidate."""
    seen: list[set[int]] = []
    honest = fada.gap_of

    def noted(client: Any, model: Any, images: torch.Tensor) -> tuple[float, float]:
        seen.append(set(images.tolist()))
        assert len(seen[-1]) == len(images)
        return honest(client, model, images)

    monkeypatch.setattr(fada, "gap_of", noted)
    nodes = [node | {"min-images": 16} for node in domains]
    run(nodes, SETTINGS | runs | ATTENTIVE | {"fada.gain-images": most})
    assert len(seen) == 2 * (1 + len(SOURCES))
    assert {len(images) for images in seen} == {compared}
    assert all(images == seen[0] for images in seen)


def test_features_of_few_images_tell_no_gain(domains: list[Node]) -> None:
    """A crafted candidate whose features are those of single images is refused, by one sentence."""
    z = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    check_spread(z, 16)
    lit = torch.zeros(40, 5)
    lit[7] = 1.0
    for crafted, text in ((lit, "4 of 40 images have 98% of"), (torch.ones(40, 5), "have 0% of")):
        with pytest.raises(WireError, match=text):
            check_spread(crafted, 16)
    check_spread(torch.cat([lit[:8], z[:8]]), 1)


# ---- what crosses, and what stays --------------------------------------------------------------


@pytest.mark.parametrize("form", ["II", "III"])
def test_only_gradients_of_domain_identifiers_are_summed(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Their length is that of DI's parameters: no features, one per example, are among them."""
    pushed: list[tuple[str, str, int]] = []
    session = in_process.LocalSession
    honest = session.push

    def push(self: Any, site: str, group: str, index: int, gradient: Any, examples: int) -> None:
        pushed.append((site, group, gradient.size))
        honest(self, site, group, index, gradient, examples)

    monkeypatch.setattr(session, "push", push)
    run(domains, SETTINGS | runs | MODELS[form])
    P = count(WIDTHS[-1] if form == "III" else d, (8,))
    wanted = {(site, f"gradient/{s}", P) for s in SOURCES for site in (s, "town")}
    assert set(pushed) == wanted
    assert len(pushed) == 2 * 4 * len(wanted)  # rounds and steps


def crossed_bytes(grid: ScriptedGrid) -> Iterator[bytes]:
    for message in (*grid.replies, *grid.requests):
        if "arrays" in message.content or "manifests" in message.content:
            for packed in records.read(message.content)[0].values():
                yield bytes(packed.buffer)


@pytest.mark.parametrize("form", ["III", "III, mean"])
def test_the_sites_own_networks_never_leave(
    domains: list[Node], runs: dict[str, str], tmp_path: Path, form: str
) -> None:
    """No tensor that a site keeps is anywhere in what crossed; averaged branches are found."""
    nodes = with_state(domains, tmp_path / "sites")
    grid = ScriptedGrid(nodes)
    run(nodes, SETTINGS | runs | MODELS[form], grid=grid)
    crossed = list(crossed_bytes(grid))
    assert len(crossed) > 20
    names: dict[str, set[str]] = {}
    for name in EXAMPLES:
        for path in (tmp_path / "sites" / name).glob("*.method.safetensors"):
            for key, tensor in load_file(path).items():
                if "/module/" not in key or tensor.numel() < 4 or not tensor.any():
                    continue
                names.setdefault(name, set()).add(key.split("/")[0])
                held = tensor.numpy().tobytes()
                if not (tensor == 1).all() and not (tensor == 0).all():
                    assert not any(held in sent for sent in crossed), (name, key)
    own = {"disentangler-specific", "estimator", "reconstructor"}
    own |= {"disentangler-invariant"} if form == "III" else set()
    assert names == {s: own | {"class-identifier"} for s in SOURCES} | {"town": own}
    sent = {
        e.name
        for reply in grid.replies
        if "arrays" in reply.content
        for e in records.read(reply.content)[0]["model"].manifest.entries
    }
    assert any("disentangler" in n for n in sent) is (form == "III, mean")


# ---- what the target keeps ---------------------------------------------------------------------


def test_the_target_keeps_a_whole_model_and_the_servers_lacks_its_disentangler(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    nodes = with_state(domains, tmp_path / "sites")
    results, _ = run(nodes, SETTINGS | runs | {"rounds": 3})
    training = results["trainings"]["fada"][0]
    assert training["adapted"]["site"] == "town"
    model, meta = models.load(tmp_path / "sites" / training["adapted"]["file"])
    assert meta.extension is not None and meta.extension.method == "fada"
    with np.load(next(n["data"] for n in domains if n["name"] == "town")) as file:
        x, y = torch.from_numpy(file["x_test"]).unsqueeze(1), torch.from_numpy(file["y_test"])
    accuracy = float((models.predict(model, x).argmax(dim=1) == y).double().mean())
    assert accuracy == pytest.approx(training["final_accuracy"], abs=1e-6)
    server, _ = models.load(training["model"])
    with pytest.raises(ModelError, match="file that the target keeps"):
        models.predict(server, x)


def test_a_target_that_lost_its_disentangler_says_so(domains: list[Node], tmp_path: Path) -> None:
    flat = SETTINGS | {"run.dir": str(tmp_path / "runs"), "rounds": 3, "wait.tries": 1}
    nodes = with_state(domains, tmp_path / "sites")
    with pytest.raises(KeyboardInterrupt):
        run(nodes, flat, stop_after(1))
    resident.cache_clear()
    for path in (tmp_path / "sites" / "town").glob("*.method.safetensors"):
        path.unlink()
    events: list[dict[str, Any]] = []
    with pytest.raises(QuorumError, match="town"):
        run(nodes, flat | {"run.resume": True}, events.append)
    assert Code.LOST.public in {e.get("text") for e in events}


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.nightly("fedda/algorithms/fada.py", "clients/fada.py", "strategies/fada.py")
@pytest.mark.parametrize(
    "settings",
    [
        {"fada.layers.class-norm": False, "exchange.p": 2},
        {"fada.layers.disentangler": "12,16", "wire.dtype": "float16"},
        {"fada.disentanglers": "mean"},
        {"fada.weighting": "uniform", "sources-per-round": 2, "rounds": 3},
        {"fada.layers.dropout-first": True, "fada.layers.dropout": 0.3, "fada.pace": 2.0},
    ],
)
def test_a_run_works_with_every_choice(
    domains: list[Node], runs: dict[str, str], settings: dict[str, Any]
) -> None:
    results, _ = run(domains, SETTINGS | runs | settings)
    usual, _ = run(
        domains, SETTINGS | runs | {"run.name": "usual", "rounds": len(entries(results))}
    )
    found, other = model_of(results), model_of(usual)
    same = [n for n in found if n in other and found[n].shape == other[n].shape]
    assert any(not torch.equal(found[n], other[n]) for n in same)


@pytest.mark.parametrize("form", ["II", "III"])
def test_a_source_that_is_not_invited_to_sum_gradients_trains_on_its_labels(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    strategy = plugins.strategy("fada")
    honest = strategy.groups

    def groups(self: Any, sources: Any) -> Any:
        return {s: nodes for s, nodes in honest(self, sources).items() if s != "anna"}

    monkeypatch.setattr(strategy, "groups", groups)
    settings = {k.replace(".", "__").replace("-", "_"): v for k, v in SETTINGS.items()}
    bench = Bench(domains, "fada", **settings | {"fada__parts": MODELS[form]["fada.parts"]})
    for t in (1, 2):
        bench.round(t)
        bench.strategy.adjourn()
    assert sorted(bench.strategy.weights) == SOURCES
    numbers = {
        bench.grid.nodes[r.metadata.src_node_id]["name"]: records.read(r.content)[1]["metrics"]
        for r in bench.grid.replies
        if "arrays" in r.content
    }
    assert "discriminator-loss" not in numbers["anna"] and numbers["anna"]["loss"] > 0
    assert "discriminator-loss" in numbers["bert"]


def test_attention_needs_no_exchange(domains: list[Node], runs: dict[str, str]) -> None:
    """Not even settings with which an exchange would be refused stop model I."""
    flat = SETTINGS | runs | MODELS["I"] | {"exchange.p": 1, "exchange.min-examples": 256}
    assert len(entries(run(domains, flat)[0])) == 2
    with pytest.raises(ConfigError, match=r"exchange\.p is 1"):
        run(domains, flat | MODELS["II"])
