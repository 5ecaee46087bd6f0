"""What fedda uses of Flower: in one place, still there in this version, and in a version that fits.

A new version of Flower fails here first: each test of a name says what is gone, and which files
of ours need it.
"""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedda import cli, flower
from fedda.errors import RunError
from fedda.flower import supported

ROOT = Path(__file__).parents[1]
FOLDERS = ("fedda", "clients", "strategies", "server", "examples", "deploy", "docs", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# `flwr.common` itself has names of the older interface, which Flower's documents list.
PUBLIC = re.compile(r"flwr(\.(app|client|clientapp|common|serverapp(\.strategy)?|simulation))?")
PLACES = flower._places()

# What we use of a name beyond its being there: attributes of it, and parameters "(name)".
USED = {"message_from_proto": "(message_proto)"}


def uses(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each name of `fedda.flower` that a file uses, with an attribute of it or ""."""
    if "flower" not in (text := path.read_text()):
        return
    tree = ast.parse(text)
    names: dict[str, str] = {}  # what the file calls a name -> the name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "fedda.flower":
            names |= {each.asname or each.name: each.name for each in node.names}
    yield from ((name, "") for name in names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", text := ast.unparse(node)):
            first, _, rest = text.partition(".")
            if first == "flower":
                first, _, rest = rest.partition(".")
            if (name := names.get(first, first)) in PLACES:
                yield name, rest


@cache
def used() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """By each name of `fedda.flower`, the files that use it, and the attributes that they read."""
    users, read = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for file in set(FILES) - {Path(__file__)}:
        for name, attribute in uses(file):
            users[name].add(file.relative_to(ROOT).as_posix())
            read[name] |= {attribute} - {""}
    return users, read


def lacks(found: Any, needed: str) -> bool:
    """Whether an attribute, or a parameter "(name)", is missing."""
    if needed.startswith("("):
        return needed.strip("()") not in inspect.signature(found).parameters
    return not hasattr(found, needed)


def gone(name: str, place: str) -> list[str]:
    """What the installed Flower lacks of a name: all of it, or attributes and parameters."""
    try:
        module = import_module(place)
        found = vars(module)[name] if name in vars(module) else import_module(f"{place}.{name}")
    except ImportError:
        return [f"{place}.{name}"]
    needed = {name: USED.get(name, "").split()}
    if isinstance(found, ModuleType):
        needed[name] += sorted({attribute.partition(".")[0] for attribute in used()[1][name]})
    needed |= {key: USED[key].split() for key in USED if key.startswith(f"{name}.")}
    missing = []
    for key, parts in needed.items():
        inner = key.partition(".")[2]
        owner = getattr(found, inner, None) if inner else found
        missing += [f"{place}.{key}.{part}" for part in parts if lacks(owner, part)]
    return missing


@pytest.mark.parametrize(("name", "place"), PLACES.items(), ids=str)
def test_flower_still_has(name: str, place: str) -> None:
    missing = gone(name, place)
    assert not missing, (
        f"{supported.installed()} has no {', '.join(missing)}: change fedda/flower and "
        f"{', '.join(sorted(used()[0][name]))}"
    )


def test_every_name_is_used_and_everything_used_is_a_name() -> None:
    assert set(PLACES) - set(used()[0]) == set()
    assert {key.partition(".")[0] for key in USED} <= set(PLACES)


# ---- one place --------------------------------------------------------------------------------


def private(text: str) -> Iterator[str]:
    """Yield what a module imports of Flower beyond its public interface, or names in a string."""
    for node in ast.walk(ast.parse(text)) if "flwr" in text else ():
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"^flwr(?:\.[a-z_0-9]+)+", node.value)
        yield from (n for n in names if n.split(".")[0] == "flwr" and not PUBLIC.fullmatch(n))


def test_only_one_package_imports_what_flower_may_change() -> None:
    """Tests that compare with Flower itself may, too."""
    ours = {ROOT / "fedda/flower/__init__.py", Path(__file__)}
    found = {path: names for path in FILES if (names := [*private(path.read_text())])}
    assert ours <= set(found)
    others = {
        path.relative_to(ROOT).as_posix(): found[path]
        for path in set(found) - ours
        if path.parts[-2] != "tests"
    }
    assert not others, f"import these from fedda.flower, and list them there: {others}"


@pytest.mark.slow
def test_nothing_of_flower_is_loaded_before_it_is_used() -> None:
    code = "import sys; from fedda import cli, flower; print('flwr' in sys.modules);"
    code += "flower.node_pb2; print('flwr.proto.node_pb2' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


# ---- versions ---------------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def answer(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(supported.metadata, "version", answer)
    supported.installed.cache_clear()


@pytest.fixture(autouse=True)
def found_anew() -> Iterator[None]:
    yield
    supported.installed.cache_clear()


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"flwr{supported.RANGE}" in project["dependencies"]
    ends = (f"{major}.{minor}" for major, minor in (supported.FIRST, supported.UNTRIED))
    assert ">={},<{}".format(*ends) == supported.RANGE


@pytest.mark.parametrize("version", ["1.41.0", "1.41.7", "1.42.0", "1.42.0rc1"])
def test_versions_of_the_range_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    assert supported.refusal() == ""


@pytest.mark.parametrize("program", [cli.main, cli.client])
@pytest.mark.parametrize("version", ["1.40.9", "1.43.0", "1.43.0.dev1", "2.0.0", "0.99", None])
def test_another_flower_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, version: str | None, program: Any
) -> None:
    pretend(monkeypatch, version)
    monkeypatch.setattr(sys, "argv", ["fedda", "superlink"])
    with pytest.raises(SystemExit) as end:
        program()
    found = f"flwr {version}" if version else "no flwr"
    assert end.value.code == (
        f"error: {found} is installed, and fedda needs flwr >=1.41,<1.43: "
        "type pip install 'flwr>=1.41,<1.43'"
    )


def test_a_name_that_is_gone_is_said_in_a_sentence() -> None:
    with pytest.raises(RunError, match=r"has no flwr\.common\.serde\.nothing, which fedda needs"):
        flower._load("flwr.common.serde", "nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(flower, "nothing")  # noqa: B009


@pytest.mark.slow
@pytest.mark.parametrize("words", [["superlink"], ["client", "--help"], ["--help"]])
def test_the_programs_refuse_before_they_import_flower(tmp_path: Path, words: list[str]) -> None:
    """Here `import flwr` fails, as that of a version whose modules have other names would."""
    (tmp_path / "flwr-1.43.0.dist-info").mkdir()
    about = "Metadata-Version: 2.1\nName: flwr\nVersion: 1.43.0\n"
    (tmp_path / "flwr-1.43.0.dist-info" / "METADATA").write_text(about)
    (tmp_path / "flwr.py").write_text("raise ImportError('loaded')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from fedda.cli import main; main()"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: flwr 1.43.0 is installed")
    assert done.stderr.count("\n") == 1
