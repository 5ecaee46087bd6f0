"""The warm process itself: it imports, and then forks a program whenever it is asked to.

    python -m fedda.ops.nest FILE_DESCRIPTOR MODULE ...

`warm` begins it, with the file descriptor of the socket on which it is asked; see there.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any, NoReturn

from .forked import HEAD, NUMBER, TRUNCATED

GRACE_S = 10.0  # from asking a fork to end until it is killed
ASKING_S = 10.0  # for a job to arrive
OURS = ("fedda", "clients", "strategies", "server")  # modules that come with a run
PARENT_DEATH_SIGNAL, NAME = 1, 15  # of prctl


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
                raise ConnectionError(TRUNCATED)
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
