"""What programs ask of the command line: `--json`, its documentation, and completion."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fedda.cli import app
from fedda.ops import certificate, chain, keys
from tests.command_lines import below, call
from tests.local_grid import Node

PAGE = Path(__file__).parents[1] / "docs" / "json.md"


def commands(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, bool]]:
    """Every command that users see -> its words, and whether it has --json."""
    for name, each in below(group).items():
        if each.hidden:
            continue
        if below(each):
            yield from commands(each, (*words, name))
        else:
            yield " ".join((*words, name)), any("--json" in p.opts for p in each.params)


def documented() -> dict[str, set[str]]:
    """The keys of each command's object, by the command; none where the page describes them."""
    found: dict[str, set[str]] = {}
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `fedda"):
            continue
        named, said = line.split("|")[1:3]
        first, *more = re.findall(r"`([^`]+)`", named)
        group = first.removeprefix("fedda ").split()
        words = [word for word in group if word.islower() or "-" in word]
        every = [" ".join(words), *(" ".join([*words[:-1], each]) for each in more)]
        found |= {each: set(re.findall(r"`([^`]+)`", said)) for each in every}
    return found


@pytest.mark.contrib
def test_the_page_names_every_command_with_json() -> None:
    have = {words for words, has in commands(typer.main.get_command(app)) if has}
    assert have == set(documented())
    assert {"report", "methods", "look", "policy show", "audit all"} <= have


def printed(*words: object) -> dict[str, Any]:
    return json.loads(call(*words, "--json").stdout)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    call("policy", "init", tmp_path / "p.toml")
    return tmp_path / "p.toml"


def test_settings_and_methods() -> None:
    found = printed("methods")
    assert set(found) == documented()["methods"] and found["methods"]["kd3a"]["of"] == "fedda"
    found = printed("settings", "fedavg")
    assert set(found) == documented()["settings"]
    assert found["settings"]["run.patience"]["default"] == 0
    assert "fedavg.weighting" in found["settings"]  # as fedda compare takes it
    assert all(set(v) == {"value", "source"} for p in found["presets"].values() for v in p.values())


def test_a_policy_its_budgets_and_its_log(policy: Path, tmp_path: Path) -> None:
    found = printed("policy", "check", policy)
    assert set(found) == documented()["policy check"]
    assert found["policy"]["leaving"]["look"] is False
    found = printed("policy", "show", policy, "--state-dir", tmp_path)
    assert set(found) == documented()["policy show"] and found["used"]["rounds"] == 0
    for n in range(3):
        chain.Chain(tmp_path / "audit.jsonl").add(event="received", number=n)
    found = printed("policy", "log", "--state-dir", tmp_path, "--last", "2")
    assert set(found) == documented()["policy log"]
    assert [entry["number"] for entry in found["entries"]] == [1, 2]
    call("policy", "log", "--state-dir", tmp_path, "--verify", "--json", code=1)


def test_keys(tmp_path: Path) -> None:
    certificate.init(tmp_path / "hub", [])
    keys.add(tmp_path / "hub", "clinic-a")
    found = printed("keys", "list", "--dir", tmp_path / "hub")
    assert set(found) == documented()["keys list"] and found["revoked"] == 0
    assert found["sites"] == {"clinic-a": {"role": "", "private_key_here": True}}


def test_a_look(domains: list[Node], tmp_path: Path) -> None:
    folder = Path(domains[0]["data"]).parent
    found = printed("look", "--data", folder, "--target", "town", "--out", tmp_path / "look")
    assert set(found) == documented()["look"]
    assert found == json.loads((tmp_path / "look" / "look.json").read_text())


COMPLETES = """
import sys
sys.argv = ["fedda"]
from fedda.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def test_a_shell_completes_commands_without_loading_torch() -> None:
    asked = {"_FEDDA_COMPLETE": "complete_bash", "COMP_WORDS": "fedda pol", "COMP_CWORD": "1"}
    words = [sys.executable, "-c", COMPLETES]
    done = subprocess.run(words, env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split() == ["policy", "False"], done.stderr
