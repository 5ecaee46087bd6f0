"""MDAN over four sites: the sources' weights, and its rounds against one place with all data."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clients import fdann, mdan
from fedda import models, records
from fedda.adversarial.discriminators import Discriminator
from fedda.errors import Code, QuorumError
from fedda.settings import RunConfig
from fedda.train import seed_for
from tests.adversarial_runs import batches
from tests.local_grid import CLASSES, EXAMPLES, FAST, SIDE, Bench, Node, changed, run
from tests.reference import mdan as twin

pytestmark = pytest.mark.usefixtures("fresh_sites")

SOURCES = ("anna", "bert", "carl")
FORMS = [(maximum, sign) for maximum in ("soft", "hard") for sign in ("code", "paper")]
forms = pytest.mark.parametrize(("maximum", "sign"), FORMS)
LR, MOMENTUM = 0.05, 0.9
SETTINGS: dict[str, Any] = {
    "method": "mdan",
    "train.lr": LR,
    "train.schedule": "constant",
    # Large enough for the discriminators' losses to change the weights and move the encoders.
    "mdan.mu": 0.5,
    "mdan.loss": "reversal",
    "mdan.discriminator.sizes": "8",
    "mdan.discriminator.optimizer": "sgd",
    "mdan.discriminator.lr": 0.5,
}


def form(maximum: str, sign: str) -> dict[str, Any]:
    return SETTINGS | {"mdan.max": maximum, "mdan.sign": sign}


def keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with names as `Bench` takes them."""
    return {name.replace(".", "__").replace("-", "_"): v for name, v in settings.items()}


class Rounds:
    """Rounds of a strategy, with the requests and replies of the last one."""

    def __init__(self, nodes: list[Node], script: Any = None, **settings: Any) -> None:
        self.bench = Bench(nodes, "mdan", script, **keywords(SETTINGS | settings))
        self.options = self.bench.task.options

    def next(self, server_round: int) -> dict[str, Any]:
        grid = self.bench.grid
        grid.replies.clear()
        try:
            self.model, numbers = self.bench.round(server_round)
        finally:
            self.bench.strategy.adjourn()
        self.steps = {self.name(q.metadata.dst_node_id): self.step(q) for q in self.bench.opened}
        replies = {self.name(r.metadata.src_node_id): records.read(r.content) for r in grid.replies}
        self.models = {n: arrays["model"].unpack() for n, (arrays, _) in replies.items()}
        self.numbers = {n: dict(tables["metrics"]) for n, (_, tables) in replies.items()}
        return numbers

    def name(self, node: int) -> str:
        return self.bench.grid.nodes[node]["name"]

    @staticmethod
    def step(request: Any) -> dict[str, Any]:
        return dict(request.content["step"])

    @property
    def weights(self) -> dict[str, float]:
        """The sources' weights as they were sent to the target."""
        step = self.steps["town"]
        return {n.partition("/")[2]: w for n, w in step.items() if n.startswith("weight/")}

    @property
    def losses(self) -> dict[str, tuple[float, float]]:
        """CE and d of every source for which this round's replies have all the numbers."""
        half, town = "discriminator-loss", self.numbers["town"]
        complete = {}
        for s in {*SOURCES} & {*self.numbers}:
            own = self.numbers[s]
            if {"loss", half} <= {*own} and f"{half}/{s}" in town:
                complete[s] = (own["loss"], own[half] + town[f"{half}/{s}"])
        return complete


# ---- the weights -------------------------------------------------------------------------------


@forms
def test_the_weights_come_from_the_last_rounds_replies(
    domains: list[Node], maximum: str, sign: str
) -> None:
    rounds = Rounds(domains, **{"mdan.max": maximum, "mdan.sign": sign})
    rounds.next(1)
    assert rounds.weights == pytest.approx(dict.fromkeys(SOURCES, 1 / 3), abs=1e-15)
    losses = rounds.losses
    rounds.next(2)
    wanted = twin.source_weights(SOURCES, losses, rounds.options)
    assert rounds.weights == pytest.approx(wanted, rel=1e-12)
    assert max(wanted.values()) - min(wanted.values()) > 0.05  # they are not all alike
    assert [not any("weight" in n for n in rounds.steps[s]) for s in SOURCES] == [True] * 3


@forms
def test_the_mean_of_models_uses_the_weights(domains: list[Node], maximum: str, sign: str) -> None:
    rounds = Rounds(domains, **{"mdan.max": maximum, "mdan.sign": sign})
    for t in (1, 2):
        rounds.next(t)
        local = {s: {n: torch.tensor(a) for n, a in m.items()} for s, m in rounds.models.items()}
        wanted = twin.averaged(local, EXAMPLES, rounds.weights)
        for name, value in rounds.model.items():
            np.testing.assert_allclose(value, wanted[name].numpy(), rtol=1e-6, atol=1e-7)
    weights = rounds.bench.strategy.weights
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["town"] == pytest.approx(EXAMPLES["town"] / sum(EXAMPLES.values()))
    assert {s: weights[s] / (1 - weights["town"]) for s in SOURCES} == pytest.approx(rounds.weights)


@pytest.mark.parametrize("loss", ["inverted", "reversal"])
def test_the_targets_encoder_moves_by_the_weighted_gradients(loss: str) -> None:
    """As loops over the discriminators give it; their numbers are reported beside their mean."""
    torch.manual_seed(0)
    z = torch.randn(5, 3)
    w = {"anna": 0.7, "bert": 0.2, "carl": 0.1}
    DIs = {s: Discriminator(3, (4,), seed) for seed, s in enumerate(w)}
    half = fdann.HALVES["grl", "target"]
    target = mdan.Target(None)  # type: ignore[arg-type]
    target.half = half
    target.copies = {f"discriminator/{s}": _Copy(DI) for s, DI in DIs.items()}
    numbers = {f"weight/{s}": weight for s, weight in w.items()}
    options = RunConfig.parse(SETTINGS | {"mdan.loss": loss}).options["mdan"]
    target.request = _Asked(numbers, options)  # type: ignore[assignment]
    moved = z.clone().requires_grad_()
    target.against(moved).backward()
    wanted = torch.zeros_like(z)
    for s, DI in DIs.items():
        at = z.clone().requires_grad_()
        pull = twin.half(DI, at, source=loss == "inverted")
        (pull if loss == "inverted" else -pull).backward()
        assert at.grad is not None
        wanted += w[s] * at.grad
    torch.testing.assert_close(moved.grad, wanted)
    each = {f"discriminator/{s}": {"discriminator-loss": float(i)} for i, s in enumerate(w)}
    assert target.reported(each) == pytest.approx(
        {f"discriminator-loss/{s}": float(i) for i, s in enumerate(w)} | {"discriminator-loss": 1}
    )


class _Copy:
    def __init__(self, DI: Discriminator) -> None:
        self.DI = DI


class _Asked:
    part = "target"

    def __init__(self, numbers: dict[str, float], options: Any) -> None:
        self.numbers = numbers
        self.task = SimpleNamespace(options=options)


def test_a_source_that_was_away_keeps_no_old_weight(domains: list[Node]) -> None:
    rounds = Rounds(domains, **{"mdan.weighting": "uniform", "rounds": 4})
    rounds.next(1)
    before = rounds.losses
    assert "anna" in before
    rounds.bench.grid.offline = {"anna"}
    rounds.next(2)
    others = SOURCES[1:]
    assert rounds.weights == pytest.approx(
        twin.source_weights(others, before, rounds.options), rel=1e-12
    )
    assert "anna" not in rounds.bench.strategy.weights
    assert rounds.bench.strategy.weights["town"] == pytest.approx(1 / 3)
    rounds.bench.grid.offline = set()
    losses = rounds.losses
    assert set(losses) == set(others)
    rounds.next(3)
    w = rounds.weights
    assert w == pytest.approx(twin.source_weights(SOURCES, losses, rounds.options), rel=1e-12)
    assert min(w["bert"], w["carl"]) < w["anna"] < max(w["bert"], w["carl"])
    losses = rounds.losses
    rounds.next(4)  # its losses are known again
    assert rounds.weights == pytest.approx(
        twin.source_weights(SOURCES, losses, rounds.options), rel=1e-12
    )


@pytest.mark.parametrize(
    ("site", "number", "unknown"),
    [
        ("anna", "loss", {"anna"}),
        ("anna", "discriminator-loss", {"anna"}),
        ("town", "discriminator-loss/bert", {"bert"}),
    ],
)
def test_a_source_with_a_missing_number_counts_as_unknown(
    domains: list[Node], site: str, number: str, unknown: set[str]
) -> None:
    def leave_out(request: Any, reply: Any) -> list[Any]:
        return [changed(request, reply, without=[number])]

    rounds = Rounds(domains, {site: leave_out})
    rounds.next(1)
    assert set(rounds.losses) == {*SOURCES} - unknown
    wanted = twin.source_weights(SOURCES, rounds.losses, rounds.options)
    rounds.next(2)
    assert rounds.weights == pytest.approx(wanted, rel=1e-12)


def test_a_round_without_the_only_source_that_counts_fails_and_can_be_repeated(
    domains: list[Node],
) -> None:
    rounds = Rounds(domains, **{"mdan.max": "hard"})
    rounds.next(1)
    wanted = twin.source_weights(SOURCES, rounds.losses, rounds.options)
    (worst,) = (s for s in SOURCES if wanted[s] == 1)
    memory = rounds.bench.strategy.memory.copy()
    rounds.bench.grid.script[worst] = lambda request, reply: [
        changed(request, reply, without=["steps"])
    ]
    with pytest.raises(QuorumError, match="No source that counts in the mean"):
        rounds.next(2)
    rounds.bench.grid.script.clear()
    rounds.bench.strategy.memory = memory
    rounds.next(2)
    assert rounds.weights == wanted
    assert rounds.bench.strategy.weights[worst] == pytest.approx(
        1 - EXAMPLES["town"] / sum(EXAMPLES.values())
    )


# ---- whole runs --------------------------------------------------------------------------------


def model_of(results: dict[str, Any]) -> dict[str, Tensor]:
    method = next(iter(results["trainings"]))
    return load_file(results["trainings"][method][0]["model"])


@forms
def test_two_rounds_compute_the_same_as_in_one_place(
    domains: list[Node], runs: dict[str, str], maximum: str, sign: str
) -> None:
    settings = runs | form(maximum, sign)
    results, _ = run(domains, settings)
    assert results["events"] == []
    (training,) = results["trainings"]["mdan"]
    options = RunConfig.parse(form(maximum, sign)).options["mdan"]
    start = models.build(RunConfig.parse(FAST).model, (1, SIDE, SIDE), CLASSES, seed=0)
    DIs = {s: Discriminator(start.width, (8,), seed_for(0, f"gradient/{s}")) for s in SOURCES}
    data, _ = batches(domains, "mdan", 1, 2)
    wanted, past = twin.training(start, DIs, data, EXAMPLES, options, LR, MOMENTUM)
    found = load_file(training["model"])
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5)
    for entry, w in zip(training["rounds"], past, strict=True):
        share = 1 - entry["weights"]["town"]
        assert {s: entry["weights"][s] / share for s in SOURCES} == pytest.approx(w, abs=1e-4)
    # With equal weights it would be another model.
    plain = options.model_copy(update={"gamma": 1e-9, "max": "soft"})
    DIs = {s: Discriminator(start.width, (8,), seed_for(0, f"gradient/{s}")) for s in SOURCES}
    other, _ = twin.training(start, DIs, data, EXAMPLES, plain, LR, MOMENTUM)
    apart = [(found[n] - v).abs().max().item() for n, v in other.state_dict().items()]
    assert max(apart) > 2e-4


@pytest.mark.nightly("clients/mdan.py", "strategies/mdan.py")
@pytest.mark.parametrize("loss", ["inverted", "reversal"])
def test_with_one_source_mdan_computes_the_same_as_f_dann(
    domains: list[Node], runs: dict[str, str], loss: str
) -> None:
    """To the bit: the only weight is 1, whatever the losses."""
    chosen = form("soft", "code") | {"mdan.loss": loss}
    nodes = [node for node in domains if node["name"] in ("bert", "town")]
    common = runs | {"run.expect": 2, "rounds": 3}
    found = model_of(run(nodes, common | chosen | {"run.name": "mdan"})[0])
    same = {
        n.replace("mdan", "fdann"): v for n, v in SETTINGS.items() if n[5:] not in ("mu", "loss")
    }
    same |= {
        "method": "fdann",
        "run.name": "fdann",
        "exchange.p": 1,
        "exchange.min-examples": 1,
        "exchange.expose-features": True,
        "fdann.pairs": True,
        "fdann.reversal.strength": SETTINGS["mdan.mu"],
        "fdann.reversal.schedule": "constant",
        "fdann.reversal.loss": loss,
    }
    wanted = model_of(run(nodes, common | same)[0])
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    weaker = common | same | {"run.name": "weaker", "fdann.reversal.strength": 0.01}
    assert not all(torch.equal(found[n], v) for n, v in model_of(run(nodes, weaker)[0]).items())


# ---- the contract ------------------------------------------------------------------------------


def test_only_the_target_may_be_sent_weights(domains: list[Node]) -> None:
    bench = Bench(domains, "mdan")
    requests = bench.begin()
    roles = {node.id: node.role for node in bench.roster.nodes}
    source = next(q for q in requests if roles[q.metadata.dst_node_id] == "source")
    source.content["step"]["weight/anna"] = 0.5  # type: ignore[index]
    assert bench.grid.call(source).error.code == Code.WIRE
    bench.strategy.adjourn()
