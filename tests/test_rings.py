"""The rings of the suite."""

import ast
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import rings


def item(*marks: Any) -> Any:
    found = {mark.name: mark for mark in marks}
    return SimpleNamespace(
        get_closest_marker=found.get, iter_markers=lambda name: filter(None, [found.get(name)])
    )


FAST, SLOW = item(), item(pytest.mark.slow.mark)
TRACKING = item(pytest.mark.nightly("server/watching").mark)
BOTH = item(pytest.mark.slow.mark, pytest.mark.nightly("a.py", "b.py").mark)
ALL = [TRACKING, FAST, SLOW, BOTH]


@pytest.mark.parametrize(
    ("ring", "changed", "chosen"),
    [
        ("fast", {"server/watching/live.py"}, [FAST]),
        ("gate", set(), [FAST, SLOW]),
        ("gate", {"server/watching/live.py"}, [TRACKING, FAST, SLOW]),
        ("gate", {"server/watching.py", "c/a.py"}, [FAST, SLOW]),
        ("gate", {"b.py"}, [FAST, SLOW, BOTH]),
        ("nightly", set(), ALL),
    ],
)
def test_a_ring_has_its_tests_and_nightly_ones_of_changed_files(
    monkeypatch: pytest.MonkeyPatch, ring: str, changed: set[str], chosen: list[Any]
) -> None:
    monkeypatch.setattr(rings, "changed", lambda: changed)
    inside, outside = rings.select(ALL, ring)
    assert inside == chosen
    assert [each for each in ALL if each in inside or each in outside] == ALL
    assert len(inside) + len(outside) == len(ALL)


@pytest.mark.contrib
def test_nightly_tests_name_files_that_are_there() -> None:
    """A file that has moved would never let them run in the gate."""
    named = set[str]()
    for path in (rings.ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.nightly":
                named |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    assert len(named) > 20
    assert {name for name in named if not (rings.ROOT / name).exists()} == {"a.py", "b.py"}


@pytest.mark.nightly("tests/rings.py")
def test_changes_are_counted_from_the_nearest_known_point(tmp_path: Path) -> None:
    who = {
        f"GIT_{each}_{what}": "x" for each in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=tmp_path, check=True, env={**os.environ, **who})

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name)
        git("add", ".")
        git("commit", "--quiet", "--message", name)

    def found() -> set[str]:
        rings.changed.cache_clear()
        return set(rings.changed(tmp_path))

    git("init", "--quiet")
    for name in ("first", "second", "third"):
        commit(name)
    assert found() == {"third"}  # nothing else is known
    git("update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert found() == {"second", "third"}
    git("tag", "v1", "HEAD~1")
    assert found() == {"third"}
    (tmp_path / "first").write_text("not committed yet")
    assert found() == {"first", "third"}
    git("tag", "v2", "HEAD")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert found() == {"first", "third"}  # a fresh clone of what was just landed
    rings.changed.cache_clear()
