"""Each command that a message names can be typed as it stands: it parses, and paths are quoted."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import typer

from fedda.cli import app
from fedda.errors import typed
from tests.command_lines import below, parse

Kind = TypeVar("Kind", bound=ast.AST)
ROOT = Path(__file__).parents[1]
TOPS = ("fedda", "server", "clients", "strategies")
# A command that goes on with something that was put in, which a shell may part.
VERBS = "|".join(below(typer.main.get_command(app)))
BARE = re.compile(rf"fedda ({VERBS})( [a-z]+)*( --?[a-z-]+)* \0")
# What stands for what is put in, where only some texts are possible.
STANDS_FOR = {
    "variant.method": "fedavg",
    "name": "fedavg",
    "'run.sources=' + ','.join(names[:2])": "run.sources=a,b",
}


def nodes(kind: type[Kind], word: str) -> Iterator[tuple[Path, Kind]]:
    """The nodes of a kind in all modules that have a word, with their module."""
    for path in (path for top in TOPS for path in (ROOT / top).rglob("*.py")):
        if word in (text := path.read_text()):
            yield from ((path, n) for n in ast.walk(ast.parse(text)) if isinstance(n, kind))


def test_what_is_put_into_a_command_is_quoted() -> None:
    odd = []
    for path, text in nodes(ast.JoinedStr, "fedda "):
        whole = "".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in text.values)
        odd += [f"{path}: {found[0]}" for found in BARE.finditer(whole)]
    assert not odd, "give these by `fedda.errors.typed`"


def commands() -> Iterator[list[str]]:
    """The words of each command that `typed` puts together; what is not known until then is X."""
    for _, call in nodes(ast.Call, "typed("):
        if not isinstance(call.func, ast.Name) or call.func.id != "typed":
            continue
        words = [a for a in call.args if not isinstance(a, ast.Starred)]
        yield [
            str(a.value) if isinstance(a, ast.Constant) else STANDS_FOR.get(ast.unparse(a), "X")
            for a in words
        ]


@pytest.mark.contrib
def test_a_command_of_a_message_is_one() -> None:
    found = [words for words in commands() if words[0] == "fedda"]
    assert len(found) > 20
    for words in found:
        assert len(words) > 1 and parse(words), words


def test_words_are_parted_as_they_were_given() -> None:
    words = ["fedda", "attach", Path("my runs/it's")]
    assert shlex.split(typed(*words)) == [str(word) for word in words]
