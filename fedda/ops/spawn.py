"""Programs as child processes: each has a log, and ends with all processes that it started."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import IO, Self

from fedda.errors import RunError

LOOPBACK = "127.0.0.1"
# Environment variables that a SuperLink sets for the programs it starts.
LANES = "FEDDA_LANES"  # the folder of the socket files to which sites are passed on
WORK = ".work"  # how a file there ends that says what sites work on
SERVER_PID = "FEDDA_SERVER_PID"  # the SuperLink's process
REGISTERED = "FEDDA_REGISTERED"  # the file of the registered sites, by node


class Reserved:
    """A port that the system gives to nobody else until `close`.

    It is bound and not listened on, so a program of this user that shares it, as `fedda superlink
    --reserved` does, can listen there, and again after a restart; until then calls are refused.

    Args:
        host: the address at which the program will listen; empty: all of this machine's. A port
            that is free at one address may be another's connection at the next.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, 0))
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def quiet_port() -> int:
    """A port for a program that shares none and cannot choose: the system gives it to no other."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")  # what programs get that ask for any
    first = int(given.read_text().split()[0]) if given.exists() else 32768
    draw = Random()
    while True:
        port = draw.randrange(first // 2, first)
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port


def scripts_first(path: str | None) -> str:
    """A PATH on which this Python's scripts come first: flwr starts its helpers by bare names."""
    scripts = sysconfig.get_path("scripts")
    return os.pathsep.join([scripts, *(p for p in (path or "").split(os.pathsep) if p != scripts)])


def watch_parent(pid: int, grace: float = 10.0, *, ask: bool = True) -> None:
    """End this process once the process pid is gone: first by SIGTERM, then by force.

    Args:
        pid: the process to watch, this one's parent or any other.
        grace: seconds between the two.
        ask: send SIGTERM; False if somebody else sends it already.
    """

    def gone() -> bool:
        if child:
            return os.getppid() != pid
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def watch() -> None:
        while not gone():
            time.sleep(0.5)
        if ask:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    # A dead parent may stay visible as a zombie, so for a parent the change of parent counts.
    child = os.getppid() == pid
    threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with_parent() -> None:
    """Make the kernel end this process with its parent, also after it executes another program."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends, so that it can wait for them.

    Otherwise they may stay visible as zombies: in a container nobody else would wait for them.
    """
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1)


class Process:
    """One program in its own process session, with its output in a file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        """Start it."""
        self.name = name
        self.log = log
        self.command = list(command)
        self.env = dict(env)
        self.start()

    def start(self) -> None:
        """Start the program, or start it again; its output is appended to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self.popen = self.begin(out)

    def begin(self, out: IO[bytes]) -> subprocess.Popen[bytes]:
        """Begin the program, with its output to a file."""
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=self.env,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def text(self) -> str:
        """Its output since it was last started."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until its output contains text.

        Raises:
            RunError: it ended, or did not write the text in time; with the last lines of its log.
        """
        deadline = time.monotonic() + seconds
        while text not in self.text():
            if not self.alive:
                raise RunError(
                    f"{self.name} ended with exit code {self.popen.returncode}; the end of "
                    f"{self.log}:\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self.name} did not get as far as {text!r} in {seconds:.0f} s; the end of "
                    f"{self.log}:\n{self.tail()}"
                )
            time.sleep(0.1)

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def stop(self, seconds: float = 15.0) -> int | None:
        """Ask the program to end, wait, and kill what is left of its session -> exit status."""
        if self.alive:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        return self.popen.returncode
