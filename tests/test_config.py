"""Settings: typed, frozen, refused when unknown, and the same in pyproject.toml."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fedda import plugins
from fedda.config.sections import flatten
from fedda.errors import ConfigError
from fedda.settings import RunConfig, Task, defaults, overrides

ROOT = Path(__file__).parents[1]


def test_the_list_of_methods() -> None:
    assert {"fedavg", "fedprox", "kd3a"} <= set(plugins.methods())
    with pytest.raises(ConfigError, match=r"no method 'fedsgd'; choose one of .*kd3a"):
        plugins.method("fedsgd")
    with pytest.raises(ConfigError, match=r"no method '\.\./kd3a'"):
        Task.parse({"method": "../kd3a"})


@pytest.mark.contrib
def test_pyproject_repeats_the_defaults() -> None:
    app = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert flatten(app["config"]) == defaults()
    assert list(flatten(app["config"])) == list(defaults())
    for key, value in defaults().items():  # Python takes 1, 1.0 and True as equal, Flower does not
        assert type(flatten(app["config"])[key]) is type(value), key
    assert app["components"] == {"serverapp": "server.app:app", "clientapp": "clients.app:app"}
    included = {pattern.split("/")[0] for pattern in app["fab-include"]}
    assert included == {"fedda", "clients", "strategies", "server"}


def test_every_setting_has_a_description() -> None:
    def sections(section: Any) -> list[Any]:
        inner = [f.default for f in section.model_fields.values() if hasattr(f.default, "flat")]
        return [section, *(s for part in inner for s in sections(type(part)))]

    for top in (RunConfig, *(plugins.method(m).config for m in plugins.methods())):
        for section in sections(top):
            for name, fact in section.model_fields.items():
                told = fact.description or hasattr(fact.default, "flat") or fact.exclude
                assert told, f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"round": 3}, "no setting 'round'"),
        ({"train.learning-rate": 0.1}, "no setting 'train.learning-rate'"),
        ({"kd3a.gate.middle": 0.1}, "no setting 'kd3a.gate.middle'"),
        ({"options.mixup": 0.1}, "no setting 'options"),
        ({"fedsgd.lr": 0.1}, "no setting 'fedsgd'"),
        ({"method": "fedsgd"}, "no method 'fedsgd'"),
        ({"method": "KD3A"}, "did you mean kd3a"),
        ({"run.baseline": "fedsgd"}, "no method 'fedsgd'"),
        ({"rounds": "many"}, "rounds is 'many'"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": True}, "rounds is True, which cannot be: Input should be a number"),
        ({"train.lr": True}, "train.lr is True"),
        ({"rounds": 2.5}, "rounds is 2.5"),
        ({"train.batch-size": 1}, "train.batch-size is 1"),
        ({"train.lr": float("nan")}, "train.lr is nan"),
        ({"train.lr": float("inf")}, "train.lr is inf"),
        ({"train.momentum": 1}, "train.momentum is 1"),
        ({"kd3a.gate.low": 1.0}, "kd3a.gate.low is 1.0"),
        ({"kd3a.vote": "loud"}, "kd3a.vote is 'loud'"),
        ({"shot.shares": "uneven"}, "shot.shares is 'uneven'"),
        ({"comda.forget": 1.0}, "comda.forget is 1.0"),
        ({"comda.answers": "both"}, "comda.answers is 'both'"),
        ({"comda.heads": "none"}, "comda.heads is 'none'"),
        ({"fact.softmax": "thrice"}, "fact.softmax is 'thrice'"),
        ({"decision.weights": "sum"}, "decision.weights is 'sum'"),
        ({"input.channels": 2}, "input.channels is 2"),
        ({"run.name": "../else"}, "run.name is '../else'"),
        ({"run.name": "a/b"}, "run.name is 'a/b'"),
        *(({"run.name": dots}, f"run.name is '{dots}'") for dots in ("..", ".", "...")),
        ({"run.name": "my run"}, "needed is name of the run, of letters, digits, _, - and .; res"),
        ({"run.seeds": "1;2"}, "run.seeds is '1;2', which cannot be: needed is one training per"),
        ({"run.seeds": "1,2,1"}, "run.seeds is '1,2,1'; name each seed once"),
        ({"train": 3}, "train is 3"),
        ({"rounds.extra": 3, "rounds": 3}, "rounds"),
        ({"rounds": 3, "rounds.extra": 3}, "'rounds.extra' is given beside a value for 'rounds'"),
    ],
)
def test_invalid_settings_are_named(flat: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.parse(flat)
    assert message in str(error.value)
    assert "\n" not in str(error.value) and "pattern" not in str(error.value)


def test_a_config_is_frozen() -> None:
    parsed = RunConfig.parse({})
    with pytest.raises(ValidationError, match="frozen"):
        parsed.rounds = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        parsed.train.lr = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        parsed.options["kd3a"].gate.low = 0.1


def test_overrides_take_the_type_of_the_default() -> None:
    given = ["rounds=3", "train.lr=1e-3", "wait.sites=5", "kd3a.heads=local", "gate.low=0.5"]
    given += ["focus-by-examples=FALSE", "run.evaluate=true", "model.hidden="]
    found = overrides("kd3a", given)
    wanted = {"rounds": 3, "train.lr": 0.001, "wait.sites": 5.0, "kd3a.heads": "local"}
    wanted |= {"kd3a.gate.low": 0.5, "kd3a.focus-by-examples": False}
    assert found == wanted | {"run.evaluate": True, "model.hidden": ""}
    assert {k: type(v) for k, v in found.items()} == {k: type(defaults()[k]) for k in found}
    assert overrides("kd3a", ["run.baseline=a=b"]) == {"run.baseline": "a=b"}
    assert overrides("fedprox", ["mu=1"]) == {"fedprox.mu": 1.0}
    assert overrides("fedavg", ["kd3a.mixup=2"]) == {"kd3a.mixup": 2.0}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("rounds", "'rounds' is not a setting; write it as key=value"),
        ("rounds=3.0", "rounds is '3.0', but must be a whole number"),
        ("train.lr=fast", "train.lr is 'fast', but must be a number"),
        ("run.evaluate=1", "run.evaluate is '1', but must be true or false"),
        ("round=3", "no setting 'round'; did you mean rounds"),
        ("lr=3", "no setting 'lr'; did you mean train.lr"),
        ("optimizer=sgd", "no setting 'optimizer'; did you mean train.optimizer"),
        ("mix-up=3", "no setting 'mix-up'; did you mean mixup"),
        ("train.rate=3", "no setting 'train.rate'; did you mean train"),
        ("zzzzzz=3", "no setting 'zzzzzz'; see fedda settings"),
        ("mu=3", "no setting 'mu'"),
    ],
)
def test_invalid_overrides_are_refused(pair: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        overrides("kd3a", [pair])
    assert message in str(error.value)


def test_a_misspelt_setting_may_have_been_the_runs_own_methods() -> None:
    with pytest.raises(ConfigError, match=r"; did you mean reversal\.strength or"):
        overrides("fdann", ["fdann.reversal.strenght=1"])


@pytest.mark.parametrize("method", plugins.methods())
def test_a_task_is_the_same_after_the_wire(method: str) -> None:
    given = {"train.lr-end": 0.5, "train.carry-momentum": True, "kd3a.gate.low": 0.25}
    task = RunConfig.parse(given).task(method, 7, (3, 32, 32), list("0123456789"), 5)
    assert Task.parse(task.flat()) == task
    assert task.dims == (3, 32, 32)
    assert RunConfig.parse({}).task(method, 7, (400,), ["a"], 5).dims == (400,)
    with pytest.raises(ConfigError, match="does not say which shape"):
        _ = Task.parse(task.flat() | {"shape": ""}).dims
    assert all(type(value) in (bool, int, float, str) for value in task.flat().values())
    if method == "kd3a":
        assert Task.parse(task.flat()).options.gate.low == 0.25


def test_a_task_has_no_settings_of_the_server() -> None:
    flat = RunConfig.parse({}).task("kd3a", 0, (1, 8, 8), ["a", "b"], 4).flat()
    assert {key.split(".")[0] for key in flat} == {
        *("run", "method", "seed", "rounds", "schedule", "target", "shape", "class-names"),
        *("sites", "column-names", "secure", "frozen", "resize", "window", "missing"),
        *("refine", "shares"),
        *("model", "train", "privacy", "wire", "options"),
    }


SCHEDULES = ("", "train", "train 0", "train 19", "train 10, train 11", "encoder 20")


@pytest.mark.parametrize(
    "change",
    [
        *({"run.dir": "/"}, {"options.secret": 1}, {"classes": -1}, {"sites": 10**6}),
        *({"shape": "a"}, *({"schedule": schedule} for schedule in SCHEDULES)),
    ],
)
def test_an_invalid_task_is_refused(change: dict[str, Any]) -> None:
    flat = RunConfig.parse({}).task("kd3a", 0, (1, 8, 8), ["a", "b"], 4).flat()
    assert flat["schedule"] == "train 40"
    with pytest.raises(ConfigError):
        Task.parse(flat | change)


def test_the_baseline_trains_first_and_only_once() -> None:
    assert RunConfig.parse({"run.baseline": "fedavg"}).trainings == ["fedavg", "kd3a"]
    for alone in ("kd3a", "none"):
        assert RunConfig.parse({"run.baseline": alone}).trainings == ["kd3a"]
    assert RunConfig.parse({"run.seeds": "3,1"}).seeds == [3, 1]
