"""A warm process: it has imported what programs need, and forks one whenever it is asked to.

A program of fedda computes for about three seconds before its first line, nearly all of it to
import torch and Flower. The fork of a process that did this once begins within milliseconds, and
shares the memory of what was imported.

    with Warm(["torch", "fedda.cli"]) as warm:
        child = warm.fork("fedda.cli", ["client", "--role", "source"], env, log)
        child.wait()

A connection is a fork's life line: if it is closed, also because the process that asked was killed,
the fork is asked to end, and killed if it does not. The warm process itself ends, with all its
forks, when the process that began it does. Only on Linux; elsewhere `available` is false.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from . import forked
from .forked import HEAD, NUMBER, ask, number

SOCKET = "FEDDA_WARM"  # environment variable: the socket of a warm process that may be used
WHOSE = "whose"  # a file beside the socket
PARENT_DEATH_SIGNAL, NAME = 1, 15  # of prctl
GRACE_S = 10.0  # from asking a fork to end until it is killed
ASKING_S = 10.0  # for a job to arrive
# What a run's program imports of others; its own modules come with the run (`forget`).
OF_A_RUN = (
    "PIL.Image",
    "cryptography.x509",
    "flwr.superlink.cli",
    "flwr.superlink.grid.http_grid",
    "grpc",
    "pydantic",
    "safetensors.numpy",
    "safetensors.torch",
    "torch",
)
OURS = ("fedda", "clients", "strategies", "server")


def available() -> bool:
    """Whether this system can fork such processes and watch them."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def given(env: Mapping[str, str]) -> str | None:
    """The address of the warm process that an environment names, if it is one of this program.

    Another installation, or a checkout elsewhere, needs other modules than it has imported.
    """
    address = env.get(SOCKET)
    if not address:
        return None
    try:
        same = Path(address).with_name(WHOSE).read_text() == _mine()
    except OSError:  # it has ended
        return None
    return address if same else None


def _mine() -> str:
    return f"{sys.executable}\n{__file__}\n"


class Warm:
    """A warm process, from the side that asks for forks."""

    def __init__(self, modules: Sequence[str], log: Path | None = None, **env: str) -> None:
        """Begin one; it imports while this process goes on.

        Args:
            modules: what to import.
            log: a file for what it has to say, which is only what goes wrong.
            env: further environment variables.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="fedda-warm-"))  # for this user alone
        self.address = str(self._folder / "socket")
        (self._folder / WHOSE).write_text(_mine())
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
            listener.bind(self.address)
            listener.listen(64)
            out = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,  # it ends when this closes
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """End it, and all its forks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def stand_in(folder: Path, address: str, program: str) -> bool:
    """Write an executable that has a fork run a script of Python, under the script's own name.

    With the folder first on PATH, others start the fork when they start the script by its name.
    Returns whether the folder's system lets programs in it be executed.

    Args:
        folder: where to write it.
        address: of a warm process; where none answers, the script itself is run.
        program: the script's name; it is on PATH.
    """
    places = os.environ.get("PATH", "").split(os.pathsep)
    real = shutil.which(program, path=os.pathsep.join(p for p in places if p != str(folder)))
    assert real is not None
    words = [sys.executable, "-I", "-S", forked.__file__, address, real]
    executable = folder / program
    executable.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, words))} "$@"\n')
    executable.chmod(0o700)
    return os.access(executable, os.X_OK)


class Child:
    """A fork that runs a program, with the members of `subprocess.Popen` that are used here."""

    def __init__(
        self,
        address: str,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        out: IO[bytes],
    ) -> None:
        """Have a warm process fork `python -m module arguments`, as leader of a new session.

        Raises:
            OSError: no warm process answers at this address.
        """
        job = {"module": module, "arguments": [*arguments], "env": dict(env), "cwd": os.getcwd()}
        with open(os.devnull, "rb") as nothing:
            files = (nothing.fileno(), out.fileno(), out.fileno())
            self._link = ask(address, job, files)
        self.returncode: int | None = None
        self.pid = number(self._link)

    def poll(self) -> int | None:
        """Its exit code if it has ended, negative after a signal; else None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end -> its exit code.

        Raises:
            TimeoutExpired: it has not ended in so many seconds.
        """
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                self.returncode = number(self._link)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            except OSError:  # the warm process was killed
                self.returncode = -signal.SIGKILL
            self._link.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


# ---- the warm process itself ---------------------------------------------------------------------


@dataclass
class Fork:
    """A fork that runs, and the connection that asked for it."""

    pid: int
    link: socket.socket
    watch: int  # a file descriptor that is readable once it has ended
    kill_at: float = float("inf")


@dataclass
class Nest:
    """The warm process's forks."""

    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    forks: list[Fork] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> dict[str, Any] | None:
        """Fork whenever it is asked -> in a fork its job; in the warm process None, at its end."""
        self.selector.register(listener, selectors.EVENT_READ, "listener")
        self.selector.register(sys.stdin, selectors.EVENT_READ, "stdin")
        while True:
            soonest = min((fork.kill_at for fork in self.forks), default=float("inf"))
            wait = None if soonest == float("inf") else max(0.0, soonest - time.monotonic())
            for key, _ in self.selector.select(wait):
                if key.data == "listener":
                    if (job := self._accept(listener)) is not None:
                        return job
                elif key.data == "stdin":
                    self._end()
                    return None
                elif key.fd == key.data.watch:
                    self._ended(key.data)
                elif key.data in self.forks:  # nothing is sent here, so this is the end
                    self.selector.unregister(key.data.link)
                    self._ask_to_end(key.data)
            for fork in [fork for fork in self.forks if fork.kill_at <= time.monotonic()]:
                fork.kill_at = float("inf")
                _signal(fork.pid, signal.SIGKILL)

    def _accept(self, listener: socket.socket) -> dict[str, Any] | None:
        link, _ = listener.accept()
        try:
            link.settimeout(ASKING_S)
            job, files = _receive(link)
        except (OSError, ValueError):
            link.close()
            return None
        me, pid = os.getpid(), os.fork()
        if not pid:
            for key in [*self.selector.get_map().values()]:
                if isinstance(key.data, Fork):
                    os.close(key.fd)
            self.selector.close()
            listener.close()
            link.close()
            os.setsid()
            _prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
            if os.getppid() != me:  # it was killed before
                os._exit(1)
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            return job
        for file in files:
            os.close(file)
        fork = Fork(pid, link, os.pidfd_open(pid))
        self.forks.append(fork)
        self.selector.register(fork.watch, selectors.EVENT_READ, fork)
        self.selector.register(fork.link, selectors.EVENT_READ, fork)
        self._tell(fork, pid)
        return None

    def _ended(self, fork: Fork) -> None:
        _, status = os.waitpid(fork.pid, 0)
        self.forks.remove(fork)
        self.selector.unregister(fork.watch)
        os.close(fork.watch)
        self._tell(fork, os.waitstatus_to_exitcode(status))
        with contextlib.suppress(KeyError):
            self.selector.unregister(fork.link)
        fork.link.close()

    def _ask_to_end(self, fork: Fork) -> None:
        _signal(fork.pid, signal.SIGTERM)
        fork.kill_at = time.monotonic() + GRACE_S

    def _end(self) -> None:
        """Ask all forks to end, and wait for it."""
        self.selector.unregister(sys.stdin)
        for fork in self.forks:
            self._ask_to_end(fork)
        ends = time.monotonic() + GRACE_S
        while self.forks and time.monotonic() < ends:
            for key, _ in self.selector.select(0.1):
                if isinstance(key.data, Fork) and key.fd == key.data.watch:
                    self._ended(key.data)
        for fork in self.forks:
            _signal(fork.pid, signal.SIGKILL)

    @staticmethod
    def _tell(fork: Fork, value: int) -> None:
        with contextlib.suppress(OSError):  # nobody waits for it any more
            fork.link.sendall(NUMBER.pack(value))


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a job and the three files that come with it.

    Raises:
        OSError: the other side hung up, or takes too long.
        ValueError: it sent something else.
    """
    head, files, _, _ = socket.recv_fds(link, HEAD.size, 3)
    try:
        if len(head) < HEAD.size or len(files) != 3:
            raise ValueError("this is no job")
        size, body = HEAD.unpack(head)[0], b""
        while len(body) < size:
            if not (piece := link.recv(size - len(body))):
                raise ConnectionError(forked.TRUNCATED)
            body += piece
        return loads(body), files
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def forget() -> None:
    """Forget our own modules, as those of a run come with it, and may be of another version."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "fedda.halves"]


def run(job: Mapping[str, Any]) -> None:
    """Do what Python does for a script, or for `-m module`, in this fork."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    script = Path(job.get("path", ""))
    first = job["cwd"] if "module" in job else str(script.parent)
    places = [first, *filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*places, *(place for place in sys.path[1:] if place not in places)]
    if "module" in job:
        name = job["module"]
        sys.argv = [name, *job["arguments"]]
        rename(" ".join(sys.argv[:2]))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        forget()
        sys.argv = [str(script), *job["arguments"]]
        rename(script.name)
        runpy.run_path(str(script), run_name="__main__")


def rename(name: str) -> None:
    """Let `ps -o comm` and `top` call this process by its program's name."""
    _prctl(NAME, name.removeprefix("fedda.").encode())  # the system keeps 15 letters


def leave(job: Mapping[str, Any]) -> NoReturn:
    """Run a fork's program and end the fork, without freeing one by one all that was imported.

    To free it would take longer than most programs, and copy the memory that the forks share.
    """
    code: object = 0
    try:
        run(job)
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # wait for its threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


def main() -> None:
    """Import, then fork whenever it is asked; a fork leaves here for its program."""
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        for module in sys.argv[2:]:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # a collection in a fork would copy all memory that it looks at
        nest = Nest()
        job = nest.serve(listener)
    if job is None:
        os._exit(0)  # see `leave`
    leave(job)


if __name__ == "__main__":
    main()
