"""The option `--json`, which all commands have that print a table or a result for others to read.

docs/json.md says which keys each command's object has; a test compares the two.
"""

import json
from typing import Annotated, Any

import typer

from fedda.results.escaping import echo

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON instead, as docs/json.md describes it.")
]


def print_json(result: Any) -> None:
    """Print a result and nothing else to standard output: what else is said goes to the other."""
    echo(json.dumps(result, indent=1))
