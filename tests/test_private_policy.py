"""A policy of noise or epsilon holds for every method, phase, hop and part of a source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.policy.budget import Spent
from clients.policy.gate import Gate
from clients.policy.rules import Policy, Privacy
from clients.site.request import Request
from fedda import data, plugins
from fedda.config import PrivacyConfig
from fedda.config.sections import validate
from fedda.errors import BudgetError, ConfigError, PolicyError
from fedda.methods import Stage
from fedda.secure import hiding
from fedda.secure.hiding import is_private
from fedda.settings import RunConfig, Task

DPSGD = {("fedavg", "train"), ("fedprox", "train"), ("kd3a", "train")}
POLICIES = [Privacy(noise=1.0), Privacy(epsilon=1.0), Privacy(noise=1.0, epsilon=8.0)]


def task_of(method: str, noise: float, **more: Any) -> Task:
    flat = {"method": method, "model.name": "mlp", "model.hidden": "16"} | more
    flat["model.norm"] = "group" if noise else "batch"
    made = RunConfig.parse(flat).task(method, 0, (1, 8, 8), ["a", "b"], 4).flat()
    return Task.parse(made | {"privacy.noise": noise})


def tasks(noise: float) -> Iterator[Task]:
    """A task of every method, and of every form in which its models are hidden."""
    for method in plugins.own_methods():
        about, found = plugins.method(method), [{}]
        found += [{"secure": "sum"}] * hiding.can_mask(about)
        found += [{f"{method}.relay": "sealed"}] * hiding.can_seal(about)
        found += [{f"{method}.loss": "cada"}] * (method == "dils")
        for more in found:
            yield task_of(method, noise if is_private(about) else 0.0, **more)


def requests(noise: float) -> Iterator[Request]:
    """All that a server may ask of a source, by the methods' contracts."""
    for task in tasks(noise):
        for phase in task.about.phases:
            for hop, parts in phase.hops.items():
                for part in parts:
                    if part != "target":
                        yield Request(task, 1, Stage(phase, 1, 1), hop, part, {}, {})


@pytest.mark.parametrize("privacy", POLICIES, ids=str)
@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_under_noise_a_source_answers_nothing_but_dp_sgd(
    privacy: Privacy, noise: float, tmp_path: Path
) -> None:
    gate, admitted, asked = Gate(Policy(privacy=privacy), state=tmp_path), set(), set()
    for request in requests(noise):
        method = request.task.method
        asked.add((method, request.hop))
        try:
            gate.admit(request)
        except PolicyError:
            continue
        if not request.contract.signs:
            admitted.add((method, request.hop))
    enough = noise > 0 and noise >= privacy.noise
    assert admitted == (DPSGD if enough else set())
    assert {("dils", "adapt"), ("fruda", "select"), ("feddadil", "learn")} < asked


def test_without_such_a_policy_all_is_asked_as_before(tmp_path: Path) -> None:
    gate = Gate(Policy(), state=tmp_path)
    for request in requests(0.0):
        gate.admit(request)


def test_epsilon_without_books_bounds_nothing_so_nothing_is_trained() -> None:
    gate = Gate(Policy(privacy=Privacy(epsilon=8.0)))
    request = next(r for r in requests(1.0) if r.task.method == "fedavg")
    with pytest.raises(PolicyError, match="--state-dir"):
        gate.admit(request)


def test_an_epsilon_that_cannot_be_computed_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clients.policy.budget.epsilon", lambda *_: float("nan"))
    with pytest.raises(BudgetError):
        Spent(tmp_path, Policy().budget).steps((1.0, 0.1, 1), Privacy(epsilon=8.0))


@pytest.mark.parametrize("noise", [1e-320, 1e-160, 0.0099])
def test_noise_whose_epsilon_would_never_be_found_is_refused(noise: float) -> None:
    with pytest.raises(ConfigError, match="cannot be computed"):
        validate(PrivacyConfig, {"noise": noise})


def test_an_image_that_is_trained_on_is_found_among_tests_wherever_it_is(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x, tests = (draws.integers(0, 256, (n, 4, 4), np.uint8) for n in (90, 70))
    for number in range(2):
        of = tmp_path / f"{number}.npz"
        y, y_test = np.arange(90) % 2, np.arange(70) % 2
        np.savez(of, x_train=x, x_test=tests, y_train=y, y_test=y_test)
        tests[60] = x[80]
    assert [data.shared(tmp_path / f"{number}.npz") for number in range(2)] == [0, 1]
