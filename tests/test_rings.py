"""The rings of the suite."""

import ast

import pytest

from tests import rings


@pytest.mark.contrib
def test_nightly_tests_name_files_that_are_there() -> None:
    """A file that has moved would never let them run in the gate."""
    named = set[str]()
    for path in (rings.ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "nightly" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.nightly":
                named |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
    assert len(named) > 20
    assert {name for name in named if not (rings.ROOT / name).exists()} == set()
