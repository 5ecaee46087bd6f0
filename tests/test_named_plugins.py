"""Code of other packages at a site with a policy: named with its version, or not imported."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.policy import describe
from clients.policy.rules import Policy
from fedda import models, plugins
from fedda.config import ModelConfig
from fedda.data import augment, reader
from fedda.errors import Code, ConfigError, PolicyError
from tests.command_lines import call
from tests.local_grid import Node
from tests.plugged import HERE
from tests.test_plugins import NETWORK, READER, TENT, install, others
from tests.test_policy import a_bench, obeying

assert install  # a fixture
pytestmark = pytest.mark.usefixtures("fresh_sites")

Install = Callable[..., None]
NOISY = "def noisy(images, draws):\n    return images\n"
ADDS = {
    "methods": "tent = all_package",
    "models": "tiny = all_package.network:build",
    "data": "table = all_package.reader:open_table",
    "augment": "noisy = all_package.noise:noisy",
}
REST = {"images": "raw", "arrays": "mat", "commands": "hi", "listeners": "mail", "pages": "other"}
ADDS |= {kind: f"{name} = all_package.files:nothing" for kind, name in REST.items()}
assert {*ADDS} == {*plugins.KINDS}
HOLDS = TENT | {"network": NETWORK, "reader": READER, "noise": NOISY}
HOLDS |= {"files": "def nothing(*_): ...\n"}


@pytest.fixture
def package(install: Install, tmp_path: Path) -> Path:
    """A package that adds one thing of each kind, as pip installs it -> its folder of code."""
    install("all_package", ADDS, HOLDS)
    return tmp_path / "site-packages" / "all_package"


def usable() -> list[str]:
    plugins.forget()
    return sorted(group for group in ADDS for _ in others(group))  # type: ignore[arg-type]


def imported() -> list[str]:
    return [name for name in sys.modules if name.startswith("all_package")]


def test_code_that_the_policy_does_not_name_is_not_even_imported(
    package: Path, tmp_path: Path
) -> None:
    other = "other-package==1.0"
    for allowed in ((), (other,), ("all-package==1.0.1",)):
        plugins.restrict(allowed)
        assert usable() == [] and imported() == []
        # fedda's own, found in the same way
        assert ("fact" in plugins.methods()) == HERE
        assert {(each.group, each.name) for each in plugins.barred()} == {
            (group, line.split(" ")[0]) for group, line in ADDS.items()
        }
    with pytest.raises(
        PolicyError, match=r"of all_package 1\.0 is left out: the policy allows another"
    ):
        plugins.method("tent")
    with pytest.raises(PolicyError, match=r"network tiny .* is left out"):
        models.build(ModelConfig(name="tiny"), (1, 8, 8), 2, seed=0)
    with pytest.raises(PolicyError, match=r"augmentation noisy .* is left out"):
        augment.augmentation("noisy")
    (tmp_path / "x.tab").write_text("0,1,2\n")
    assert reader.added(tmp_path / "x.tab") is None
    assert imported() == []
    plugins.restrict((other, "All.Package==1.0"))
    assert usable() == sorted(ADDS)
    assert plugins.method("tent").name == "tent"


def test_the_command_writes_a_line_that_the_policy_takes(package: Path, tmp_path: Path) -> None:
    done = call("policy", "plugins")
    assert imported() == []
    path = tmp_path / "policy.toml"
    path.write_text(describe.FRESH.replace("plugins = []", done.output.rstrip() + "\n"))
    policy = Policy.read(path)
    assert policy.allow.plugins == ("all-package==1.0",)
    assert any("all-package==1.0" in line for line in describe.words(policy))
    plugins.restrict(policy.allow.plugins)
    assert usable() == sorted(ADDS)
    plugins.restrict(Policy.parse("").allow.plugins)  # of a site without a policy
    assert usable() == sorted(ADDS)
    path.write_text("[budget]\nrounds = 3\n")  # one of before
    plugins.restrict(Policy.read(path).allow.plugins)
    assert usable() == []


@pytest.mark.parametrize("entry", ["tent", "tent>=1", "tent==", "tent*", ""])
def test_an_entry_that_names_no_package_is_refused(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f"[allow]\nplugins = ['{entry}']\n")
    with pytest.raises(ConfigError, match=r"is not like 'name==1\.0'"):
        Policy.read(path)


@pytest.mark.parametrize(
    ("entry", "code"), [("", Code.POLICY), ("'all-package==1.0'", None), ("'*'", None)]
)
def test_a_site_refuses_a_request_for_code_that_its_policy_does_not_name(
    package: Path, domains: list[Node], tmp_path: Path, entry: str, code: Code | None
) -> None:
    rules = f"[allow]\nplugins = [{entry}]\n"
    nodes = [dict(node) for node in domains]
    bench = a_bench(nodes, "tent", model__name="tiny")
    requests = bench.begin()  # by a server that has the package
    for node, obeyed in zip(nodes, obeying(nodes, rules, tmp_path), strict=True):
        node.update(obeyed)
    assert imported()
    replies = [bench.call(request) for request in requests]
    assert {Code(r.error.code) if r.has_error() else None for r in replies} == {code}
