"""Which part may know which, read from the source: imports flow down, labels stay at sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("fedda", "clients", "strategies", "server")

# May be imported: the packages above, siblings, and anything that is not ours.
ALLOWED = {
    "fedda": {"fedda"},
    "clients": {"fedda", "clients"},
    "strategies": {"fedda", "strategies"},
    "server": {"fedda", "strategies", "server"},
}

# Everything else in fedda/ runs without Flower. A module that starts Flower's programs may join.
KNOW_FLOWER = {"fedda/records.py"}

# What only one module may import, and nothing that a site runs: trackers, and readers of exports.
ALONE = {
    "tensorboard": {"server/trackers.py"},
    "torch.utils.tensorboard": {"server/trackers.py"},
    "mlflow": {"server/mlflow_runs.py"},
    "onnx": {"fedda/export.py"},
    "onnxscript": {"fedda/export.py"},
    "onnxruntime": {"fedda/export.py"},
}


def modules(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """What `_imports` finds; many tests ask."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Level and name of everything a module imports, wherever in it, but not for types alone."""
    open_nodes: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            open_nodes += node.orelse
            continue
        open_nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
            if not node.module or node.module in FOLDERS:
                yield from ((node.level, f"{node.module or ''}.{a.name}") for a in node.names)


@pytest.mark.parametrize("path", modules(*FOLDERS), ids=name)
def test_imports_flow_down(path: Path) -> None:
    folder = name(path).split("/")[0]
    depth = len(path.relative_to(ROOT).parts) - 1
    for level, module in imports(path):
        assert level <= depth, f"{name(path)} reaches above its folder"
        if level:
            continue
        parts = module.split(".")
        # In the wheel the other folders are fedda.clients and so on: the same rule holds.
        wheel = parts[0] == "fedda" and len(parts) > 1 and parts[1] in FOLDERS
        top = parts[1] if wheel else parts[0]
        if top in FOLDERS:
            assert top in ALLOWED[folder], f"{name(path)} imports {module}"
            absolute = top == folder and folder != "fedda"
            assert not absolute, f"{name(path)} imports its sibling {module} absolutely"


def test_the_core_knows_no_flower() -> None:
    def knows(path: Path) -> bool:
        return any(module.split(".")[0] == "flwr" for _, module in imports(path))

    assert {name(path) for path in modules("fedda") if knows(path)} == KNOW_FLOWER
    assert knows(ROOT / "clients/bridge.py")  # the test can tell


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("package", ALONE)
def test_trackers_and_exporters_are_known_in_one_place(package: str) -> None:
    def knows(path: Path) -> bool:
        return any(within(module, package) for _, module in imports(path))

    assert {name(path) for path in modules(*FOLDERS) if knows(path)} == ALONE[package]


def eager(path: Path) -> set[str]:
    """What importing a module imports: not what its functions do when they are called."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    lazy = ast.unparse(tree)
    found: set[str] = set()
    for node in ast.walk(ast.parse(lazy)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
    return found


@pytest.mark.parametrize("path", ["server/trackers.py", "server/mlflow_runs.py", "fedda/export.py"])
def test_trackers_and_exporters_are_imported_when_they_are_used(path: str) -> None:
    assert eager(ROOT / path)
    assert not [m for m in eager(ROOT / path) for package in ALONE if within(m, package)]


def test_export_costs_the_help_text_nothing() -> None:
    heavy = {"torch", "fedda.export", "fedda.models"}
    assert "typer" in eager(ROOT / "fedda/cli/export.py")
    assert not eager(ROOT / "fedda/cli/export.py") & heavy


@pytest.mark.slow
def test_a_site_loads_no_tracker_and_no_exporter() -> None:
    """Whatever it imports in between, and with what Flower and torch import themselves."""
    code = "import sys, clients.app, clients.resident, fedda.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    loaded = set(done.stdout.split())
    assert "clients.fleet" in loaded, done.stderr
    assert not loaded & {*ALONE, "server", "server.tracking", "fedda.export"}


@pytest.mark.parametrize("path", modules("fedda/algorithms"), ids=name)
def test_the_maths_is_pure(path: Path) -> None:
    """No Flower, no loader, no device, no logging."""
    tops = {".".join(module.split(".")[:2]) for _, module in imports(path)}
    for other in ("flwr", "logging", "fedda.data", "fedda.models", "fedda.train", "fedda.records"):
        assert other not in tops | {t.split(".")[0] for t in tops}, f"{name(path)} imports {other}"
    text = ast.unparse(ast.parse(path.read_text()))
    assert ".cuda(" not in text and "open(" not in text


@pytest.mark.parametrize("path", modules("strategies"), ids=name)
def test_strategies_hold_no_module_and_touch_no_disk(path: Path) -> None:
    known = {module for _, module in imports(path)}
    forbidden = {"torch.nn", "torch.optim", "pathlib", "os", "safetensors", "fedda.models"}
    assert not known & forbidden
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "open"]


# ---- labels ------------------------------------------------------------------------------------


def classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def reads_labels(node: ast.AST) -> list[int]:
    """Lines that read `.y`, by name or through getattr, or load labelled data."""
    lines = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            if inner.attr in ("y", "load_source", "load_evaluation", "evaluation"):
                lines.append(inner.lineno)
        elif isinstance(inner, ast.Constant) and inner.value == "y":
            lines.append(inner.lineno)
    return lines


@pytest.mark.parametrize("path", modules("clients"), ids=name)
def test_no_target_reads_a_label(path: Path) -> None:
    """Only a source's training and the shared `evaluate` may."""
    tree = ast.parse(path.read_text())
    for found in classes(tree):
        if found.name == "Target" or "Target" in [ast.unparse(b) for b in found.bases]:
            assert not reads_labels(found), f"{name(path)}:{reads_labels(found)}"
    # What a Target may call: functions of its module, and what all clients inherit.
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and name(path) != "clients/site.py":
            assert not reads_labels(node), f"{name(path)}:{reads_labels(node)}"


def test_of_what_clients_share_only_the_test_reads_labels() -> None:
    tree = ast.parse((ROOT / "clients/base.py").read_text())
    client = next(c for c in classes(tree) if c.name == "Client")
    readers = [n.name for n in client.body if isinstance(n, ast.FunctionDef) and reads_labels(n)]
    assert readers == ["evaluate"]


def test_what_trains_cannot_read_a_sites_notes() -> None:
    """They hold labels of tests: written by `fit` and `evaluate`, read by the picture alone."""
    users, readers = set(), set()
    for path in modules("clients"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and {"notes", "picture"} & {
                *(alias.name for alias in node.names),
                *str(node.module).split("."),
            }:
                users.add(name(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.load", "numpy.load"):
                readers.add(name(path))
    assert users == {"clients/base.py", "clients/notes.py"}
    assert readers == {"clients/picture.py"}


def test_the_targets_data_have_no_label_to_read() -> None:
    from dataclasses import fields

    from fedda.data import Labelled, Unlabelled

    assert [f.name for f in fields(Unlabelled)] == ["x"]
    assert not issubclass(Unlabelled, Labelled)


def test_the_reader_of_labels_sees_them() -> None:
    """Without this the tests above could not fail."""
    for text in ("self.data.y[i]", "getattr(self.data, 'y')", "data.load_source(path)"):
        assert reads_labels(ast.parse(text))
    assert not reads_labels(ast.parse("self.data.x[i]; q.entropy()"))
