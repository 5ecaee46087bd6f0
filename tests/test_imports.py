"""Which part may know which, read from the source: imports flow down, labels stay at sources."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
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
    "tensorboard": {"server/tracking/trackers.py"},
    "torch.utils.tensorboard": {"server/tracking/trackers.py"},
    "mlflow": {"server/tracking/mlflow_runs.py"},
    "onnx": {"fedda/models/export.py"},
    "onnxscript": {"fedda/models/export.py"},
    "onnxruntime": {"fedda/models/export.py"},
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
    assert knows(ROOT / "clients/node/bridge.py")  # the test can tell


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


@pytest.mark.parametrize(
    "path",
    ["server/tracking/trackers.py", "server/tracking/mlflow_runs.py", "fedda/models/export.py"],
)
def test_trackers_and_exporters_are_imported_when_they_are_used(path: str) -> None:
    assert eager(ROOT / path)
    assert not [m for m in eager(ROOT / path) for package in ALONE if within(m, package)]


def test_export_costs_the_help_text_nothing() -> None:
    heavy = {"torch", "fedda.models.export", "fedda.models"}
    assert "typer" in eager(ROOT / "fedda/cli/export.py")
    assert not eager(ROOT / "fedda/cli/export.py") & heavy


@pytest.mark.slow
def test_a_site_loads_no_tracker_and_no_exporter() -> None:
    """Whatever it imports in between, and with what Flower and torch import themselves."""
    code = "import sys, clients.app, clients.node.resident, fedda.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    loaded = set(done.stdout.split())
    assert "clients.node.fleet" in loaded, done.stderr
    assert not loaded & {*ALONE, "server", "server.tracking.curves", "fedda.models.export"}


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


# Parts that take labels, where the site has any.
LEARN_FROM_LABELS = {"Source", "Collaborator"}

# Who else reads some: what holds a site's data, what notes them for the site's own eyes, and the
# test of the model, of which a test of its own sees that nothing else in `Client` does.
READERS = {
    "clients/base.py": {"Client"},
    "clients/site/memory.py": {"Site"},
    "clients/site/notes.py": {"Notes"},
}

# What reads like a label and is one of an atom or a barycenter, which no site's image has.
OF_ATOMS = {
    "clients/feddadil.py": {"came['y']"},
    "clients/site/dictionary.py": {"b.y", "gradients.y"},
}


def reads_labels(node: ast.AST, besides: Collection[str] = ()) -> list[int]:
    """Lines that read `.y`, by name or through getattr, or load labelled data.

    Args:
        node: a piece of a module.
        besides: expressions that may.
    """
    spared: set[int] = set()
    for found in ast.walk(node) if besides else ():
        if isinstance(found, ast.expr) and ast.unparse(found) in besides:
            spared |= {id(inner) for inner in ast.walk(found)}
    lines = []
    for inner in ast.walk(node):
        if id(inner) in spared:
            continue
        if isinstance(inner, ast.Attribute):
            if inner.attr in ("y", "load_source", "load_evaluation", "evaluation"):
                lines.append(inner.lineno)
        elif isinstance(inner, ast.Constant) and inner.value == "y":
            lines.append(inner.lineno)
    return lines


@pytest.mark.parametrize("path", modules("clients"), ids=name)
def test_no_target_reads_a_label(path: Path) -> None:
    """Only what takes labels in training may, and the shared `test`; nobody else inherits that."""
    tree = ast.parse(path.read_text())
    readers, besides = READERS.get(name(path), set()), OF_ATOMS.get(name(path), set())
    for found in classes(tree):
        if found.name in LEARN_FROM_LABELS:
            continue
        inherits = {ast.unparse(base).split(".")[-1] for base in found.bases}
        assert not inherits & LEARN_FROM_LABELS, f"{name(path)}: {found.name} is a {inherits}"
        if found.name not in readers:
            lines = reads_labels(found, besides)
            assert not lines, f"{name(path)}:{lines}"
    # What a Target may call: functions of its module, and whatever else the module holds.
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            assert not reads_labels(node), f"{name(path)}:{reads_labels(node)}"


@pytest.mark.parametrize("path", modules("clients"), ids=name)
def test_no_target_is_a_source_by_another_name(path: Path) -> None:
    """Source and Collaborator are given to no other name, within a module or into it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            was = ast.unparse(node.value).split(".")[-1]
            names = {ast.unparse(each) for each in node.targets}
            assert was not in LEARN_FROM_LABELS or names == {was}, f"{name(path)}:{node.lineno}"
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                renamed = each.name in LEARN_FROM_LABELS and each.asname not in (None, each.name)
                assert not renamed, f"{name(path)}:{node.lineno}"


def test_who_may_read_labels_is_there_and_does() -> None:
    """What is listed and reads none would hide the next that does."""
    for path, names in READERS.items():
        found = {c.name: c for c in classes(ast.parse((ROOT / path).read_text()))}
        assert all(reads_labels(found[each]) for each in names)
    for path, expressions in OF_ATOMS.items():
        tree = ast.parse((ROOT / path).read_text())
        held = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
        assert expressions <= held


def test_of_what_clients_share_only_the_test_reads_labels() -> None:
    tree = ast.parse((ROOT / "clients/base.py").read_text())
    client = next(c for c in classes(tree) if c.name == "Client")
    readers = [getattr(node, "name", "") for node in client.body if reads_labels(node)]
    assert readers == ["test"]


def test_what_trains_cannot_read_a_sites_notes() -> None:
    """They hold labels of tests: written by `serve` and `test`, read by the picture alone."""
    users, readers = set(), set()
    for path in modules("clients"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and {"notes", "before_after"} & {
                *(alias.name for alias in node.names),
                *str(node.module).split("."),
            }:
                users.add(name(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.load", "numpy.load"):
                readers.add(name(path))
    assert users == {"clients/base.py", "clients/site/notes.py"}
    assert readers == {"clients/site/before_after.py"}


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
    assert not reads_labels(ast.parse("came['y'] + came['z']"), {"came['y']"})
    for text in ("came['y'] + self.data.y", "come['y']", "getattr(came, 'y')", "came.y"):
        assert reads_labels(ast.parse(text), {"came['y']"})
