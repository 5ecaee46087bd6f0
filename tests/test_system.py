"""A machine without what only Linux and macOS have: fedda imports and simulates there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedda.ops import system

# A Python of Linux without the modules and functions that Windows does not have. Instead of
# msvcrt, the lock of a region from the file's position on that POSIX has, which is as strict.
WITHOUT = """
import os, signal, sys, types
import multiprocessing.popen_spawn_posix, subprocess, torch  # these may use all that there is
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
region = lambda file, kind, size: os.lockf(file, kind, size)
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=os.F_TLOCK, locking=region)
for name in ("sysconf", "sched_getaffinity", "getuid", "fork", "O_NOFOLLOW", "fchmod"):
    delattr(os, name)
for name in ("pthread_sigmask", "pthread_kill", "SIGHUP", "SIGUSR1", "SIGKILL"):
    delattr(signal, name)
"""
RUN = """
import numpy as np
import fedda

draw = np.random.default_rng(0)
x = draw.normal(size=(150, 4)).astype("float32")
y = (x[:, 0] > 0).astype(int)
data = {"a": (x[:50], y[:50]), "b": (x[50:100], y[50:100]), "c": (x[100:], None)}
found = fedda.simulate(data, "c", "fedavg", dir="made", rounds=1, preset="table", quiet=True)
print(len(found.model.predict(x[100:])))
"""
COMMAND = """
from fedda.cli import app

options = ["--simulate", "made/data", "--target", "c", "--preset", "table", "-c", "rounds=1"]
app(["run", "adabn", *options], standalone_mode=False)
"""


def python(code: str, folder: Path) -> str:
    """Run code without these modules -> what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(RUN, marks=pytest.mark.slow),
        pytest.param(RUN + COMMAND, marks=pytest.mark.nightly("fedda/ops", "fedda/cli")),
    ],
    ids=["library", "command"],
)
def test_a_simulation_needs_nothing_that_windows_lacks(tmp_path: Path, code: str) -> None:
    assert python(code, tmp_path).startswith("50\n")
    assert (tmp_path / "runs" / "adabn" / "report.html").is_file() == (code != RUN)


@pytest.mark.nightly("fedda/ops")
@pytest.mark.parametrize(
    "module", ["fedda.cli", "fedda.contrib.lab.comparing", "clients.node.resident"]
)
def test_a_command_can_be_imported_there(tmp_path: Path, module: str) -> None:
    assert python(f"import {module}; print('here')", tmp_path) == "here\n"


@pytest.mark.nightly("fedda/ops")
def test_a_lock_there_is_one_processs_and_leaves_the_position(tmp_path: Path) -> None:
    code = """
from fedda.ops import system
with open("log", "a+b") as file:
    file.write(b"line"); file.flush(); file.seek(2)
    assert system.lock(file.fileno()) and file.tell() == 2
    other = "import os; file = open('log', 'r+b'); file.seek(2**40); os.lockf(file.fileno(), 2, 1)"
    print(subprocess.run([sys.executable, "-c", other], stderr=-3).returncode)
"""
    assert python(code, tmp_path) == "1\n"


def test_a_lock_here_is_given_once(tmp_path: Path) -> None:
    with (tmp_path / "log").open("a+b") as first, (tmp_path / "log").open("rb") as second:
        assert system.lock(first.fileno(), shared=True)
        assert system.lock(second.fileno(), shared=True)
        assert not system.lock(second.fileno())
        first.close()
        assert system.lock(second.fileno(), wait=True)


def test_a_machine_has_cores_memory_and_connections() -> None:
    assert system.cores() >= 1 and system.memory() > 2**28 and system.connections(3) == 3
