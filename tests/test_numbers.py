"""Numbers that leave a site: coarse, of checked models alone, and booked as tests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients import kd3a as clients_kd3a
from clients.fedavg import Target
from clients.policy.budget import Spent, UsedBudget
from clients.policy.rules import Policy
from clients.site import output_privacy, summed
from clients.site.memory import Site
from clients.site.request import Request
from fedda import plugins
from fedda.errors import Code, NotFiniteError, QuorumError, WireError
from fedda.methods import Method
from fedda.secure import hiding
from fedda.wire import Number, Rule
from fedda.wire.packing import Arrays, Kind, Packed, pack
from tests.local_grid import CLASSES, SIDE, SOURCES, Bench, Node, keyed, ruled

pytestmark = pytest.mark.usefixtures("fresh_sites")


def real(nodes: list[Node], folder: Path, **more: Any) -> list[Node]:
    """Sites as hospitals have them, not those of an experiment."""
    own = [{"state-dir": str(folder / n["name"]), "notes": False} for n in nodes]
    node = {"reproducible": False, "min-images": 16, "audited": True} | more
    return [{**n, **o, **node} for n, o in zip(nodes, own, strict=True)]


def lit(town: Node) -> Callable[[Arrays], Arrays]:
    """Make a linear model whose answers are all alike, but for one image of the target."""
    with np.load(town["data"]) as data:
        x = torch.tensor(data["x_train"], dtype=torch.float32).flatten(1) / 255
    direction = x[3] - x.mean(dim=0)
    best, second = (x @ direction).topk(2).values.tolist()

    def made(model: Arrays) -> Arrays:
        weight = np.zeros((CLASSES, SIDE**2), np.float32)
        weight[0] = 1e4 * direction.numpy()
        bias = np.zeros(CLASSES, np.float32)
        bias[0] = -1e4 * (best + second) / 2
        return model | {"head.weight": weight, "head.bias": bias}

    return made


# ---- how coarse --------------------------------------------------------------------------------


def test_coarse_numbers_by_hand() -> None:
    every = all_numbers()

    def quantise(numbers: dict[str, float]) -> dict[str, float]:
        return output_privacy.quantise(numbers, every)

    for name, value, wanted in (
        ("loss", 1.23456, 1.23),
        ("loss", 123.456, 123),
        ("loss", -0.004, 0),
        ("kept", 1 / 600, 0),
        ("focus/anna", 0.12345, 0.123),
        ("discriminator-loss/anna", 0.69315, 0.693),
        ("gain/anna", 1.23456e-5, 1.23e-5),
        ("theta/anna", 1.23456, 1.23),
        ("infomax-before", 0.456, 0.46),
        ("seconds", 0.0123, 0.01),
        ("steps", 1234, 1234),
        ("tested", 24, 24),
        ("accuracy", 2 / 3, 2 / 3),
        ("epsilon", 1.23456, 1.23456),
    ):
        found = quantise({name: value, "tested": 24})[name]
        assert found == wanted and quantise({name: found, "tested": 24})[name] == found, name
    assert quantise({"accuracy": 2 / 3, "tested": 30_000})["accuracy"] == 0.667
    assert quantise({"accuracy": 2 / 3})["accuracy"] == 0.667
    with pytest.raises(WireError, match=r"'pixel' may tell; declare it .* fedda.wire.Number"):
        quantise({"pixel": 0.5})
    with pytest.raises(WireError, match=r"'steps' is 1.5, .* whole number"):
        quantise({"steps": 1.5})
    for value in (float("nan"), float("inf")):
        with pytest.raises(NotFiniteError, match=r"'loss' .* not finite"):
            quantise({"loss": value})
        with pytest.raises(NotFiniteError, match=r"'focus/anna' .* not finite"):
            quantise({"focus/anna": value})


def leaving(method: Method) -> set[str]:
    """The numbers that a method's sites may send."""
    phases = (*method.phases, *hiding.sealed(method).phases)
    parts = [p for phase in phases for hop in phase.hops.values() for p in hop.values()]
    parts += [phase.test for phase in phases]
    return {name for part in parts for name in part.leaves.numbers}


def all_numbers() -> Rule:
    methods = map(plugins.method, plugins.own_methods())
    return Rule(numbers=frozenset().union(*map(leaving, methods)))


def test_every_number_of_every_contract_says_how_much_it_tells() -> None:
    names = all_numbers().numbers
    assert len(names) > 30 and all(isinstance(name, Number) for name in names)


def test_a_number_that_is_not_declared_does_not_leave(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    (phase,) = plugins.method("fedavg").phases
    for part in phase.hops["train"].values():
        plain = replace(part.leaves, numbers=frozenset(map(str, part.leaves.numbers)))
        monkeypatch.setitem(vars(part), "leaves", plain)
    bench = Bench(domains, "fedavg")
    reply = bench.call(bench.begin()[0])
    assert reply.has_error() and Code(reply.error.code) is Code.WIRE


def test_the_loss_under_a_mask_is_coarse_before_it_is_hidden(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden: list[float] = []
    hide = summed.Summed.hide

    def spy(self: Any, request: Any, seeds: Any, model: Arrays, loss: float, n: int) -> Packed:
        hidden.append(loss)
        return hide(self, request, seeds, model, loss, n)

    monkeypatch.setattr(summed.Summed, "hide", spy)
    Bench(keyed(domains, tmp_path), "fedavg", secure="sum").round()
    assert len(hidden) == len(SOURCES) and all(loss == round(loss, 2) > 0 for loss in hidden)


# ---- of which models ---------------------------------------------------------------------------


# As a lying server would, this one refuses no model by itself.
LINEAR = {"model__name": "identity", "model__hidden": "", "guard__max_change": 0.0}
LINEAR |= {"guard__max_update": 0.0}


@pytest.mark.parametrize("weighting", ["focus", "examples"])
@pytest.mark.parametrize("relay", ["open", "sealed"])
def test_a_teacher_that_one_image_lights_does_not_teach(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relay: str, weighting: str
) -> None:
    """Its share of kept images would tell a pixel of that image, answer by answer."""
    outgoing, made = clients_kd3a.Source.outgoing, lit(domains[-1])

    def lying(self: clients_kd3a.Source) -> dict[str, Packed]:
        arrays = outgoing(self)
        if self.site.name != "anna":
            return arrays
        return {"model": pack(made(arrays["model"].unpack()), Kind.MODEL)}

    monkeypatch.setattr(clients_kd3a.Source, "outgoing", lying)
    sites = real(keyed(domains, tmp_path), tmp_path)
    settings = LINEAR | {"kd3a__relay": relay, "kd3a__weighting": weighting}
    bench = Bench(sites, "kd3a", **settings)
    _, numbers = bench.round()
    notices = [("refused", "anna", "the target cannot use its model; the target's log says why")]
    assert bench.notices == notices
    assert set(bench.strategy.weights) == {"bert", "carl", "town"}
    assert sum(bench.strategy.weights.values()) == pytest.approx(1)
    assert ("loss" in numbers) == (relay == "open")


def test_no_sealed_source_says_its_loss_to_the_server(domains: list[Node], tmp_path: Path) -> None:
    bench = Bench(keyed(domains, tmp_path), "kd3a", kd3a__relay="sealed")
    _, numbers = bench.round()
    crossed = [
        c for c in bench.grid.crossed if (c.way, c.role, c.kind) == ("from", "source", "train")
    ]
    assert len(crossed) == 3 and all(c.numbers == {"steps", "seconds"} for c in crossed)
    assert "loss" not in numbers and numbers["distillation"] >= 0


def test_without_a_teacher_that_can_be_used_the_target_refuses(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lit(domains[-1])

    def lying(self: clients_kd3a.Source) -> dict[str, Packed]:
        return {"model": pack(made(self.packed_model().unpack()), Kind.MODEL)}

    monkeypatch.setattr(clients_kd3a.Source, "outgoing", lying)
    bench = Bench(real(domains, tmp_path), "kd3a", **LINEAR)
    with pytest.raises(QuorumError, match="town"):
        bench.round()
    assert ("town", Code.FEW) in {(c.site, c.error) for c in bench.grid.crossed}


@pytest.mark.parametrize("method", ["shot", "decision", "comda"])
def test_a_model_whose_answers_are_alike_is_not_adapted(
    domains: list[Node], tmp_path: Path, method: str
) -> None:
    """The loss leaves, and would be about the image whose answer is another."""
    bench = Bench(real(domains, tmp_path), method)
    (honest,) = bench.begin()
    assert not bench.call(honest).has_error()
    bench.model = {n: 0 * a if n.startswith("head") else a for n, a in bench.model.items()}
    (request,) = bench.begin()
    reply = bench.call(request)
    assert reply.has_error() and Code(reply.error.code) is Code.FEW


def test_a_constant_model_is_not_measured(domains: list[Node], tmp_path: Path) -> None:
    unaware = real(domains, tmp_path, audited=False)  # else this is not the first model's draw
    bench = Bench(unaware, "fruda", fruda__measure__steps=1)
    bench.model = {name: 0 * array for name, array in bench.model.items()}
    replies = bench.grid.answers(bench.grid.push_messages(bench.begin()))
    codes = {Code(reply.error.code) if reply.has_error() else None for _, reply in replies}
    assert codes == {Code.FEW}


# ---- small counts ------------------------------------------------------------------------------


def test_no_share_shows_a_count_below_ten() -> None:
    shares = [output_privacy.ends(n / 200, 200, output_privacy.FEW) * 200 for n in range(201)]
    assert {round(n) for n in shares} == {0, *range(10, 191), 200}
    assert [output_privacy.ends(n / 12, 12, output_privacy.FEW) for n in (0, 1, 6, 7, 12)] == [
        0,
        0,
        0,
        1,
        1,
    ]
    assert [output_privacy.ends(n / 12, 12, 1) for n in (1, 11)] == [1 / 12, 11 / 12]


def test_fewer_than_ten_test_images_are_not_told_and_not_tested(
    domains: list[Node], tmp_path: Path
) -> None:
    def told(town: Node) -> tuple[int, dict[str, Any]]:
        site = Site(town)
        bench = Bench([*domains[:-1], town], "fedavg")
        request = Request(
            bench.task, 1, bench.task.stages[0], "test", "target",
            {"model": pack(bench.model, Kind.MODEL)}, {},
        )  # fmt: skip
        return site.offer()["tested"], Target(site).test(request)

    with np.load(domains[-1]["data"]) as data:
        few = {n: a[:9] if n.endswith("_test") else a for n, a in data.items()}
    np.savez(tmp_path / "few.npz", **few)
    town = domains[-1] | {"data": str(tmp_path / "few.npz")}
    tests, numbers = told(town)
    assert tests == 9 == numbers["tested"]  # in an experiment
    tests, numbers = told(real([town], tmp_path)[0])
    assert tests == 0 and not {"tested", "accuracy", "loss"} & set(numbers)
    tests, numbers = told(real(domains[-1:], tmp_path)[0])
    assert tests == numbers["tested"] == 24


# ---- what is booked ----------------------------------------------------------------------------


def with_policy(text: str, nodes: list[Node], folder: Path) -> list[Node]:
    states = [n | {"state-dir": str(folder / n["name"])} for n in nodes]
    return ruled(states, text, folder, audited=True, notes=False)


def used_by(name: str, folder: Path) -> tuple[int, int]:
    used: UsedBudget = Spent(folder / name, Policy().budget).used()
    return used.rounds, used.tests


@pytest.mark.parametrize(
    ("method", "anna", "town"),
    [("kd3a", (1, 0), (1, 4)), ("fruda", (1, 1), (1, 3))],  # KD3A's target tests its own model, too
)
def test_teachers_and_candidates_are_booked_as_a_round_and_as_tests(
    domains: list[Node], tmp_path: Path, method: str, anna: tuple[int, int], town: tuple[int, int]
) -> None:
    Bench(with_policy("[allow]", domains, tmp_path), method).round()
    assert (used_by("anna", tmp_path), used_by("town", tmp_path)) == (anna, town)


@pytest.mark.contrib
def test_models_that_adapt_here_are_booked_in_every_round(
    domains: list[Node], tmp_path: Path
) -> None:
    bench = Bench(with_policy("[allow]", domains, tmp_path), "decision", rounds=3)
    for server_round in (1, 2):
        bench.round(server_round)
    assert used_by("town", tmp_path)[1] >= 1


def test_a_policy_without_tests_refuses_to_distil(domains: list[Node], tmp_path: Path) -> None:
    bench = Bench(with_policy("[leaving]\ntests = false", domains, tmp_path), "kd3a")
    with pytest.raises(QuorumError, match="town"):
        bench.round()
    assert used_by("town", tmp_path) == (0, 0)
