"""How many steps a run has planned, and what it says of its plan."""

from typing import Any

import pytest

from fedda.settings import RunConfig, presets
from server.start import hints, planned_steps

SITES = {"a": 300, "b": 1500}


def task(method: str = "kd3a", **more: Any):
    flat = {"method": method, "rounds": 10, "train.batch-size": 100, "train.steps": 0} | more
    return RunConfig.parse(flat).task(method, 0, (1, 16, 16), ["0", "1"], 3)


@pytest.mark.parametrize(
    ("more", "planned"),
    [
        ({}, 10 * 15),
        ({"train.steps": 70}, 10 * 70),
        ({"train.rounds-per-epoch": 0.5}, 10 * 30),
        ({"rounds": 40}, 40 * 15),
    ],
)
def test_the_largest_source_counts(more: dict[str, Any], planned: int) -> None:
    assert planned_steps(task(**more), SITES) == planned


def test_where_sources_leave_their_rounds_say_nothing() -> None:
    assert planned_steps(task("shot"), SITES) == 0


def test_few_steps_are_named_with_a_number_that_suffices() -> None:
    (text,) = hints(task(), 150)
    assert text.startswith("150 steps at a source are planned")
    assert "--rounds 67" in text  # 67 of 15 are 1,005
    assert not hints(task(), 1000)
    assert not hints(task("fedavg"), 150)  # it adapts nothing
    frozen = {"model.name": "identity", "model.hidden": "", "model.bottleneck": 8}
    assert not hints(task(**frozen), 150)


def test_a_rate_that_rises_is_named_with_one_that_falls() -> None:
    low: dict[str, Any] = {"train.lr": 0.001, "train.lr-end": 0.01}
    (text,) = hints(task(**low), 1000)
    assert "above train.lr of 0.001" in text
    assert text.endswith("-c train.lr-end=2e-05")
    assert not hints(task(**low | {"train.schedule": "constant"}), 1000)  # it has no end


def test_what_points_tell_of_sites_is_said() -> None:
    (text,) = hints(task("feddadil"), 1000)
    assert "other sites, can compute features" in text and "leaving.atoms = false" in text


def test_settings_of_methods_that_are_not_trained_are_named() -> None:
    given = {"method": "kd3a", "run.baseline": "none", "fada.parts": "adversarial", "kd3a.mixup": 0}
    idle = RunConfig.parse(given).idle
    assert idle == ["fada.parts"]
    (text,) = hints(task(), 1000, idle)
    assert text.startswith("fada.parts: of no method")
    assert not RunConfig.parse(given | {"run.baseline": "fada"}).idle


@pytest.mark.parametrize("preset", presets.FOR_ALL)
def test_what_a_preset_says_of_other_methods_is_nobodys_mistake(preset: str) -> None:
    flat = presets.settings("kd3a", [preset])
    assert not RunConfig.parse(flat | {"method": "kd3a"}).idle
