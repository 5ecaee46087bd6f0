"""The source tree: few modules outside packages, no import circles, no file name twice."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A method's classes have the same names in each method; `fedda.Model` is the library's own.
OF_METHODS = {"Source", "Target", "Collaborator", "Config", "Member", "Model"}
FOLDERS = ("fedda", "clients", "strategies", "server")
WHEEL = tuple(f"fedda.{folder}." for folder in FOLDERS[1:])  # how their names begin in the wheel
LOOSE = 10  # modules beside fedda/__init__.py

# File names that several folders may have, since they mean the same in each: what a package holds,
# what its classes share, and the two apps that Flower starts.
EVERYWHERE = {"__init__.py", "base.py", "app.py"}
# A method that plugs in is a package of these, in a folder of its own name.
PLUGGED = ("fedda/contrib/methods", {"algorithm.py", "strategy.py", "client.py"})
# Each of these folders has a file of a method, by the method's name.
HALVES = ("fedda/algorithms", "strategies", "clients")


def modules(root: Path) -> dict[str, Path]:
    """Every module of the project by its dotted name; a package is its `__init__`."""
    found = {}
    for path in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(module: str, path: Path) -> Iterator[str]:
    """Yield what a module imports anywhere, for types too; `a.b` may be a name in `a`.

    For `import_module` of an f-string, yield what the string begins with, and `*`.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for text in node.args[:1]:
                if isinstance(text, ast.JoinedStr) and isinstance(text.values[0], ast.Constant):
                    yield f"{text.values[0].value}*"


@cache
def graph(root: Path) -> dict[str, set[str]]:
    """Return, for each module of the project, which others it imports."""
    known = modules(root)

    def targets(name: str) -> set[str]:
        if name.startswith(WHEEL):
            name = name.removeprefix("fedda.")
        if name.endswith(".*"):
            return {m for m in known if m.startswith(name[:-1])}
        return {name} & known.keys() or {name.rpartition(".")[0]} & known.keys()

    return {
        module: set().union(*map(targets, imported(module, path))) - {module}
        for module, path in known.items()
    }


def reachable(edges: Mapping[str, set[str]], start: str) -> set[str]:
    """Return every module that is imported with one, directly or by another."""
    found: set[str] = set()
    todo = [start]
    while todo:
        fresh = edges[todo.pop()] - found
        found |= fresh
        todo += fresh
    return found


def loose(root: Path) -> list[str]:
    """List the modules of fedda/ that lie in none of its packages."""
    return sorted(p.name for p in (root / "fedda").glob("*.py") if p.name != "__init__.py")


def shared_classes(root: Path) -> dict[str, list[str]]:
    """Classes that several modules define, but for the parts that each method has."""
    found: dict[str, list[str]] = {}
    for module, path in modules(root).items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in OF_METHODS:
                found.setdefault(node.name, []).append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


def shared_names(root: Path) -> dict[str, list[str]]:
    """Return file names that several folders have, except where they mean the same."""
    methods = {path.name for path in (root / HALVES[0]).glob("*.py")}
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules(root).values():
        folder = path.parent.relative_to(root).as_posix()
        half = path.name in methods and folder in HALVES
        command = folder == "fedda/cli"  # `fedda X`, whose work another X does
        plugged = folder.startswith(PLUGGED[0]) and path.name in PLUGGED[1]
        if path.name not in EVERYWHERE and not half and not command and not plugged:
            places[path.name].append(folder)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_fedda_holds_few_loose_modules() -> None:
    assert len(loose(ROOT)) <= LOOSE, loose(ROOT)


def test_a_method_is_three_small_files() -> None:
    """MDAN stands for what a new method takes: see docs/adding-a-method.md."""
    lines = sum(len((ROOT / half / "mdan.py").read_text().splitlines()) for half in HALVES)
    assert 100 < lines <= 160


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(graph(ROOT)).prepare()  # raises an error that names the circle


@pytest.mark.contrib
def test_nothing_of_the_core_imports_what_is_built_on_it() -> None:
    def of_contrib(module: str) -> bool:
        return module.startswith("fedda.contrib.")

    core = {m: to for m, to in graph(ROOT).items() if not of_contrib(m)}
    assert not [(m, to) for m, found in core.items() for to in found if of_contrib(to)]
    assert len(core) < len(graph(ROOT)) and sum(map(len, core.values())) > 1000


def test_methods_are_loaded_by_plugins_and_do_not_import_it() -> None:
    edges = graph(ROOT)
    algorithms = {m for m in edges if m.startswith("fedda.algorithms.")}
    assert len(algorithms) > 8
    assert algorithms <= edges["fedda.plugins"]  # else the search for circles would miss this one
    assert not [m for m in algorithms if "fedda.plugins" in reachable(edges, m)]


def test_no_two_files_or_classes_have_one_name() -> None:
    assert not shared_names(ROOT) and not shared_classes(ROOT)


def test_every_package_says_what_it_holds() -> None:
    packages = [p for p in modules(ROOT).values() if p.name == "__init__.py"]
    silent = [p for p in packages if not ast.get_docstring(ast.parse(p.read_text()))]
    assert len(packages) > 20
    assert [p.parent.name for p in silent if p.parent.name != "algorithms"] == []
