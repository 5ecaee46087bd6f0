"""A run that goes on is watched, ended and gone on with by other commands than its own."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedda.cli import app, launch, watching
from fedda.errors import RunError
from fedda.ops import lock
from fedda.ops.federation import PROGRAM
from fedda.ops.spawn import Process
from fedda.results import progress
from fedda.results.progress import Display
from server.journal import Journal
from tests.federation import (
    LIVE,
    PATIENCE,
    Federation,
    Operator,
    processes_with,
    wait_until,
)
from tests.local_grid import Node

HOLDS = """
import sys, time
from pathlib import Path
from fedda.ops.lock import alone
with alone(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of a run's folder."""
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def fedda(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


# ---- the lock ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_lock_of_a_run_names_the_process_that_executes_it(tmp_path: Path) -> None:
    assert lock.holder(tmp_path) is None
    with holding(tmp_path) as process:
        found = lock.holder(tmp_path)
        assert found is not None and found.pid == process.pid
        assert found.near and found.alive
        assert not replace(found, began="1").alive  # a later process with the same number
        assert not replace(found, host="elsewhere").alive
        process.kill()
        wait_until(lambda: not found.alive, PATIENCE, "a killed process still counts as alive")
        assert lock.holder(tmp_path) is None  # though nobody has waited for the process yet


@pytest.mark.slow
def test_a_run_that_goes_on_is_refused_with_the_commands_that_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEAVE", 0.0)
    folder = tmp_path / "r"
    settings = {"method": "fedavg"}
    (folder / "fedavg-0").mkdir(parents=True)
    (folder / "fedavg-0" / "checkpoint.json").touch()
    started = {"simulate": str(tmp_path), "settings": settings}
    (folder / launch.LAUNCH).write_text(json.dumps(started))
    monkeypatch.setattr(launch, "_on_server", lambda *_: lock.alone(folder).__enter__())
    monkeypatch.setattr(launch, "_simulate", lambda *_: lock.alone(folder).__enter__())
    with holding(folder):
        for words in (("--resume", folder), ("fedavg", "--dir", tmp_path, "--name", "r")):
            done = fedda("run", *words)
            assert done.exit_code == 1
            assert f"fedda attach {folder}" in done.stderr
            assert f"fedda stop {folder}" in done.stderr
            assert "--resume" not in done.stderr


def test_without_a_run_that_goes_on_the_commands_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("attach", "stop"):
        done = fedda(command, "--dir", tmp_path)
        assert done.exit_code == 1 and "No run is going on" in done.stderr
        done = fedda(command, tmp_path / "none")
        assert done.exit_code == 1 and "there is no such folder" in done.stderr
    (tmp_path / "r" / "kd3a-0").mkdir(parents=True)
    (tmp_path / "r" / "kd3a-0" / "checkpoint.json").touch()
    assert f"fedda run --resume {tmp_path / 'r'}" in fedda("stop", tmp_path / "r").stderr
    (tmp_path / "r" / "results.json").touch()
    assert f"fedda report {tmp_path / 'r'}" in fedda("attach", tmp_path / "r").stderr


@pytest.mark.slow
def test_of_several_runs_one_must_be_named(tmp_path: Path) -> None:
    with holding(tmp_path / "a"), holding(tmp_path / "b"):
        assert watching.all_going_on(tmp_path) == [tmp_path / "a", tmp_path / "b"]
        done = fedda("stop", "--dir", tmp_path)
    assert done.exit_code == 1 and f"{tmp_path / 'a'}, {tmp_path / 'b'}" in done.stderr


# ---- how a watched run ends --------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_that_dies_is_noticed_though_the_server_believes_in_it(tmp_path: Path) -> None:
    """It may also die before it has locked the run's folder; its first event names it."""
    journal = Journal(tmp_path / "journal.jsonl")
    with holding(tmp_path / "other") as process:
        found = lock.holder(tmp_path / "other")
        assert found is not None
        journal.write("started", pid=found.pid, began=found.began, host=found.host)

        def unaware() -> str:
            process.kill()
            return ""

        with pytest.raises(watching.DiedError, match=rf"process {process.pid}.*without a word"):
            watching.watch(tmp_path / "journal.jsonl", 0, unaware, lambda _: None)


@pytest.mark.parametrize(
    ("error", "how", "kind"),
    [
        ("KeyboardInterrupt", "failed", watching.StoppedError),
        ("SystemExit", "stopped", watching.StoppedError),
        ("SystemExit", "failed", RunError),
        ("QuorumError", "stopped", RunError),
        ("", "stopped", watching.StoppedError),
        ("", "failed", RunError),
    ],
)
def test_a_run_that_was_stopped_is_told_from_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, how: str, kind: type[RunError]
) -> None:
    monkeypatch.setattr(progress, "_LOOK", 0.0)
    journal = Journal(tmp_path / "journal.jsonl")
    if error:
        journal.write("failed", error=error, text="x")
    with pytest.raises(RunError) as caught:
        watching.watch(tmp_path / "journal.jsonl", 0, lambda: how, lambda _: None)
    assert type(caught.value) is kind


def test_a_simulated_run_leaves_its_last_word_in_the_journal(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt(), RunError("x"), ValueError("x"), lock.GoingOnError("x")):
        journal = Journal(tmp_path / "journal.jsonl")
        with pytest.raises(type(error)), journal.ending():
            raise error
    failed = [e["error"] for e in journal.past("failed")]
    assert failed == ["KeyboardInterrupt", "RunError", "ValueError"]


# ---- for whom a run waits ----------------------------------------------------------------------


def waits(console: Console) -> str:
    began = time.time() - 75
    events: list[dict[str, Any]] = [
        {"event": "training", "method": "fedavg", "seed": 0, "round": 0, "rounds": 3},
        {"event": "waiting-for", "sites": ["town", "a\x1bb"], "seconds": 5.0, "time": began + 5},
    ]
    with Display(console=console) as display:
        for event in events:
            display(event)
        if console.is_terminal:
            console.print(display._picture())  # as it is at this moment
        shown = {"event": "round", "method": "fedavg", "seed": 0, "round": 1, "seconds": 1.0}
        display(shown)
        if console.is_terminal:
            console.print("then", display._picture())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_says_for_whom_the_run_waits() -> None:
    text = waits(Console(file=io.StringIO(), width=100))
    assert "  waiting for town, a b since 0:05\n" in text


def test_on_a_terminal_the_time_that_a_run_waits_goes_on() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    text, _, then = waits(console).partition("then")
    assert "waiting for town, a b since 1:1" in text
    assert "waiting for" not in then


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", ["300", "-1", "nan", "x", ""])
def test_more_than_all_labels_cannot_be_wrong(
    domains: list[Node], tmp_path: Path, percent: str
) -> None:
    root = Path(str(domains[0]["data"])).parent
    words = ["run", "fedavg", "--simulate", root, "--target", "town", "--dir", tmp_path / "runs"]
    done = fedda(*words, "--poison", f"anna={percent}", "--rounds", "1")
    assert done.exit_code == 1
    assert f"--poison 'anna={percent}' is not NAME=PERCENT" in done.stderr


# ---- real processes: a simulated run -----------------------------------------------------------


@pytest.mark.slow
def test_a_simulated_run_is_watched_and_ended_from_another_terminal(
    domains: list[Node], tmp_path: Path
) -> None:
    def command(name: str, *words: Any) -> Process:
        log = tmp_path / f"{name}.log"
        return Process(name, [*PROGRAM, *map(str, words)], log, {**os.environ})

    root = Path(str(domains[0]["data"])).parent
    folder = tmp_path / "runs" / "long"
    words = ["fedavg", "--simulate", root, "--target", "town", "--dir", folder.parent]
    words += ["--name", "long", "-c", "model.name=mlp", "-c", "model.sizes=8"]
    run = command("run", "run", *words, "--rounds", "100000")
    try:
        run.wait_for("round 1/", PATIENCE)
        left = command("left", "attach", "--dir", folder.parent)
        left.wait_for("round 1/", PATIENCE)
        left.popen.send_signal(signal.SIGINT)
        assert left.popen.wait(PATIENCE) == 130
        assert f"The run goes on. Watch it again: fedda attach {folder}" in left.text()
        watcher = command("watcher", "attach", folder)
        watcher.wait_for("round 1/", PATIENCE)
        assert run.alive
        stopped = command("stop", "stop", folder)
        assert stopped.popen.wait(PATIENCE) == 0, stopped.text()
        assert lock.holder(folder) is None
        assert f"fedda run --resume {folder}" in stopped.text()
        assert run.popen.wait(PATIENCE) == 130
        assert watcher.popen.wait(PATIENCE) == 130, watcher.text()

        run = command("again", "run", "--resume", folder)
        run.wait_for("going on after round", PATIENCE)
        watcher = command("mourner", "attach", folder)
        watcher.wait_for("going on after round", PATIENCE)
        run.popen.kill()
        assert watcher.popen.wait(PATIENCE) == 1
        assert f"(process {run.popen.pid}) has ended without a word" in watcher.text()
        assert f"fedda run --resume {folder}" in watcher.text()
    finally:
        run.stop()


# ---- real processes: a run on a server ---------------------------------------------------------


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("attach")
    with Federation(folder / "hub", acting=True) as made:
        yield made
    assert processes_with(str(folder)) == []


@pytest.fixture
def hub(federation: Federation) -> Iterator[Federation]:
    """Give the federation, and restore its sites after each test."""
    yield federation
    federation.mend()


def begun(hub: Federation, name: str) -> Operator:
    """Start a run that waits in its second round until the site bert is told to go on."""
    settings = LIVE | {"rounds": 2}
    changes = (part for k, v in settings.items() for part in ("-c", f"{k}={v}"))
    hub.act("bert", {"2": ["hold", 0]})
    words = ["run", "fedavg", "--server", hub.home, "--dir", hub.runs, "--name", name]
    operator = Operator(hub, [*words, *changes])
    operator.wait_for("round 1/2", PATIENCE)
    return operator


@pytest.mark.slow
def test_a_run_whose_operator_was_killed_is_watched_to_its_end(hub: Federation) -> None:
    operator = begun(hub, "left")
    operator.popen.kill()
    again = Operator(hub, ["attach", "--dir", hub.runs])
    again.wait_for("round 1/2", PATIENCE)
    hub.act("bert", {})
    assert again.popen.wait(PATIENCE) == 0, again.text()
    assert "round 2/2" in again.text()
    assert "picture: " in again.text()
    assert (hub.runs / "left" / "results.json").is_file()


@pytest.mark.slow
def test_a_run_on_a_server_is_ended_and_can_be_resumed_at_once(hub: Federation) -> None:
    operator = begun(hub, "ended")
    stop = Operator(hub, ["stop", hub.runs / "ended"])
    assert stop.popen.wait(PATIENCE) == 0, stop.text()
    assert f"fedda run --resume {hub.runs / 'ended'}" in stop.text()
    assert operator.popen.wait(PATIENCE) == 130, operator.text()
    hub.act("bert", {})
    again = Operator(hub, ["run", "--resume", hub.runs / "ended"])
    assert again.popen.wait(PATIENCE) == 0, again.text()
    assert "going on after round 1 of 2" in again.text()


@pytest.mark.slow
def test_a_servers_program_that_was_killed_is_noticed_and_its_run_ended(hub: Federation) -> None:
    operator = begun(hub, "killed")
    program = lock.holder(hub.runs / "killed")
    assert program is not None
    run = watching.Submission.read(hub.runs / "killed")
    assert run is not None and not hub.status(run.run).ended
    os.kill(program.pid, signal.SIGKILL)
    assert operator.popen.wait(PATIENCE) == 1
    text = operator.text()
    assert f"error: The program that executed the run (process {program.pid})" in text
    assert f"fedda run --resume {hub.runs / 'killed'}" in text
    assert hub.status(run.run).sub_status == "stopped"  # not "failed", as a minute later
    hub.act("bert", {})
    again = Operator(hub, ["run", "--resume", hub.runs / "killed"])
    assert again.popen.wait(PATIENCE) == 0, again.text()
