"""The warm process: forks that behave as programs do, and end with whoever asked for them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedda.ops import federation, nest, warm
from fedda.ops.spawn import Process
from fedda.ops.warm import SOCKET, Child, Warm, given, stand_in
from tests.patience import PATIENCE, wait_until
from tests.processes import is_alive

pytestmark = pytest.mark.slow

TELLS = """
import json, os, sys
print(json.dumps([__name__, sys.argv, os.environ.get("GIVEN"), os.getcwd(), os.getsid(0), "json" in
    sys.modules, "colorsys" in sys.modules]))
sys.stdout.flush()
sys.exit({code})
"""


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    log = tmp_path_factory.mktemp("warm") / "log"
    with Warm(["json", "colorsys"], log) as made:
        yield made
    assert log.read_text() == ""


def program(folder: Path, text: str, name: str = "told") -> Path:
    path = folder / f"{name}.py"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o700)
    return path


def begin(parent: Warm, folder: Path, text: str, *arguments: str) -> tuple[Child, Path]:
    """Fork `python -m told`, with its output in a file."""
    program(folder, text)
    env, out = {"PYTHONPATH": str(folder), "GIVEN": "ä", "PATH": os.environ["PATH"]}, folder / "out"
    with out.open("wb") as file:
        return Child(parent.address, "told", arguments, env, file), out


@pytest.mark.parametrize("code", ["0", "3", "None", "'why'"])
def test_a_fork_is_a_program_of_its_own(parent: Warm, tmp_path: Path, code: str) -> None:
    child, out = begin(parent, tmp_path, TELLS.format(code=code), "a", "b c")
    assert child.wait(PATIENCE) == child.poll() == {"0": 0, "3": 3, "None": 0, "'why'": 1}[code]
    told, *more = out.read_text().splitlines()
    assert more == (["why"] if code == "'why'" else [])
    name, argv, env, cwd, session, *imported = json.loads(told)
    assert (name, argv[1:], env, cwd) == ("__main__", ["a", "b c"], "ä", os.getcwd())
    assert session == child.pid != os.getsid(0)
    assert imported == [True, True], "nothing was imported before"
    assert "GIVEN" not in os.environ


def test_a_fork_says_what_went_wrong_and_waits_for_its_threads(
    parent: Warm, tmp_path: Path
) -> None:
    late = "import atexit, threading, time\natexit.register(print, 'last')\n"
    late += "threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()\n1 / 0"
    child, out = begin(parent, tmp_path, late)
    assert child.wait(PATIENCE) == 1
    assert "ZeroDivisionError" in out.read_text() and out.read_text().endswith("late\nlast\n")


def test_a_fork_gets_signals(parent: Warm, tmp_path: Path) -> None:
    child, _ = begin(parent, tmp_path, "import time\ntime.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    child.terminate()
    assert child.wait(PATIENCE) == -signal.SIGTERM
    child.kill()  # it is gone, and its number may be another process's


def test_a_fork_ends_with_the_process_that_asked_for_it(parent: Warm, tmp_path: Path) -> None:
    """Also if that process is killed, and even if the fork does not end when it is asked to."""
    program(tmp_path, "import signal, time\nprint('up', flush=True)\ntime.sleep(600)")
    asks = "import sys, time\nfrom fedda.ops.warm import Child\n"
    asks += "child = Child(sys.argv[1], 'told', [], {'PYTHONPATH': sys.argv[2]}, open(sys.argv[3], "
    asks += "'wb'))\nprint(child.pid, flush=True)\ntime.sleep(600)"
    words = [sys.executable, "-c", asks, parent.address, str(tmp_path), str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        fork = int(asking.stdout.readline())
        wait_until(lambda: (tmp_path / "out").read_text() == "up\n", "it does not begin")
        asking.kill()
    wait_until(lambda: not is_alive(fork), "it goes on")


def test_all_forks_end_with_the_warm_process(tmp_path: Path) -> None:
    """Also if it is killed: then nobody can say with what exit code, and they are asked to end."""
    for how in ("end", "kill"):
        with Warm([]) as parent:
            child, _ = begin(parent, tmp_path, "import time\ntime.sleep(600)")
            if how == "kill":
                os.kill(parent.pid, signal.SIGKILL)
                assert child.wait(PATIENCE) == -signal.SIGKILL
        assert child.wait(PATIENCE) < 0
        wait_until(lambda child=child: not is_alive(child.pid), f"{how}: it goes on")
        with pytest.raises(OSError), (tmp_path / "out").open("wb") as out:
            Child(parent.address, "told", [], {}, out)


def test_what_is_no_job_harms_nobody(parent: Warm, tmp_path: Path) -> None:
    import socket

    for data in (b"", b"\0\0\0", b"\0\0\0\5hello"):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(parent.address)
            link.sendall(data)
    child, _ = begin(parent, tmp_path, "")
    assert child.wait(PATIENCE) == 0


@pytest.mark.parametrize("there", [True, False])
def test_a_stand_in_is_the_program_with_or_without_a_warm_process(
    parent: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path, TELLS.format(code=5)).rename(tmp_path / "tells")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("GIVEN", "ä")
    stand_in(tmp_path / "bin", parent.address if there else str(tmp_path / "nobody"), "tells")
    words = [str(tmp_path / "bin" / "tells"), "a", "it's b"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    name, argv, env, cwd, _, _, imported = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (5, "")
    assert (name, argv, env) == ("__main__", [str(tmp_path / "tells"), "a", "it's b"], "ä")
    assert (cwd, imported) == (os.getcwd(), there)


def test_a_stand_in_that_is_killed_ends_its_program(
    parent: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    text = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    program(tmp_path, text).rename(tmp_path / "tells")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    stand_in(tmp_path / "bin", parent.address, "tells")
    with subprocess.Popen([tmp_path / "bin" / "tells"], stdout=subprocess.PIPE) as stands:
        assert stands.stdout is not None
        fork = int(stands.stdout.readline())
        assert fork != stands.pid
        stands.kill()
    wait_until(lambda: not is_alive(fork), "it goes on")


def test_a_warm_process_of_another_installation_is_not_used(parent: Warm) -> None:
    env = {SOCKET: parent.address}
    assert given(env) == parent.address
    assert given({}) is None
    whose = Path(parent.address).with_name(warm.WHOSE)
    mine = whose.read_text()
    whose.write_text(mine.replace("python", "snake"))
    try:
        assert given(env) is None
    finally:
        whose.write_text(mine)


def test_a_process_is_a_fork_where_that_can_be(parent: Warm, tmp_path: Path) -> None:
    text = "import sys\nprint('colorsys' in sys.modules)"
    path = program(tmp_path, text)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), SOCKET: parent.address}
    for words, forked in (
        ([sys.executable, "-m", "told"], True),
        ([sys.executable, str(path)], False),
    ):
        process = Process("told", words, tmp_path / "log", env)
        assert process.popen.wait(PATIENCE) == 0
        assert process.text() == f"{forked}\n"
        assert isinstance(process.popen, Child) == forked
    env[SOCKET] = str(tmp_path / "nobody")
    process = Process("told", [sys.executable, "-m", "told"], tmp_path / "log", env)
    assert process.popen.wait(PATIENCE) == 0
    assert process.text() == "False\n"


def test_a_run_imports_nothing_dear_that_is_not_warm() -> None:
    """Its own modules come with the run, so they are imported anew."""
    text = "import sys, importlib\n"
    text += f"for name in {warm.OF_A_RUN!r}: importlib.import_module(name)\n"
    text += "before = set(sys.modules)\nimport server.app\n"
    text += "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    theirs = set(done.stdout.split()) - set(sys.stdlib_module_names) - set(nest.OURS)
    assert theirs == set()


def test_the_programs_of_a_federation_find_all_imported(tmp_path: Path) -> None:
    """Else the warm process has ended, and all programs begin cold."""
    address = given(os.environ)
    assert address is not None, "the tests have no warm process"
    program(tmp_path, "import sys\nprint(*sys.modules)")
    with (tmp_path / "out").open("wb") as out:
        child = Child(address, "told", [], {"PYTHONPATH": str(tmp_path)}, out)
    assert child.wait(PATIENCE) == 0
    assert set(federation.OF_ALL) <= set((tmp_path / "out").read_text().split())


def test_the_program_that_others_wait_for_is_seen_to_end(parent: Warm, tmp_path: Path) -> None:
    child, _ = begin(parent, tmp_path, "")
    wait_until(lambda: not is_alive(child.pid), "it goes on")
    time.sleep(0.05)
    assert child.poll() == 0
