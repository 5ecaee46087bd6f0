"""Presets: the papers' numbers; of several presets a later one wins."""

import json
import re
from pathlib import Path

import pytest

from fedda import plugins
from fedda.cli import run as run_command
from fedda.errors import ConfigError
from fedda.settings import RunConfig, defaults, presets
from fedda.settings.presets import BENCHMARKS
from tests.command_lines import call

PAPERS = ("KD3A", "FADA", "FedDaDiL", "FRUDA")


@pytest.mark.parametrize("method", plugins.methods())
def test_every_preset_of_a_method_makes_a_valid_run(method: str) -> None:
    for name in presets.names(method):
        chosen = presets.settings(method, [name])
        parsed = RunConfig.parse({"method": method} | chosen).flat()
        assert chosen and {k: parsed[k] for k in chosen} == chosen, name
        for key, value in chosen.items():  # 1 and 1.0 are equal, but not to Flower
            assert type(value) is type(defaults()[key]), (name, key)


@pytest.mark.parametrize("method", plugins.methods())
def test_a_preset_named_for_a_paper_or_a_code_has_its_training(method: str) -> None:
    """A code's losses with other steps are neither the code nor the default."""
    trained = {"shot", "decision", "fact", "mdan"}  # whose codes set optimizer, rate and batch
    own = plugins.method(method).presets
    for name in {"official", "paper"} & set(own) if method in trained else ():
        for key in ("optimizer", "lr", "schedule", "batch-size"):
            assert f"train.{key}" in own[name], (name, key)
    if method in ("shot", "decision"):
        assert own["official"]["train.nesterov"] and own["official"]["model.bottleneck"] == 256
    if method == "fruda":  # appendix F.0.2, in all data sets
        assert all(preset["train.lipschitz"] for preset in own.values())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_sets_what_matters_and_names_its_sources(name: str) -> None:
    preset = BENCHMARKS[name]
    needed = {"model.name", "model.weights", "rounds", "train.batch-size", "train.optimizer"}
    assert needed | {"train.lr", "train.schedule"} <= set(preset)
    for key, given in preset.items():
        assert given.source.startswith((*PAPERS, "ours: ")), key
    assert not set(BENCHMARKS) & {p for m in plugins.methods() for p in plugins.method(m).presets}


# KD3A's table 5 as printed, by columns; FedDaDiL's table 4, by rows.
PRINTED = {
    "amazon-review": ("mlp", 50, 40, 0.05, 0.001, 0.9, 0.95),
    "digit5": ("digit-cnn", 100, 40, 0.05, 0.001, 0.9, 0.95),
    "office-caltech10": ("resnet101", 32, 40, 0.005, 0.0001, 0.8, 0.95),
    "domainnet": ("resnet101", 50, 40, 0.005, 0.0001, 0.8, 0.95),
    "office31": ("resnet50", 32, 100, 0.01, None, 0.9, 0.95),
    "office-home": ("resnet101", 32, 100, 0.01, None, 0.9, 0.95),
    "imageclef": ("resnet50", 32, 100, 0.001, None, 0.9, 0.95),
    "adaptiope": ("resnet101", 32, 100, 0.01, None, 0.8, 0.95),
}


@pytest.mark.parametrize("name", PRINTED)
def test_values_are_the_papers(name: str) -> None:
    config = RunConfig.parse({"method": "kd3a"} | presets.settings("kd3a", [name]))
    train, gate = config.train, config.options["kd3a"].gate
    found = (train.batch_size, config.rounds, train.lr, train.lr_end, gate.low, gate.high)
    wanted = PRINTED[name]
    ours = wanted[4] is None  # the table has no such column
    assert (config.model.name, *found) == tuple(
        train.lr / 50 if value is None else value for value in wanted
    )
    assert BENCHMARKS[name]["train.lr-end"].source.startswith("ours") is ours
    assert (train.optimizer, train.momentum, train.schedule) == ("sgd", 0.9, "cosine")
    assert train.rounds_per_epoch == 1
    assert config.options["kd3a"].mixup == (0 if name == "amazon-review" else 2.0)  # its code's
    turned = RunConfig.parse(presets.settings("fedavg", ["rotated-mnist"]))  # FRUDA's
    assert (turned.model.name, turned.train.optimizer) == ("lenet", "adam")
    assert (turned.train.lr, turned.train.batch_size) == (1e-4, 32)


@pytest.mark.parametrize("own", ["paper", "official"])
@pytest.mark.parametrize("name", [n for n in BENCHMARKS if n != "amazon-review"])
def test_a_methods_preset_and_a_benchmarks_combine_in_either_order(own: str, name: str) -> None:
    """No setting is in both, except with amazon-review, which turns mixup off."""
    both = presets.settings("kd3a", [own, name])
    assert both == presets.settings("kd3a", [name, own])
    assert both["kd3a.mixup"] == {"paper": 0.2, "official": 2.0}[own]


def started(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> RunConfig:
    """Return the configuration that `fedda run` would perform."""
    seen: list[RunConfig] = []
    monkeypatch.setattr(run_command, "perform", lambda config, launch: seen.append(config))
    monkeypatch.setattr(run_command, "on_terminate", lambda: None)
    call("run", *words, "--dir", folder)
    stored = json.loads((folder / seen[0].run.name / "launch.json").read_text())["settings"]
    assert stored == seen[0].flat()  # so that --resume needs no preset
    return seen[0]


def test_c_wins_over_rounds_and_rounds_over_presets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*words: str) -> RunConfig:
        return started(monkeypatch, tmp_path, "kd3a", "--name", f"n{len(words)}", *words)

    config = run("--preset", "official", "--preset", "office-caltech10")
    own = config.options["kd3a"]
    assert (own.vote, own.gate.low, own.gate.reach) == ("hard", 0.8, False)
    assert (config.model.name, config.rounds, config.train.batch_size) == ("resnet101", 40, 32)

    less = ("-c", "gate.low=0.5", "-c", "train.batch-size=8")
    config = run("--preset", "office-caltech10", "--rounds", "7", *less)
    assert (config.rounds, config.train.batch_size) == (7, 8)
    assert config.options["kd3a"].gate.low == 0.5

    config = run(*less, "-c", "rounds=9", "--rounds", "7", "--preset", "domainnet")
    assert (config.rounds, config.train.batch_size) == (9, 8)  # in whatever order they are given
    assert config.train.lr == 0.005


@pytest.mark.parametrize(
    ("method", "name", "message"),
    [
        ("kd3a", "digit6", "no preset 'digit6' for kd3a (did you mean digit5?); its own are paper"),
        ("fedavg", "paper", "feddadil, fruda, fwdgrl, kd3a, mdan, shot); its own are none"),
        ("kd3a", "?", "no preset '?' for kd3a; its own are paper, official, and"),
    ],
)
def test_an_unknown_preset_is_named_beside_the_known(
    tmp_path: Path, method: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        presets.settings(method, ["digit5", name])
    assert message in str(error.value) and ", ".join(BENCHMARKS) in str(error.value)
    done = call("run", method, "--preset", name, "--dir", tmp_path, code=1)
    assert "error: There is no preset" in done.output
    assert not list(tmp_path.iterdir())


def test_the_list_shows_every_value_and_its_source() -> None:
    done = call("settings", "kd3a", "--presets", columns=200)
    parts = re.split(r"--preset (\S+) *\n", done.output.rsplit("fedda run", 1)[0])[1:]
    shown = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(shown) == presets.names("kd3a")
    for name, preset in presets.table("kd3a").items():
        lines = [re.split(r"\s{2,}", line.strip()) for line in shown[name].strip().splitlines()]
        wanted = [[k, str(v) or "''", source] for k, (v, source) in sorted(preset.items())]
        assert lines == wanted, name
