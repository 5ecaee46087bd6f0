"""What the source code shows: packages import only certain others, and targets read no labels."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from fedda import flower
from tests.plugged import HERE

ROOT = Path(__file__).parents[1]
FOLDERS = ("fedda", "clients", "strategies", "server")

# Which of these packages each package may import. Anything that is not ours is allowed.
ALLOWED = {
    "fedda": {"fedda"},
    "clients": {"fedda", "clients"},
    "strategies": {"fedda", "strategies"},
    "server": {"fedda", "strategies", "server"},
}

# What the modules of a method that plugs in may import, as the folders where others have them.
FOLDERS_OF = {"strategy.py": "strategies", "client.py": "clients"}
HALVES = ("strategy", "client")

# The modules of fedda/ that import Flower, but for fedda/flower/, which does so when asked; all
# others run without it. A module that starts Flower's programs may be added.
KNOW_FLOWER = {"fedda/lane/parcels.py", "fedda/lane/lane_end.py", "fedda/records.py"}


def modules(*folders: str) -> list[Path]:
    return sorted(p for f in folders for p in (ROOT / f).rglob("*.py"))


def plugged(*halves: str) -> list[Path]:
    """The modules of these names of the methods that plug in, in fedda/contrib/methods."""
    folder = ROOT / "fedda" / "contrib" / "methods"
    found = [path for half in halves for path in folder.glob(f"*/{half}.py")]
    assert len(found) > 5 * len(halves) or not HERE
    return found


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """List what `_imports` yields; the list is cached, since many tests need it."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield level and name of every import anywhere in a module, except imports for types only."""
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


def forbidden(path: Path) -> Iterator[str]:
    """Yield what a module imports and must not, in words."""
    folder = FOLDERS_OF.get(path.name if path in plugged(*HALVES) else "", name(path).split("/")[0])
    depth = len(path.relative_to(ROOT).parts) - 1
    for level, module in imports(path):
        if level > depth:
            yield f"{name(path)} reaches above its folder"
        parts = module.split(".")
        # In the wheel the other folders are fedda.clients and so on: the same rule holds.
        wheel = parts[0] == "fedda" and len(parts) > 1 and parts[1] in FOLDERS
        top = parts[1] if wheel else parts[0]
        if level or top not in FOLDERS:
            continue
        if top not in ALLOWED[folder]:
            yield f"{name(path)} imports {module}"
        if top == folder != "fedda" and path.is_relative_to(ROOT / folder):
            yield f"{name(path)} imports its sibling {module} absolutely"


def test_a_package_imports_only_allowed_packages() -> None:
    paths = modules(*FOLDERS)
    assert len(paths) > 300
    assert [text for path in paths for text in forbidden(path)] == []


def test_the_core_imports_flower_only_in_the_listed_modules() -> None:
    def imports_flower(path: Path) -> bool:
        return any(module.split(".")[0] == "flwr" for _, module in imports(path))

    core = {*modules("fedda")} - {*plugged("strategy", "client")}
    assert {name(path) for path in core if imports_flower(path)} == KNOW_FLOWER
    assert imports_flower(ROOT / "clients/app.py")  # so the check above can fail


def loaded(*names: str) -> set[str]:
    """All modules of a process that imports these; indirect imports count, too."""
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_the_server_that_sites_dial_loads_no_torch() -> None:
    """It would take half a gigabyte; only the programs of runs need it."""
    found = loaded("fedda.cli", "server.superlink.gateway", *flower.OF_THE_SERVER)
    assert not found & {"torch", "sklearn", "scipy", "pandas"}


def test_the_maths_is_pure() -> None:
    """No Flower, no loader, no device, no logging."""
    others = {"flwr", "logging"}
    others |= {f"fedda.{m}" for m in ("data", "flower", "models", "train", "records")}
    for path in (paths := [*modules("fedda/algorithms"), *plugged("algorithm")]):
        tops = {".".join(module.split(".")[:2]) for _, module in imports(path)}
        found = others & (tops | {t.split(".")[0] for t in tops})
        assert not found, f"{name(path)} imports {found}"
        text = ast.unparse(ast.parse(path.read_text()))
        assert ".cuda(" not in text and "open(" not in text, name(path)
    assert len(paths) > 12


def test_strategies_hold_no_module_and_touch_no_disk() -> None:
    outside = {"torch.nn", "torch.optim", "pathlib", "os", "safetensors", "fedda.models"}
    for path in (paths := [*modules("strategies"), *plugged("strategy")]):
        found = outside & {module for _, module in imports(path)}
        assert not found, f"{name(path)} imports {found}"
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        opens = [f for f in calls if isinstance(f, ast.Name) and f.id == "open"]
        assert not opens, f"{name(path)} opens a file"
    assert len(paths) > 20


# Where a module outside fedda/algorithms names a method, and why it may.
NAMES_METHODS = {
    "fedda/config/__init__.py": "the method of a run that names none",
    "fedda/halves.py": "FedAvg, whose halves others inherit",
    "fedda/cli/demo.py": "a demonstration is of one method",
}


def named_methods(path: Path) -> set[str]:
    """Return the methods that a module has as a text of its own, or imports."""
    methods = {p.stem for p in modules("fedda/algorithms")} - {"__init__"}
    methods |= {p.parent.name for p in plugged("algorithm")}
    tree = ast.parse(path.read_text())
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    taken = {a.name for n in froms if n.module == "fedda.algorithms" for a in n.names}
    taken |= {str(n.module).removeprefix("fedda.algorithms.") for n in froms if not n.level}
    return methods & (texts | taken)


def test_the_core_knows_no_method_by_name() -> None:
    """What it asks of a method the method declares, so that one of another package can answer."""
    own = ("fedda/algorithms/", "fedda/contrib/")
    core = [p for p in modules("fedda") if not name(p).startswith(own)]
    core += modules("server", "clients/node", "clients/site")
    assert {name(path) for path in core if named_methods(path)} == {*NAMES_METHODS}
    assert named_methods(ROOT / "clients/kd3a.py")  # so the check above can fail


def classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


# Client classes that train with labels, at sites that have labels.
LEARN_FROM_LABELS = {"Source", "Collaborator"}

# Other classes that read labels: `Site` holds a site's data, `Notes` notes labels for the site,
# and `Client` tests the model. A test below checks that nothing else in `Client` reads labels.
READERS = {
    "clients/base.py": {"Client"},
    "clients/site/memory.py": {"Site"},
    "clients/site/notes.py": {"Notes"},
}

# Expressions that look like labels of a site's images but are labels of atoms or a barycenter.
OF_ATOMS = {
    "clients/feddadil.py": {"came['y']"},
    "clients/shared/dictionary.py": {"b.y", "gradients.y"},
}


def reads_labels(node: ast.AST, besides: Collection[str] = ()) -> list[int]:
    """List the lines that read `.y`, by name or through getattr, or load labelled data.

    Args:
        node: a piece of a module.
        besides: expressions to pass over, with everything inside them.
    """
    spared: set[int] = set()
    for expression in ast.walk(node) if besides else ():
        if isinstance(expression, ast.expr) and ast.unparse(expression) in besides:
            spared |= {id(inner) for inner in ast.walk(expression)}
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


def of_labels(path: Path) -> Iterator[str]:
    """Yield what in a client's module reads labels without being listed above, in words."""
    tree = ast.parse(path.read_text())
    readers, besides = READERS.get(name(path), set()), OF_ATOMS.get(name(path), set())
    for defined in classes(tree):
        if defined.name in LEARN_FROM_LABELS:
            continue
        inherits = {ast.unparse(base).split(".")[-1] for base in defined.bases}
        if inherits & LEARN_FROM_LABELS:
            yield f"{name(path)}: {defined.name} is a {inherits}"
        if defined.name not in readers:
            yield from (f"{name(path)}:{line}" for line in reads_labels(defined, besides))
    # A Target may call functions and use other objects of its module, so these are checked as well.
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            yield from (f"{name(path)}:{line}" for line in reads_labels(node))


def renamed(path: Path) -> Iterator[str]:
    """Yield where an assignment or an import gives Source or Collaborator another name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            original = ast.unparse(node.value).split(".")[-1]
            names = {ast.unparse(each) for each in node.targets}
            if original in LEARN_FROM_LABELS and names != {original}:
                yield f"{name(path)}:{node.lineno}"
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if each.name in LEARN_FROM_LABELS and each.asname not in (None, each.name):
                    yield f"{name(path)}:{node.lineno}"


def test_no_target_reads_a_label() -> None:
    """Only the classes listed above read labels, and no other class inherits their code."""
    paths = [*modules("clients"), *plugged("client")]
    assert len(paths) > 50
    assert [text for path in paths for text in of_labels(path)] == []


def test_no_target_is_a_source_by_another_name() -> None:
    paths = [*modules("clients"), *plugged("client")]
    assert [text for path in paths for text in renamed(path)] == []


def test_the_shared_client_reads_labels_only_in_its_test() -> None:
    tree = ast.parse((ROOT / "clients/base.py").read_text())
    client = next(c for c in classes(tree) if c.name == "Client")
    readers = [getattr(node, "name", "") for node in client.body if reads_labels(node)]
    assert readers == ["test"]


def test_training_code_cannot_read_a_sites_notes() -> None:
    """Notes hold labels of tests. `serve` and `test` write them; only the picture reads them."""
    users, readers = set(), set()
    for path in [*modules("clients"), *plugged("client")]:
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
