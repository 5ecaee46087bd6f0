"""No room of the house grows beyond its budget, the table in docs/code.md."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("fedda", "server", "clients", "strategies")
ROW = re.compile(r"^\| `([\w/]+)` \|.*\| ([\d,]+) \|$", re.MULTILINE)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """How many lines of a module have code: none of comments, docstrings and texts of settings."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            prose |= {*range(value.lineno, (value.end_lineno or value.lineno) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - prose)


def rooms() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in (path for top in TOPS for path in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        depth = 3 if parts[1] == "contrib" else 2
        room = "/".join(parts[: min(depth, len(parts) - 1)])
        found[room] += code_lines(path.read_text())
    return found


def test_lines_of_code_are_counted_by_hand() -> None:
    head = '"""Doc.\n\nMore."""\n\n# why\nx = 1  # so\n'
    text = f'{head}y = (\n    2,\n)\n\n\ndef f():\n    """Doc."""\n    return y\n'
    assert code_lines(text) == 6


def test_no_room_is_above_its_budget() -> None:
    budgets = {name: int(most.replace(",", "")) for name, most in ROW.findall(code_page())}
    found = rooms()
    assert {*found} == {*budgets}, "each room has a row in docs/code.md"
    above = {name: (n, budgets[name]) for name, n in found.items() if n > budgets[name]}
    assert not above, f"lines of code, and at most: {above}"


def code_page() -> str:
    return (ROOT / "docs" / "code.md").read_text()
