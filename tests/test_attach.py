"""A run that goes on is watched, ended and gone on with by other commands than its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from fedda.cli import app, launch, watching
from fedda.errors import RunError
from fedda.library import beginning
from fedda.ops import lock
from fedda.ops.federation import PROGRAM
from fedda.ops.spawn import Process
from fedda.results import progress
from server.journal import Journal
from tests.federation import LIVE, Federation, Operator
from tests.local_grid import Node
from tests.patience import PATIENCE, wait_until
from tests.processes import wait_for_act

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
        wait_until(lambda: not found.alive, "a killed process still counts as alive")
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
    (folder / beginning.LAUNCH).write_text(json.dumps(started))
    monkeypatch.setattr(launch, "on_server", lambda *_: lock.alone(folder).__enter__())
    monkeypatch.setattr(
        "fedda.library.simulated.execute", lambda *_, **__: lock.alone(folder).__enter__()
    )
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
        (tmp_path / "file").touch()
        assert "it is a file" in fedda(command, tmp_path / "file").stderr
    (tmp_path / "r" / "kd3a-0").mkdir(parents=True)
    (tmp_path / "r" / "kd3a-0" / "checkpoint.json").touch()
    assert "--resume" not in watching.resume_hint(tmp_path / "r")  # it could not be resumed
    (tmp_path / "r" / "launch.json").touch()
    assert "--resume" in watching.resume_hint(tmp_path / "r")
    none = fedda("run", "--resume", tmp_path).stderr
    assert "it has no launch.json" in none and "fedda runs --dir" in none and "Errno" not in none
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

        def unreachable() -> str:
            raise RunError("No server answers at 127.0.0.1:9.")

        with pytest.raises(watching.DiedError, match=r"Its server is gone, too: No server answers"):
            watching.watch(tmp_path / "journal.jsonl", 0, unreachable, lambda _: None)


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


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
def test_a_run_that_ended_with_its_server_was_not_stopped_by_a_person(
    tmp_path: Path, error: str
) -> None:
    """Ctrl-C at the server: it answers no more, and Flower interrupts the run's program."""
    Journal(tmp_path / "journal.jsonl").write("failed", error=error, text="x")
    silent = Mock(side_effect=RunError("no server answers"))
    with pytest.raises(RunError, match="server was stopped; start it first") as caught:
        watching.watch(tmp_path / "journal.jsonl", 0, silent, print)
    assert type(caught.value) is RunError


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


def command(folder: Path, name: str, *words: Any) -> Process:
    """Start a command of fedda, with its output in a file of the folder."""
    log = folder / f"{name}.log"
    return Process(name, [*PROGRAM, *map(str, words)], log, {**os.environ})


def simulated(domains: list[Node], folder: Path, *words: Any) -> Process:
    """Start a simulated run that would take hours, and wait until its first round is over."""
    root = Path(str(domains[0]["data"])).parent
    line = ["fedavg", "--simulate", root, "--target", "town", "--dir", folder.parent]
    line += ["--name", folder.name, "-c", "model.name=mlp", "-c", "model.hidden=8"]
    run = command(folder.parent, "run", "run", *line, "--rounds", "100000", *words)
    run.wait_for("round 1/", PATIENCE)
    return run


@pytest.mark.slow
def test_a_simulated_run_is_watched_and_ended_from_another_terminal(
    domains: list[Node], tmp_path: Path
) -> None:
    folder = tmp_path / "long"
    run = simulated(domains, folder)
    try:
        left = command(tmp_path, "left", "attach", "--dir", tmp_path)
        left.wait_for("round 1/", PATIENCE)
        left.popen.send_signal(signal.SIGINT)
        assert left.popen.wait(PATIENCE) == 130
        assert f"The run goes on. Watch it again: fedda attach {folder}" in left.text()
        watcher = command(tmp_path, "watcher", "attach", folder)
        watcher.wait_for("round 1/", PATIENCE)
        assert run.alive
        stopped = command(tmp_path, "stop", "stop", folder)
        assert stopped.popen.wait(PATIENCE) == 0, stopped.text()
        assert lock.holder(folder) is None
        assert f"fedda run --resume {folder}" in stopped.text()
        assert run.popen.wait(PATIENCE) == 130
        assert watcher.popen.wait(PATIENCE) == 130, watcher.text()
    finally:
        run.stop()


@pytest.mark.nightly("fedda/cli/watching.py", "fedda/cli/run.py")
def test_ctrl_c_ends_a_simulation_on_ray(domains: list[Node], tmp_path: Path) -> None:
    """Flower would wait for the run's thread, and that for sites which Ray has ended already."""
    run = simulated(domains, tmp_path / "long", "--engine", "ray")
    try:
        run.popen.send_signal(signal.SIGINT)
        assert run.popen.wait(PATIENCE) == 130, run.text()
        assert f"fedda run --resume {tmp_path / 'long'}" in run.text()
    finally:
        run.stop()


# ---- real processes: a run on a server ---------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_a_server_outlives_its_programs_and_is_ended_from_another_terminal(
    hub: Federation, tmp_path: Path
) -> None:
    """In both of its parts the run waits for another site."""
    folder = tmp_path / "r"
    settings = LIVE | {"wait.train": 3600.0}
    changes = (part for k, v in settings.items() for part in ("-c", f"{k}={v}"))
    words = ["run", "fedavg", "--server", hub.home, "--dir", folder.parent, "--name", "r"]
    hub.act("bert", {"2": ["hold", 0]})
    operator = Operator(hub, [*words, *changes])
    operator.wait_for("round 1/3", PATIENCE)
    program = lock.holder(folder)
    run = watching.Submission.read(folder)
    assert program is not None and run is not None and not hub.status(run.run).ended

    os.kill(program.pid, signal.SIGKILL)
    assert operator.popen.wait(PATIENCE) == 1
    assert f"the run (process {program.pid}) has ended without a word" in operator.text()
    assert f"fedda run --resume {folder}" in operator.text()
    assert hub.status(run.run).sub_status == "stopped"  # the server itself takes a minute

    hub.act("bert", {})
    hub.act("carl", {"3": ["hold", 0]})
    operator = Operator(hub, ["run", "--resume", folder])
    operator.wait_for("going on after round 1 of 3", PATIENCE)
    operator.popen.kill()
    watcher = Operator(hub, ["attach", "--dir", folder.parent])
    watcher.wait_for("going on after round 1 of 3", PATIENCE)
    wait_for_act(hub, folder, "carl", "hold in round 3")
    stop = Operator(hub, ["stop", folder])
    assert stop.popen.wait(PATIENCE) == 0, stop.text()
    assert f"fedda run --resume {folder}" in stop.text()
    assert watcher.popen.wait(PATIENCE) == 130, watcher.text()


@pytest.mark.nightly("fedda/cli/watching.py", "fedda/cli/run.py")
def test_sigterm_ends_a_run_that_ignores_ctrl_c(domains: list[Node], tmp_path: Path) -> None:
    """As under nohup, or as a service that was started in the background of a script."""
    root = Path(str(domains[0]["data"])).parent
    line = [*PROGRAM, "run", "fedavg", "--simulate", root, "--target", "town", "--dir", tmp_path]
    line += ["-c", "model.name=mlp", "-c", "model.hidden=8", "--rounds", "100000"]
    ignoring = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", *map(str, line)]
    run = Process("run", ignoring, tmp_path / "run.log", {**os.environ})
    try:
        run.wait_for("round 1/", PATIENCE)
        run.popen.send_signal(signal.SIGINT)
        run.popen.send_signal(signal.SIGHUP)
        so_far = run.text().count("round ")
        wait_until(lambda: run.text().count("round ") > so_far + 2, "it does not go on")
        assert run.alive
        run.popen.send_signal(signal.SIGTERM)
        assert run.popen.wait(PATIENCE) == 130
    finally:
        run.stop()
    assert f"stopped\ngo on with: fedda run --resume {tmp_path / 'fedavg'}" in run.text()
