"""Texts of others do nothing where they are shown: no terminal obeys them, no spreadsheet computes.

And whatever a model file says of itself, it is used or refused in one sentence.
"""

import csv
import io
import json
import logging
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.table import Table

from fedda import models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.results.escaping import Output, PlainConsole, cell, echo, outlasting, visible
from tests.command_lines import call
from tests.test_fuzz import joined, split

ROOT = Path(__file__).parents[1]
FORMULAS = ("=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "＝1", "a;=cmd|' /C calc'!A0")
ESCAPES = ("\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "a\rb", "\u202egnp", "\x00")
CNN = ModelConfig(name="digit-cnn")


@cache
def whole() -> tuple[dict[str, Any], bytes]:
    """A model file's header and values."""
    with TemporaryDirectory() as folder:
        made, path = models.build(CNN, (1, 8, 8), 3, 0), Path(folder, "m.safetensors")
        models.save(path, made, config=CNN, inputs=Inputs((1, 8, 8)), classes=("a", "b", "c"))
        return split(path.read_bytes())


def model(path: Path, **about: Any) -> Path:
    """A model file that says other things of itself."""
    header, values = whole()
    said = json.loads(header["__metadata__"]["fedda"])
    said["config"] |= about.pop("config", {})
    text = json.dumps(said | about)
    path.write_bytes(joined({**header, "__metadata__": {"fedda": text}}, values))
    return path


def images(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names or ("1.png",):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / name)
    return folder


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_begins_as_a_formula_does(text: str) -> None:
    found = cell(text)
    assert not re.search(r"(^|;)[=+\-@\t\r＝]", found) and "'" in found
    assert [cell(each) for each in (1, -0.5, None, "cat", "a-b", "e;f")] == [
        *(1, -0.5, None, "cat", "a-b", "e;f")
    ]


@pytest.mark.parametrize("text", ESCAPES)
def test_no_terminal_gets_a_control_code(text: str) -> None:
    shown = Table(text, title=text)
    shown.add_row(text)
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=80, color_system="standard")
    console.print(shown)
    console.print(f"[bold]{text}", text)
    own = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # styles are the console's
    assert "\x1b[1m" in out.getvalue() and "2J" not in re.findall(r"\x1b\[([^m]*)$", own)
    for line in (*own.splitlines(), *visible(f"{text}\n{text}").splitlines()):
        assert line.isprintable(), repr(line)


@pytest.mark.parametrize("to_file", [False, True])
def test_predictions_hold_no_formula_and_no_control_code(tmp_path: Path, to_file: bool) -> None:
    classes = ["=cmd|'/C calc'!A0", "@SUM(1+1)", "\x1b[2J"]
    file = model(tmp_path / "m.safetensors", classes=classes)
    data = images(tmp_path / "data", "-1.png", "=1.png", "\x1b[2J.png", "+1\n2.png")
    done = call("predict", file, data, *(["--out", tmp_path / "o"] if to_file else []))
    text = (tmp_path / "o").read_text() if to_file else done.stdout
    rows = list(csv.reader(io.StringIO(text)))
    assert len(rows) == 5
    assert all(line.isprintable() for line in text.splitlines())
    assert not [each for row in rows for each in row if each[0] in "=+-@"]


def test_a_folder_of_others_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    for name in ESCAPES[:2]:
        images(tmp_path / name.replace("/", ""), "1.png", f"{name}.png")
        (tmp_path / name.replace("/", "") / f"{name}.txt").touch()
    images(tmp_path / "b", "1.png", "2.png")
    for place in (tmp_path, tmp_path / ESCAPES[0]):
        done = call("data", "check", place, "--min-images", 2, code=None)
        assert "\x1b" not in done.output and "\x07" not in done.output


def test_commands_print_through_one_helper() -> None:
    files = [*(ROOT / "fedda").rglob("*.py")]
    for file in files:
        text = file.read_text()
        if file.name != "escaping.py":
            assert not re.search(r"typer\.echo\(|click\.echo\(|(?<!Plain)\bConsole\(", text), file
            assert file.name == "export.py" or "sys.stdout.write" not in text, file


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_work_goes_on_where_nobody_reads_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """As after `fedda report RUN | head -1`, whose page is written last."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, name, outlasting(stream))
        monkeypatch.setattr(Output, "ends", False)
        log = logging.StreamHandler(getattr(sys, name))
        for _ in range(2):
            PlainConsole(stderr=name == "stderr").print("a table")
            echo("a line", err=name == "stderr")
            log.handle(logging.makeLogRecord({"msg": "a line"}))
    assert capfd.readouterr() == ("", "")


QUIET = pytest.mark.nightly("fedda/cli/exits.py", "fedda/results/escaping.py")


@pytest.mark.parametrize(
    "words",
    [["--help"], *(pytest.param(w, marks=QUIET) for w in (["settings"], ["methods", "--json"]))],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fedda", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_only_shows_something_ends_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fedda attach RUN | head -1`, which went on silently."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(Output, "ends", True)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", outlasting(stream))
        with pytest.raises(SystemExit) as ended:
            echo("a line")
        assert not ended.value.code


ODD = (
    *(None, True, -1, 0, 2.5, 1e308, float("nan"), 2**63, 10**30, "", "x", "\0", "9" * 400),
    *([], [-1], [0], [1, -4, -4], [-1, -8, -8], [1, 8], [1, 8, 8, 8], [1, 0, 8], [True, 8, 8]),
    *([1.5, 8, 8], ["1", "8", "8"], [3, -8, 8], [1, 10**6, 10**6], [1, 2**40, 2**40], [-16]),
    *({}, {"a": 1}, ["a", "a", "a"], [1, 2, 3], ["a", "b", ["c"]], ["a" * 2**21, "b", "c"]),
    *({"method": 3, "settings": {}}, {"method": "shot", "settings": 3}, {"method": "x"}),
)
FIELDS = ("shape", "classes", "version", "extension", "resize", "window", "config", "new")


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_a_model_says_of_itself_it_is_used_or_refused(tmp_path: Path, field: str) -> None:
    data = images(tmp_path / "data")
    for value in ODD:
        given = {field: value} if field != "config" else {}
        file = model(tmp_path / "m.safetensors", **given)
        if field == "config":
            header, values = split(file.read_bytes())
            about = json.loads(header["__metadata__"]["fedda"]) | {"config": value}
            text = {"__metadata__": {"fedda": json.dumps(about)}}
            file.write_bytes(joined({**header, **text}, values))
        done = call("predict", file, data, code=None)
        assert isinstance(done.exception, SystemExit) or done.exception is None, (field, value)
        sound = field == "new" or (field, value) == ("window", "")
        sound = sound or (field == "version" and isinstance(value, str))
        sound = sound or (field == "extension" and value is None)
        sound = sound or (field == "config" and value == {})  # another package's default network
        if done.exit_code:
            assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, value
        assert sound or done.exit_code == 1, (field, value)


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    from tests.test_inside import pipe

    with pipe(tmp_path / "m.safetensors"):
        done = call("predict", tmp_path / "m.safetensors", images(tmp_path / "data"), code=1)
        assert "no regular file" in done.stderr
