"""The rings of the suite, and the table of what its tests cost."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import costs, rings


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


@pytest.mark.slow
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


def test_without_git_nothing_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rings.changed.cache_clear()
    assert rings.changed(tmp_path) == frozenset()
    rings.changed.cache_clear()


def report(name: str, when: str, seconds: float, **said: Any) -> pytest.TestReport:
    about = (name, ("x", 0, "x"), {}, "passed", None, when, (), seconds)
    made = pytest.TestReport(*about)  # type: ignore[arg-type]
    made.user_properties = list(said.items())
    return made


def test_the_table_adds_up_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "README.md"
    monkeypatch.setattr(costs, "TABLE", table)
    assert costs.seconds_by_file() == {}
    table.write_text("# About\n\ntext\n\nMeasured before.\n\nold\n")
    found = costs.costs(
        [
            report("tests/test_a.py::one", "setup", 1.0, processor=0.5, ring="gate"),
            report("tests/test_a.py::one", "call", 2.0, processor=1.5, ring="gate"),
            report("tests/test_a.py::two[x|y]", "call", 4.0, processor=1.0, ring="fast"),
            report("tests/test_b.py::one", "call", 8.0, processor=3.0, ring="nightly"),
        ]
    )
    costs.write(found)
    text = table.read_text()
    assert text.startswith("# About\n\ntext\n\nMeasured with ") and "old" not in text
    assert "| all | 3 | 4.0 | 3.0 | 8.0 | 15.0 | 6.0 |" in text
    assert "| test_a.py | 2 | 4.0 | 3.0 |  | 7.0 | 3.0 |" in text
    assert "| `test_a.py::two[x\\|y]` | fast | 4.0 | 1.0 |" in text
    assert costs.seconds_by_file() == {"test_a.py": 7.0, "test_b.py": 0.0}


@pytest.mark.slow
def test_processors_seconds_count_children_too() -> None:
    before = costs.processor_seconds()
    work = "sum(i * i for i in range(3_000_000))"
    with subprocess.Popen([sys.executable, "-c", f"{work}; print(); input()"], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        alive = costs.processor_seconds()
        child.communicate("\n")
    assert (
        before < alive <= costs.processor_seconds() + 0.02
    )  # the kernel counts living ones in ticks
