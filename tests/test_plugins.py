"""Methods, networks and readers of other packages: found, checked, run, and left out if broken."""

import importlib
import json
import logging
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import clients.fedavg
import fedda
import strategies.fdann
from fedda import data, models, plugins
from fedda.cli import launch
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.data.array_file import ArrayFile
from fedda.data.load import open_site
from fedda.errors import (
    Code,
    ConfigError,
    DataError,
    ModelError,
    NotFiniteError,
    QuorumError,
    RunError,
)
from fedda.ops import bundle
from fedda.ops.distributions import ANY
from fedda.settings import RunConfig, Task, defaults, overrides, presets
from tests import test_packaging
from tests.command_lines import call
from tests.finished import results
from tests.local_grid import PLAIN, Bench, Crossing, Node, ScriptedGrid, make_domains, run
from tests.patience import PATIENCE
from tests.test_packaging import environment, pip, sh

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugin"
SHAPE = (1, 8, 8)
# What decides under which names an installation's modules are found.
LAYOUT = ("pyproject.toml", "fedda/__init__.py", "fedda/halves.py")

# Fixtures: a copy of the files in git, its wheel, and an environment with that wheel installed.
checkout, wheel, installed = (
    test_packaging.checkout,
    test_packaging.wheel,
    test_packaging.installed,
)

Install = Callable[..., None]

ALGORITHM = """
'''Tent: a method of another package.'''
from pydantic import Field
from fedda.algorithms import fedavg
from fedda.methods import Method, Phase

class Config(fedavg.Config):
    pace: float = Field(default=0.5, description="how fast")

PHASES = (Phase("train", {"train": fedavg.TRAIN}),)
METHOD = Method(
    "tent", "Tent", Config, PHASES, {"paper": {"pace": 0.1}}, on_features={"pace": 0.9},
)
"""
# What such a method declares, so that its gradients and its target's numbers can be attacked.
STRATEGY = """
from fedda.strategies.fedavg import FedAvg

class STRATEGY(FedAvg):
    pass
"""
CLIENT = """
from fedda.clients.fedavg import Source, Target
"""
TENT = {"__init__": "", "algorithm": ALGORITHM, "strategy": STRATEGY, "client": CLIENT}

NN = "from torch import nn\n"
NETWORK = """
from torch import nn

def build(config, shape):
    '''A linear encoder.'''
    width = 6
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(width)), width
"""

# A text file of numbers: a row per line, its label first.
READER = """
from pathlib import Path
import numpy as np, torch
from fedda.data import Description, Labelled, Unlabelled

class Table:
    def __init__(self, path):
        rows = np.loadtxt(path, delimiter=",", ndmin=2)
        self.path, self.y = path, torch.tensor(rows[:, 0]).long()
        self.x = torch.tensor(rows[:, 1:]).float()

    def describe(self, role):
        n, d = self.x.shape
        names = ("a", "b") if role == "source" else ()
        return Description(self.path, role, "vector", (d,), n, 0, names, {}, ())

    def source(self, channels, size, progress):
        return Labelled(self.x, self.y, ("a", "b"))

    def target(self, channels, size, progress):
        return Unlabelled(self.x)

    def evaluation(self, channels, size, progress):
        return None

def open_table(path):
    '''Tables of numbers as .csv files.'''
    return Table(path) if Path(path).suffix == ".tab" else None
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with entry points on the path, as pip would; it is gone after the test."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def add(package: str, entries: Mapping[str, str], modules: Mapping[str, str]) -> None:
        info, code = site / f"{package}-1.0.dist-info", site / package
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = (f"[fedda.{group}]\n{line}\n" for group, line in entries.items())
        (info / "entry_points.txt").write_text("".join(lines))
        code.mkdir()
        for name, text in modules.items():
            (code / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        plugins.forget()

    plugins.restrict(ANY)
    plugins.forget()
    yield add
    plugins.restrict(ANY)
    plugins.forget()


def add_tent(install: Install, **changed: str) -> None:
    install("tent_package", {"methods": "tent = tent_package"}, TENT | changed)


def uninstall(tmp_path: Path, package: str) -> None:
    """Remove a package that the server, in this same process, has used, so that a site lacks it."""
    shutil.rmtree(tmp_path / "site-packages" / f"{package}-1.0.dist-info")
    importlib.invalidate_caches()
    plugins.forget()


def cli(*words: str) -> tuple[int, str, str]:
    done = call(*words, code=None, columns=200)
    return done.exit_code, done.stdout, done.stderr


def others(group: plugins.Group) -> list[str]:
    """The names of what other packages add."""
    added = plugins.installed(group).items()
    return [name for name, each in added if each.origin != plugins.OWN]


def reasons(name: str = "tent") -> list[str]:
    """List why plug-ins of a name are left out."""
    return [each.why for each in plugins.broken() if each.name == name]


COMMANDS = """
import typer
app = typer.Typer()
@app.callback()
def both():
    '''Two commands.'''
@app.command()
def more():
    print("more")
def hello(name: str = "you"):
    '''Say hello.'''
    print("hello", name)
def odd(x: dict = {}):
    pass
def mail(results, folder):
    print(folder.name, *results["trainings"])
"""
ADDED = """hello = tent_package.cli:hello
run = tent_package.cli:hello
data.hello = tent_package.cli:hello
two = tent_package.cli:app
odd = tent_package.cli:odd
broken = tent_package.cli:nothing"""


def test_commands_of_another_package_are_found_where_they_are_put(install: Install) -> None:
    install("tent_package", {"commands": ADDED}, {"__init__": "", "cli": COMMANDS})
    assert cli("hello", "--name", "all")[:2] == (0, "hello all\n")
    assert cli("data", "hello")[:2] == (0, "hello you\n")
    assert cli("two", "more")[:2] == (0, "more\n")
    assert "Say hello." in cli("--help")[1] and "Say hello." in cli("data", "--help")[1]
    assert "--simulate" in cli("run", "--help")[1]  # fedda's own
    _, said, noted = cli("--help")
    assert "Run a method over sites" in said
    assert noted.count("the command run itself, so that of tent_package 1.0 is left out") == 1
    assert "odd of tent_package 1.0 is left out (RuntimeError: Type not yet supported" in noted
    assert cli("broken")[0] == 2 and reasons("broken")


def test_a_command_of_feddas_own_imports_no_other(install: Install) -> None:
    install("tent_package", {"commands": ADDED}, {"__init__": "", "cli": COMMANDS})
    assert cli("policy", "plugins")[0] == 0 and "tent_package" not in sys.modules


def test_a_listener_that_fails_takes_nothing_from_the_run(
    install: Install,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = {"listeners": "bad = tent_package.cli:bad\nmail = tent_package.cli:mail"}
    bad = "def bad(results, folder):\n    raise KeyError('no-such-account')\n"
    install("tent_package", lines, {"__init__": "", "cli": COMMANDS + bad})
    (tmp_path / "results.json").write_text(json.dumps(results()))
    launch.present(tmp_path)
    assert f"{tmp_path.name} fedavg kd3a" in capsys.readouterr().out
    (said,) = caplog.records
    assert said.getMessage().startswith("the listener bad of ") and "no-such-account" in caplog.text


AS_WRITTEN = """
import fedda.server.superlink.control
import fedda.strategies.base as base
from fedda.clients import fedavg
from fedda.strategies.fdann import FDANN
"""


def test_the_names_of_the_wheel_give_the_programs_own_modules() -> None:
    names: dict[str, Any] = {}
    exec(AS_WRITTEN, names)  # no import, since type checkers find no such modules
    assert names["fedavg"] is clients.fedavg
    assert names["FDANN"] is strategies.fdann.FDANN
    assert names["base"] is sys.modules["strategies.base"]
    for name in ("strategies.base", "strategies", "server.superlink.control", "clients"):
        module = sys.modules[f"fedda.{name}"]
        assert module is sys.modules[name]
        assert module.__spec__ and module.__spec__.name == module.__name__ == name
    assert find_spec("fedda.strategies.fedavg") and not find_spec("fedda.strategies.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"fedda\.strategies\.nothing"):
        importlib.import_module("fedda.strategies.nothing")


IDENTITY = """
import sys, warnings
warnings.simplefilter("error")
own, place = sys.argv[1:]
import fedda
assert fedda.__file__.startswith(place), fedda.__file__
from fedda.strategies.base import FedDA
from fedda.strategies.fdann import FDANN
from fedda.clients.base import Client
from fedda.clients import fedavg
import fedda.server.training
from fedda import halves, plugins
assert plugins.strategy("fdann") is FDANN and issubclass(FDANN, FedDA)
assert plugins.client("fedavg", "source") is fedavg.Source and issubclass(fedavg.Source, Client)
assert halves.load("server", "training") is fedda.server.training
for name, module in list(sys.modules.items()):
    if name.split(".")[0] != "fedda" or name.split(".")[1:2] not in [[f] for f in (
        "clients", "strategies", "server")]:
        continue
    real = own + name.removeprefix("fedda.")
    assert sys.modules[real] is module, name
    assert module.__name__ == module.__spec__.name == real, (name, module.__spec__)
    assert module.__file__.startswith(place), module.__file__
    print(name)
"""


@pytest.mark.nightly(*LAYOUT)
@pytest.mark.parametrize("layout", ["checkout", "editable", "bundle", "wheel"])
def test_every_layout_loads_each_module_only_once(
    layout: str, checkout: Path, installed: Path, tmp_path: Path
) -> None:
    python, own, place = installed / "python", "", checkout
    env: dict[str, str] = {}
    if layout == "wheel":
        own, place = "fedda.", installed.parent
    elif layout == "editable":
        python = environment(tmp_path / "venv") / "python"
        pip(python, "-e", str(checkout))
    else:
        place = bundle.stage(tmp_path / "app") if layout == "bundle" else checkout
        env = {"PYTHONPATH": str(place)}  # before what is installed, as Flower puts an app
    said = sh(python, "-c", IDENTITY, own, place, cwd=tmp_path, **env).split()
    assert {"fedda.strategies.base", "fedda.clients.base", "fedda.server.training"} <= set(said)


def test_a_method_of_another_package_is_known(install: Install) -> None:
    add_tent(install)
    assert "tent" in plugins.methods() and not plugins.broken() and not plugins.unfinished()
    assert plugins.origin("tent") == "tent_package 1.0" and plugins.origin("kd3a") == "fedda"
    assert plugins.about("tent") == "Tent: a method of another package."
    assert plugins.method("tent").title == "Tent"
    assert plugins.strategy("tent").__module__ == "tent_package.strategy"
    assert issubclass(plugins.strategy("tent"), plugins.strategy("fedavg"))
    assert plugins.client("tent", "source") is clients.fedavg.Source


def test_a_method_without_strategy_and_client_uses_those_of_fedavg(install: Install) -> None:
    bare = {"__init__": "", "algorithm": ALGORITHM}
    install("tent_package", {"methods": "tent = tent_package"}, bare)
    assert plugins.strategy("tent") is plugins.strategy("fedavg")
    assert plugins.client("tent", "target") is plugins.client("fedavg", "target")
    assert not plugins.unfinished()


def test_settings_of_an_added_method_are_like_all_others(install: Install) -> None:
    assert "tent.pace" not in defaults()
    add_tent(install)
    assert defaults()["tent.pace"] == 0.5
    assert 'tent.weighting = "examples"\ntent.pace = 0.5' in bundle.config_table()
    assert overrides("tent", ["pace=0.25"]) == {"tent.pace": 0.25}
    assert presets.settings("tent", ["paper"]) == {"tent.pace": 0.1}
    for name in presets.STARTS:
        chosen = presets.settings("tent", [name])
        assert chosen["tent.pace"] == 0.9 and chosen["tent.weighting"] == "uniform"
    assert "tent.pace" not in presets.settings("tent", ["digit5"])
    features = {"method": "fedavg"} | {
        k: v.value for k, v in presets.for_all("table", ["tent"]).items()
    }
    assert not RunConfig.parse(features).idle  # a comparison's preset is of all its methods
    config = RunConfig.parse({"method": "tent", "tent.pace": 0.25})
    task = config.task("tent", 0, SHAPE, ("a", "b"), 2)
    assert Task.parse(task.flat()).options.pace == 0.25
    with pytest.raises(ConfigError, match=r"no setting 'tent\.path'"):
        RunConfig.parse({"tent.path": 1})


def test_listings_say_where_each_thing_is_from(install: Install) -> None:
    add_tent(install)
    install("nets", {"models": "linear = nets:build"}, {"__init__": NETWORK})
    install("tables", {"data": "csv = tables:open_table"}, {"__init__": READER})
    install("greeting", {"commands": "hi = greeting:hi"}, {"__init__": "def hi(): 'Greet.'"})
    code, out, err = cli("methods")
    assert code == 0 and not err
    assert "tent       Tent: a method of another package. (tent_package 1.0)" in out
    assert "linear     A linear encoder. (nets 1.0)" in out
    assert "hi         Greet. (greeting 1.0)" in out and "commands" in out and "ended" not in out
    assert "csv        Tables of numbers as .csv files. (tables 1.0)" in out
    (own,) = [line for line in out.splitlines() if line.startswith("fedavg ")]
    assert not own.endswith(")")
    code, out, err = cli("settings", "tent")
    assert code == 0 and not err
    assert "pace" in out and "how fast" in out and "tent is added by tent_package 1.0." in out
    assert "linear     A linear encoder. (nets 1.0)" in out and "(tables 1.0)" in out
    assert "tent.pace" in cli("settings", "tent", "--presets")[1]
    assert "tent_package" not in cli("settings", "kd3a")[1]


STRATEGY = """
from fedda.strategies.fedavg import FedAvg
class Faulty(FedAvg):
    def combine(self, replies):
        model, numbers = super().combine(replies)
        return RETURNED
STRATEGY = Faulty
"""
RETURNED = "combine of tent_package.strategy.Faulty returned"


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("{n: a.T for n, a in model.items()}, numbers", rf"{RETURNED} another .*\(64, 16\), and"),
        ("{n: a for n, a in model.items() if 'h' not in n}, {}", f"{RETURNED} .* is missing, and"),
        ("model | {'more': model['head.bias']}, {}", rf"{RETURNED} .*'more' is .* model missing\."),
        ("model", f"{RETURNED} a dict that cannot be used .* and a dict of numbers"),
        ("None, numbers", f"{RETURNED} a tuple that cannot be used"),
        ("model, {'loss': object()}", f"{RETURNED} a tuple that cannot be used .*valid type"),
        (
            "{n: a * float('nan') for n, a in model.items()}, {}",
            f"{RETURNED} '.*' with .* not finite",
        ),
        ("model, {'loss': float('nan')}", f"{RETURNED} 'loss' with values that are not finite"),
        (
            "None + 1",
            r"tent of tent_package 1.0 failed at .*strategy\.py:6 \(in combine\) with Type",
        ),
    ],
)
def test_what_an_added_strategy_returns_wrongly_is_named(
    install: Install,
    domains: list[Node],
    runs: dict[str, str],
    fresh_sites: None,
    returned: str,
    why: str,
) -> None:
    add_tent(install, strategy=STRATEGY.replace("RETURNED", returned))
    with pytest.raises((ConfigError, NotFiniteError, RunError), match=why):
        run(domains, runs | {"method": "tent", "rounds": 1})


def test_what_turns_infinite_later_ends_a_training_with_its_best_round(
    install: Install, domains: list[Node], runs: dict[str, str], fresh_sites: None
) -> None:
    """It was called the sites' divergence, with the advice to lower their rate."""
    spoilt = "{n: a * (1 if self.round < 2 else float('nan')) for n, a in model.items()}, numbers"
    add_tent(install, strategy=STRATEGY.replace("RETURNED", spoilt))
    results, events = run(domains, runs | {"method": "tent", "rounds": 3})
    (training,) = results["trainings"]["tent"]
    assert training["rounds"][-1]["round"] == 1
    (ending,) = (e["text"] for e in events if e["event"] == "ending")
    assert ending.startswith(f"{RETURNED} '") and "train.lr" not in ending
    assert ending.endswith("overflow; it ends, with the model of round 1")


def test_an_added_strategy_may_return_its_arrays_in_any_order_and_precision(
    install: Install, domains: list[Node], runs: dict[str, str], fresh_sites: None
) -> None:
    plain, _ = run(domains, runs | {"method": "fedavg", "rounds": 2})
    other = "{n: model[n].astype('f8') for n in reversed(model)}, numbers"
    add_tent(install, strategy=STRATEGY.replace("RETURNED", other))
    own = {"method": "tent", "rounds": 2, "run.name": "other", "tent.pace": 0.3}
    found, _ = run(domains, runs | own)
    assert found["titles"] == {"tent": "Tent"} and found["config"]["tent.pace"] == 0.3
    assert found["final_accuracy"] == plain["final_accuracy"] is not None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (ALGORITHM, "import gone_package", "No module named 'gone_package'"),
        (ALGORITHM, "", "tent_package.algorithm has no METHOD"),
        ("default=0.5, ", "", "The setting 'tent.pace' is missing"),
        ('"pace": 0.1', '"place": 0.1', "no setting 'tent.place'"),
        ('"Tent"', "7", "its title is 7"),
        (",)\n", ")\n", "a tuple of Phase"),
        ('{"paper": {"pace": 0.1}}', '["paper"]', "presets must be a dict"),
        ('{"pace": 0.9}', '{"pause": 0.9}', "no setting 'tent.pause'"),
        ('{"pace": 0.9}', "0.9", "on_features must be a dict"),
    ],
)
def test_a_method_that_cannot_be_loaded_is_named_and_left_out(
    install: Install, old: str, new: str, why: str
) -> None:
    add_tent(install, algorithm=ALGORITHM.replace(old, new))
    assert "tent" not in plugins.methods() and "tent.pace" not in defaults()
    (reason,) = reasons()
    assert why in reason and "\n" not in reason
    with pytest.raises(ConfigError, match=r"no method 'tent'; .*tent of tent_package 1.0 is left"):
        plugins.method("tent")
    code, out, err = cli("methods")
    assert code == 0 and not re.search(r"^tent\b", out, re.M) and "kd3a" in out
    assert f"The method tent of tent_package 1.0 is left out: {reason}" in err
    assert cli("settings", "kd3a")[0] == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kd3a", "fedda itself has a method of that name"),
        ("fact", "fedda already has this name"),
        ("train", "another meaning"),
        ("none", "another meaning"),
        ("Tent", "does not match"),
        ("a.b", "does not match"),
    ],
)
def test_a_method_cannot_have_a_name_that_is_taken(install: Install, name: str, why: str) -> None:
    own = plugins.method("kd3a")
    algorithm = ALGORITHM.replace('"tent"', f'"{name}"')
    package = TENT | {"algorithm": algorithm}
    install("tent_package", {"methods": f"{name} = tent_package"}, package)
    (reason,) = reasons(name)
    assert why in reason and not others("methods")
    assert plugins.method("kd3a") is own and RunConfig.parse({}).train.lr == 0.02


def test_of_two_packages_with_one_name_the_second_is_left_out(install: Install) -> None:
    add_tent(install)
    install("tent_two", {"methods": "tent = tent_two"}, TENT)
    assert plugins.origin("tent") == "tent_package 1.0"
    (left_out,) = map(str, plugins.broken())
    assert "tent of tent_two 1.0 is left out: tent_package 1.0 already has this name." in left_out


TARGET = "\nfrom fedda.clients.base import Client\nclass Target(Client):\n    pass\n"
ADAPT = ALGORITHM.replace("fedavg.TRAIN}", '{"target": fedavg.TRAIN["source"]}}')

UNFINISHED: list[tuple[dict[str, str], str]] = [
    ({"strategy": "import gone_package"}, "strategy of tent_package 1.0 cannot be imported: Modul"),
    ({"strategy": ""}, "tent_package.strategy has no STRATEGY, which tent needs"),
    ({"client": CLIENT + "Target = dict"}, "dict is not derived from fedda.clients.base.Client"),
    (
        {"client": CLIENT + TARGET, "algorithm": ADAPT},
        "tent_package.client.Target has no function 'train', for which the phase 'train' asks a",
    ),
]


@pytest.mark.parametrize(("changed", "why"), UNFINISHED)
def test_a_method_that_cannot_run_is_named_and_left_out(
    install: Install, tmp_path: Path, changed: dict[str, str], why: str
) -> None:
    add_tent(install, **changed)
    (problem,) = plugins.unfinished()
    assert why in problem.why and "\n" not in problem.why
    code, out, err = cli("methods")
    assert code == 0 and not re.search(r"^tent\b", out, re.M) and "kd3a" in out
    assert err == f"The method tent of tent_package 1.0 is left out: {problem.why}\n"
    with pytest.raises(ConfigError) as raised:
        plugins.check("tent")
    assert why in str(raised.value)
    (tmp_path / "sites").mkdir()
    make_domains(tmp_path / "sites")
    with pytest.raises(ConfigError) as raised:
        fedda.simulate(tmp_path / "sites", "town", "tent", dir=tmp_path / "r", quiet=True)
    assert why in str(raised.value) and not (tmp_path / "r").exists(), "before anything trains"


def test_a_site_whose_method_ends_the_program_is_named(install: Install, tmp_path: Path) -> None:
    ends = "\nclass Source(Source):\n    def train(self):\n        raise SystemExit(3)\n"
    add_tent(install, client=CLIENT + ends)
    (tmp_path / "sites").mkdir()
    make_domains(tmp_path / "sites")
    with pytest.raises(QuorumError, match=r"client\.py:6 \(in train\) with SystemExit: 3"):
        fedda.simulate(tmp_path / "sites", "town", "tent", baseline="none", rounds=1, quiet=True)


def test_every_own_method_has_what_its_phases_ask_for() -> None:
    for method in plugins.own_methods():
        plugins.check(method)


def add_network(install: Install, code: str = NETWORK, name: str = "linear") -> None:
    install("nets", {"models": f"{name} = nets:build"}, {"__init__": code})


def test_a_network_of_another_package_is_built_and_saved(install: Install, tmp_path: Path) -> None:
    add_network(install)
    config, state = ModelConfig(name="linear"), torch.get_rng_state()
    model = models.build(config, SHAPE, 3, seed=1)
    assert torch.equal(torch.get_rng_state(), state) and model.width == 6 and model.training
    assert model(torch.rand(4, *SHAPE)).shape == (4, 3)
    again, other = (models.build(config, SHAPE, 3, seed) for seed in (1, 2))
    weights = [m.encoder.state_dict()["1.weight"] for m in (model, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    path = tmp_path / "model.safetensors"
    models.save(path, model, config=config, inputs=Inputs(SHAPE), classes=("a", "b", "c"))
    assert torch.equal(models.load(path)[0].encoder.state_dict()["1.weight"], weights[0])
    assert RunConfig.parse({"model.name": "linear"}).model.name == "linear"
    with pytest.raises(ConfigError, match=r"no network 'linea'; .* linear\."):
        RunConfig.parse({"model.name": "linea"})
    with pytest.raises(ModelError, match="linear has no pretrained weights"):
        models.build(ModelConfig(name="linear", weights="DEFAULT"), SHAPE, 3, seed=1)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (NN + "def build(config, shape): return nn.Flatten(), 6", "says that it gives 6"),
        ("def build(config, shape): return shape[7]", "IndexError"),
        (
            NN + "class Two(nn.Flatten):\n    def forward(self, x): return x.flatten(1), x\n"
            "def build(config, shape): return Two(), 6",
            "for two inputs it gives a tuple",
        ),
        (NN + "def build(config, shape): return nn.Linear(3, 6), 6", "does not take inputs"),
        ("def build(config, shape): return None, 6", "does not take inputs"),
    ],
)
def test_a_network_that_is_not_what_it_says_is_an_error(
    install: Install, code: str, why: str
) -> None:
    add_network(install, code)
    with pytest.raises(ModelError, match=why) as raised:
        models.blank(ModelConfig(name="linear"), SHAPE, 3)
    assert str(raised.value).startswith("The network linear of nets 1.0 ")


def test_a_site_says_which_method_it_lacks(
    install: Install,
    domains: list[Node],
    fresh_sites: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_tent(install)
    bench = Bench(domains, "tent")
    request = bench.begin()[0]
    uninstall(tmp_path, "tent_package")
    with caplog.at_level(logging.ERROR, "fedda.site"):
        reply = bench.call(request)
    assert reply.has_error() and reply.error.code == Code.CONFIG
    assert "There is no method 'tent'; choose one of adabn, " in caplog.text


def add_reader(install: Install, code: str = READER, package: str = "tables") -> None:
    install(package, {"data": f"{package} = {package}:open_table"}, {"__init__": code})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "site.tab"
    path.write_text("0,1,2,3\n1,4,5,6\n1,7,8,9\n")
    return path


def test_a_reader_of_another_package_is_used(install: Install, table: Path) -> None:
    with pytest.raises(DataError, match=r"neither a folder nor an \.npz file"):
        data.load_source(table)
    add_reader(install)
    source, target = data.load_source(table), data.load_target(table)
    assert source.y.tolist() == [0, 1, 1] and source.classes == ("a", "b")
    assert type(target) is data.Unlabelled and target.x[1].tolist() == [4, 5, 6]
    assert data.load_evaluation(table) is None
    assert data.describe(table, "source").shape == (3,)
    assert data.verify(table, "target").train == 3
    names = [names for names, _, _ in data.batches(table, (3,), 2)]
    assert names == [["0", "1"], ["2"]]
    with pytest.raises(DataError, match=r"vectors of 3 numbers, .* the model takes images"):
        list(data.batches(table, SHAPE, 2))
    code, out, _ = cli("data", "check", str(table), "--role", "source", "--min-images", "2")
    assert code == 0 and "3" in out


def test_no_reader_can_take_over_fedda_s_own_formats(
    install: Install, domains: list[Node], tmp_path: Path
) -> None:
    greedy = "def open_table(path):\n    raise AssertionError(path)"
    add_reader(install, greedy)
    assert isinstance(open_site(domains[0]["data"]), ArrayFile)
    with pytest.raises(DataError, match=r"reader tables of tables 1\.0 failed to look at .*Asser"):
        open_site(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        open_site(tmp_path / "gone.tab")


GIVES = "return Unlabelled(self.x)"
LABELLED = "Labelled(self.x, self.y, "


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (GIVES, "return self.source(0, 0, None)", "gave a Labelled where a U"),
        (GIVES, "return Unlabelled(self.x.double())", "type torch.float64"),
        (GIVES, "return Unlabelled(self.x[:0])", "and one or more"),
        (GIVES, "return Unlabelled(self.x / 0)", "values that are not finite"),
        (GIVES, "return Unlabelled(self.z)", "failed .AttributeError"),
        (LABELLED, "Labelled(self.x, self.y[:2], ", "for 3 examples"),
        (LABELLED, "Labelled(self.x, self.y + 1, ", "from 1 to 2, but names 2 classes"),
    ],
)
def test_a_reader_that_gives_wrong_data_is_an_error(
    install: Install, table: Path, old: str, new: str, why: str
) -> None:
    assert old in READER
    add_reader(install, READER.replace(old, new))
    load = data.load_target if old == GIVES else data.load_source
    with pytest.raises(DataError, match=f"the reader of tables 1.0 .*{why}") as raised:
        load(table)
    assert str(table) in str(raised.value)


@pytest.fixture
def example(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package in examples/plugin importable, with the entry points that it declares."""
    declared = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    entries = {
        group.removeprefix("fedda."): "\n".join(f"{k} = {v}" for k, v in points.items())
        for group, points in declared.items()
    }
    install("example_of_shot", entries, {})
    monkeypatch.syspath_prepend(str(EXAMPLE))
    plugins.forget()


SHOT = {"method": "shot-im", "rounds": 4, "shot-im.source-rounds": 2} | {
    "model.name": "small-cnn",
    **PLAIN,
    "train.lr": 0.1,
    "run.seeds": "3",
}


def sites_asked(crossed: list[Crossing], what: str) -> set[str]:
    return {c.site for c in crossed if c.way == "to" and c.kind == "train" and c.hop == what}


def test_the_examples_loss_by_hand(example: None) -> None:
    loss = importlib.import_module("fedda_shot.algorithm").information_loss
    sure = torch.tensor([[30.0, 0.0], [0.0, 30.0]])
    # Sure predictions of both classes; sure ones of one class only; unsure ones.
    assert loss(sure).item() == pytest.approx(-np.log(2), abs=1e-6)
    assert loss(sure[:1]).item() == pytest.approx(0, abs=1e-6)
    assert loss(torch.zeros(4, 2)).item() == pytest.approx(0, abs=1e-6)
    p = np.array([[0.9, 0.1], [0.4, 0.6]])
    mean = p.mean(axis=0)
    wanted = np.mean([-sum(q * np.log(q)) for q in p]) + 0.5 * sum(mean * np.log(mean))
    assert loss(torch.tensor(p).log(), 0.5).item() == pytest.approx(wanted)


def test_the_example_adapts_at_the_target_alone(
    example: None, domains: list[Node], runs: dict[str, str], fresh_sites: None
) -> None:
    assert not plugins.broken() and not plugins.unfinished()
    assert plugins.origin("shot-im") == "example_of_shot 1.0"
    assert set(plugins.installed("models")) == {"small-cnn"}
    grid = ScriptedGrid(domains)
    results, _ = run(domains, runs | SHOT | {"run.name": "whole"}, grid=grid)
    assert sites_asked(grid.crossed, "train") == {"anna", "bert", "carl"}
    assert sites_asked(grid.crossed, "adapt") == {"town"}
    (training,) = results["trainings"]["shot-im"]
    assert [sorted(each["weights"]) for each in training["rounds"]] == [
        *[["anna", "bert", "carl"]] * 2,
        *[["town"]] * 2,
    ]
    accuracies = [each["accuracy"] for each in training["rounds"]]
    assert accuracies[3] >= max(accuracies[1], 0.75)

    # A finished model needs no source, and the target changes nothing of it but the encoder.
    sources = {"rounds": 2, "method": "fedavg", "run.name": "sources"}
    before = run(domains, runs | SHOT | sources)[0]["trainings"]["fedavg"][0]["model"]
    alone = {"rounds": 2, "run.start-from": before, "run.name": "target", "run.expect": 1}
    target = [node for node in domains if node["role"] == "target"]
    (training,) = run(target, runs | SHOT | alone)[0]["trainings"]["shot-im"]
    assert [list(each["weights"]) for each in training["rounds"]] == [["town"]] * 2
    old, new = load_file(before), load_file(training["model"])
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert {name.split(".")[0] for name in changed} == {"encoder"}


DRIVER = """
import json, subprocess, sys
from pathlib import Path
from fedda.config.inputs import Inputs
from fedda.ops.federation import Deployment

if __name__ == "__main__":
    here, settings = Path(sys.argv[1]), sys.argv[3:]
    data = here / "data"
    sites = {"anna": ("source", data / "anna.npz"), "bert": ("source", data / "bert.npz")}
    sites["town"] = ("target", data / "town.npz")
    options = ["--policy", str(here / "policy.toml"), "--min-images", "16"]
    with Deployment(here, sites, client_options=dict.fromkeys(sites, options)) as hub:
        command = [sys.executable, "-m", "fedda", "run", "shot-im", "--server", hub.home]
        command += ["--dir", here / "runs", *settings]
        done = subprocess.run(command, cwd=here, env=hub.env, timeout=float(sys.argv[2]))
        logs = "".join(p.tail(30) for p in hub.processes.values() if done.returncode)
    print(logs)
    sys.exit(done.returncode)
"""


@pytest.mark.nightly("examples/plugin", "fedda/plugins.py", *LAYOUT)
def test_the_example_over_processes_from_an_environment_of_its_own(
    installed: Path, tmp_path: Path
) -> None:
    """Server, sites and operator run in an environment in which pip has installed the example."""
    python, copy = installed / "python", tmp_path / "copy-of-plugin"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    pip(python, str(copy))
    programs_of_flower(installed)
    listed = sh(installed / "fedda", "methods", cwd=tmp_path)
    assert "(fedda-shot 0.1.0)" in listed and "small-cnn" in listed

    (tmp_path / "data").mkdir()
    make_domains(tmp_path / "data")
    (tmp_path / "driver.py").write_text(DRIVER)
    named = sh(installed / "fedda", "policy", "plugins", cwd=tmp_path)
    assert '"fedda-shot==0.1.0",  # methods shot-im, models small-cnn' in named
    (tmp_path / "policy.toml").write_text(f"[allow]\n{named}")
    settings = ["--rounds", "4", "--baseline", "none", "--preset", "entropy"]
    for each in ("source-rounds=2", "diversity=0.75", "model.name=small-cnn", "model.hidden=8,8"):
        settings += ["-c", each]
    for each in ("train.lr=0.1", "train.batch-size=16", "run.expect=3", "wait.settle=0"):
        settings += ["-c", each]
    sh(python, "driver.py", tmp_path, str(PATIENCE), *settings, cwd=tmp_path)

    results = json.loads((tmp_path / "runs" / "shot-im" / "results.json").read_text())
    assert results["titles"] == {"shot-im": "SHOT-IM"} and not results["events"]
    assert results["config"]["shot-im.diversity"] == 0.75
    (training,) = results["trainings"]["shot-im"]
    assert [list(each["weights"]) for each in training["rounds"]] == [
        *[["anna", "bert"]] * 2,
        *[["town"]] * 2,
    ]
    for entry in training["rounds"]:
        asked = {tuple(key.split()[:2]) for key in entry["bytes"]}
        tested = {("to", "target"), ("from", "target")}
        trained = {("to", "source"), ("from", "source")} if entry["round"] <= 2 else set()
        assert asked == tested | trained, entry
    assert 0 <= results["final_accuracy"] <= 1
    assert results["final_accuracy"] == training["rounds"][-1]["accuracy"]


def programs_of_flower(folder: Path) -> None:
    """Write Flower's own programs beside an environment's python, as pip would have done."""
    for point in distribution("flwr").entry_points.select(group="console_scripts"):
        module, _, name = point.value.partition(":")
        code = (
            f"#!{folder / 'python'}\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n"
        )
        (folder / point.name).write_text(code)
        (folder / point.name).chmod(0o755)
