"""Code of other packages at a site with a policy: named by version or hash, or not imported."""

import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clients.policy import words
from clients.policy.rules import Policy
from fedda import models, plugins
from fedda.cli.policy import app
from fedda.config import ModelConfig
from fedda.data import augment, reader
from fedda.errors import Code, ConfigError, PolicyError
from fedda.ops import distributions
from tests.local_grid import Node
from tests.test_plugins import NETWORK, READER, TENT, install
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
HOLDS = TENT | {"network": NETWORK, "reader": READER, "noise": NOISY}


@pytest.fixture
def package(install: Install, tmp_path: Path) -> Path:
    """A package that adds one thing of each kind, as pip installs it -> its folder of code."""
    install("all_package", ADDS, HOLDS)
    folder = tmp_path / "site-packages"
    record(folder)
    return folder / "all_package"


def record(folder: Path) -> None:
    """Write the list of files, as pip does."""
    info = folder / "all_package-1.0.dist-info"
    (info / "INSTALLER").write_text("pip")
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "RECORD"]
    lines = [f"{p.relative_to(folder)},sha256=x,1\n" for p in files if "__pycache__" not in p.parts]
    (info / "RECORD").write_text("".join([*lines, f"{info.name}/RECORD,,\n"]))


def by_hash() -> str:
    return f"all-package sha256:{distributions.hash_of(distribution('all_package'))}"


def usable() -> list[str]:
    plugins.forget()
    return sorted(group for group in ADDS for _ in plugins.installed(group))  # type: ignore[arg-type]


def imported() -> list[str]:
    return [name for name in sys.modules if name.startswith("all_package")]


def test_code_that_the_policy_does_not_name_is_not_even_imported(
    package: Path, tmp_path: Path
) -> None:
    other = "other-package==1.0"
    for allowed in ((), (other,), ("all-package==1.0.1",), ("all-package sha256:" + "0" * 64,)):
        plugins.restrict(allowed)
        assert usable() == [] and imported() == []
        assert {(each.group, each.name) for each in plugins.barred()} == {
            (group, line.split(" ")[0]) for group, line in ADDS.items()
        }
    with pytest.raises(PolicyError, match=r"of all_package 1\.0 is left out: its files are not"):
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


def test_without_a_policy_all_is_as_before(package: Path) -> None:
    plugins.restrict(Policy.parse("").allow.plugins)
    assert usable() == sorted(ADDS)


def change(package: Path) -> None:
    (package / "client.py").write_text("from fedda.clients.fedavg import Source, Target # other\n")


def add(package: Path) -> None:
    (package / "more.py").write_text("")


def add_to_namespace(package: Path) -> None:
    (package / "deep").mkdir()
    (package / "deep" / "more.so").write_bytes(b"x")


def remove(package: Path) -> None:
    (package / "noise.py").unlink()


def rename(package: Path) -> None:
    (package / "noise.py").rename(package / "network2.py")


def add_entry(package: Path) -> None:
    entries = package.parent / "all_package-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text() + "[fedda.augment]\nb = os:system\n")


def ship_compiled(package: Path) -> None:
    """A compiled file that came with the package is code as any other."""
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "client.cpython-311.pyc").write_bytes(b"x")
    listed = package.parent / "all_package-1.0.dist-info" / "RECORD"
    line = "all_package/__pycache__/client.cpython-311.pyc,sha256=x,1\n"
    listed.write_text(listed.read_text() + line)


@pytest.mark.parametrize(
    "alter", [change, add, add_to_namespace, remove, rename, add_entry, ship_compiled]
)
def test_any_change_of_the_files_is_seen(package: Path, alter: Callable[[Path], None]) -> None:
    plugins.restrict((by_hash(),))
    assert usable() == sorted(ADDS)
    alter(package)
    assert usable() == []
    with pytest.raises(PolicyError, match="its files are not those that the policy names"):
        plugins.method("tent")


def test_what_pip_and_python_write_is_no_change(package: Path) -> None:
    before = by_hash()
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    (package.parent / "all_package-1.0.dist-info" / "INSTALLER").write_text("uv")
    assert by_hash() == before


def test_code_that_lies_elsewhere_has_no_hash(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.restrict((by_hash(),))
    shadow = tmp_path / "shadow" / "all_package"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(shadow.parent))
    assert usable() == []
    assert "is not among its files" in plugins.barred()[0].why
    assert distributions.entries(plugins.KINDS) == [
        ("all-package==1.0", "augment noisy, data table, methods tent, models tiny")
    ]


def test_a_package_without_a_list_of_files_has_no_hash(package: Path) -> None:
    plugins.restrict((by_hash(),))
    (package.parent / "all_package-1.0.dist-info" / "RECORD").unlink()
    assert usable() == [] and distributions.entries(plugins.KINDS)[0][0] == "all-package==1.0"


def test_the_command_writes_a_line_that_the_policy_takes(package: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plugins"])
    assert done.exit_code == 0 and imported() == []
    path = tmp_path / "policy.toml"
    path.write_text(words.FRESH.replace("plugins = []", done.output.rstrip() + "\n"))
    policy = Policy.read(path)
    assert policy.allow.plugins == (by_hash(),)
    assert any(by_hash() in line for line in words.words(policy))
    plugins.restrict(policy.allow.plugins)
    assert usable() == sorted(ADDS)
    path.write_text("[budget]\nrounds = 3\n")  # one of before
    plugins.restrict(Policy.read(path).allow.plugins)
    assert usable() == []


@pytest.mark.parametrize("entry", ["tent", "tent>=1", "tent==", "tent sha256:ab", "tent*", ""])
def test_an_entry_that_names_no_package_is_refused(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f"[allow]\nplugins = ['{entry}']\n")
    with pytest.raises(ConfigError, match=r"is not like 'name==1\.0' or 'name sha256:'"):
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
