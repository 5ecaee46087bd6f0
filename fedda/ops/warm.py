"""A warm process: it has imported what programs need, and forks one whenever it is asked to.

A program of fedda computes for about three seconds before its first line, nearly all of it to
import torch and Flower. The fork of a process that did this once begins within milliseconds, and
shares the memory of what was imported.

    with Warm(["torch", "fedda.cli"]) as warm:
        child = Child(warm.address, "fedda.cli", ["client", "--role", "source"], env, log)
        child.wait()

A connection is a fork's life line: if it is closed, also because the process that asked was killed,
the fork is asked to end, and killed if it does not. The warm process itself ends, with all its
forks, when the process that began it does. Only on Linux; elsewhere `available` is false.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fedda import flower

from . import forked
from .forked import ask, number

SOCKET = "FEDDA_WARM"  # environment variable: the socket of a warm process that may be used
WHOSE = "whose"  # a file beside the socket
NEST = f"{__package__}.nest"
ENDS_S = 15.0  # for a warm process to end, with its forks
# What a run's program imports of others; its own modules come with it (`nest`).
OF_A_RUN = (
    "PIL.Image",
    "cryptography.hazmat.primitives.hpke",
    "cryptography.x509",
    *flower.OF_A_RUN,
    "grpc",
    "numpy.random",
    "pydantic",
    "safetensors.numpy",
    "safetensors.torch",
    "torch",
)


def available() -> bool:
    """Whether this system can fork such processes and watch them."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a sandbox that forbids it
        return False
    return True


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
                [sys.executable, "-m", NEST, str(listener.fileno()), *modules],
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
            self._process.wait(ENDS_S)
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
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
