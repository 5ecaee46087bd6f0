"""Programs that tests start begin as forks of a process that has imported torch and Flower once.

An import of them takes three seconds of a processor. This is multiprocessing's own fork server.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from fedda import flower
from fedda.ops.spawn import Process, die_with_parent

MODULES = ["clients.app", "clients.node.resident", "fedda.cli", *flower.OF_THE_SERVER, "server.app"]
MODULES += ["torch._dynamo", "matplotlib.figure"]  # which the first optimizer, and a report, import
OF = "fork-of-"  # the name of a fork, before the number of the process that started it
# Programs that a SuperLink starts by their names, and where each begins.
SCRIPTS = {
    "flower-superexec": ("flwr.supercore.cli", "flower_superexec"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
}
MODULES += [module for module, _ in SCRIPTS.values()]
CONTEXT = multiprocessing.get_context("forkserver")


class Child:
    """A fork that runs `python -m module`, with the members of `subprocess.Popen` that are used."""

    def __init__(self, module: str, words: Sequence[str], env: Mapping[str, str], log: str) -> None:
        job = module, [*words], dict(env), os.getcwd(), log, os.getpid()
        self._process: BaseProcess = CONTEXT.Process(target=_run, args=job, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Popen(subprocess.Popen[Any]):
    """Stands in a SuperLink for `subprocess.Popen`: its own programs become forks as well."""

    def __new__(cls, args: Sequence[str], **options: Any) -> Any:
        if args[0] not in SCRIPTS:
            return super().__new__(cls)
        return Child(args[0], args[1:], os.environ, f"/proc/{os.getpid()}/fd/1")


def _run(
    module: str, words: list[str], env: dict[str, str], folder: str, log: str, starter: int
) -> None:
    os.setsid()
    Path("/proc/self/comm").write_text(f"{OF}{starter}")  # to `processes` it is who started this
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    with open(os.devnull, "rb") as nothing, open(log, "ab") as out:
        for file, place in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(file.fileno(), place)
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    places = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [folder, *places, *(p for p in sys.path if p not in (folder, *places))]
    sys.argv = [module, *words]
    subprocess.Popen = Popen  # type: ignore[misc]
    # It would begin a fork server of its own, though it knows this one's address.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    if module in SCRIPTS:
        for name in [name for name in sys.modules if name.partition(".")[0] == "server"]:
            del sys.modules[name]  # a run brings its own
        place, name = SCRIPTS[module]
        sys.exit(getattr(import_module(place), name)())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def begin(self: Process, out: IO[bytes]) -> Any:
    """Stand in for `Process.begin`: a fork, if it is a module of this Python."""
    if self.command[:2] != [sys.executable, "-m"] or self.env.get("FEDDA_COLD"):
        return COLD(self, out)
    return Child(self.command[2], self.command[3:], self.env, out.name)


COLD = Process.begin
CONTEXT.set_forkserver_preload(MODULES)
