"""Programs as child processes: started with a log, ended with all that they started."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedda.errors import RunError

LOOPBACK = "127.0.0.1"
EXCHANGE_AT = "FEDDA_EXCHANGE"  # and where an exchange of gradients is to listen: host:port
SERVER_PID = "FEDDA_SERVER_PID"  # tells the programs that a SuperLink starts whom they serve


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def watch_parent(pid: int, grace: float = 10.0, *, ask: bool = True) -> None:
    """End this process when the process pid is gone: politely first, then by force.

    Args:
        pid: whom to watch, this process's parent or any other.
        grace: seconds between the two.
        ask: send SIGTERM at once; not where another watcher asks already.
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

    # A parent that nobody waits for stays visible as a zombie; a change of parent does not lie.
    child = os.getppid() == pid
    threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel end this process with its parent, also after it becomes another program."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


class Process:
    """One program in a session of its own, with its output in a file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self.command = list(command)
        self.env = dict(env)
        self.start()

    def start(self) -> None:
        """Start it (again); the log goes on."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._seen = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
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
        """What it has written since it was last started."""
        with self.log.open("rb") as file:
            file.seek(self._seen)
            return file.read().decode(errors="replace")

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until its output contains text.

        Raises:
            RunError: it ended or stayed silent; with the last lines of its log.
        """
        ends = time.monotonic() + seconds
        while text not in self.text():
            if not self.alive:
                raise RunError(
                    f"{self.name} ended with exit code {self.popen.returncode}; the end of "
                    f"{self.log}:\n{self.tail()}"
                )
            if time.monotonic() > ends:
                raise RunError(
                    f"{self.name} did not get as far as {text!r} in {seconds:.0f} s; the end of "
                    f"{self.log}:\n{self.tail()}"
                )
            time.sleep(0.1)

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def stop(self, seconds: float = 15.0) -> int | None:
        """Ask it to end, wait, and kill its whole session if it does not."""
        if self.alive:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        return self.popen.returncode
