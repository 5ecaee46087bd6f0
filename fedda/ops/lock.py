"""The lock of a run's folder, and which process holds it.

A run's folder is locked while a process executes the run. The lock is the kernel's, so it is free
as soon as that process has ended, however it ended. The locked file says which process it is, so
that other commands can tell a run that goes on from one that was cut short, and can end it.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from fedda.errors import RunError, reason, typed

from .system import lock as take

LOCK = ".lock"  # held by the process that executes a run
STARTER = ".starter"  # held by the command that started it, while that shows it
LEAVE = 15.0  # seconds to wait for a run that was stopped and is still ending


class GoingOnError(RunError):
    """Another process is executing the run."""


@dataclass(frozen=True)
class Holder:
    """The process that executes a run.

    Its number alone would not name it, as the kernel gives numbers again.
    """

    pid: int  # its number
    began: str  # when it began, as the kernel counts; empty where the system does not say it
    host: str  # the machine or container in which the number counts

    @classmethod
    def me(cls) -> Self:
        """This process."""
        return cls(os.getpid(), _began(os.getpid()), socket.gethostname())

    @property
    def near(self) -> bool:
        """Whether it runs on this machine, where it can be looked for and ended."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether the process still runs; False for one of another machine."""
        if not self.near:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs, as another user
        return _began(self.pid) == self.began


def holder(folder: Path) -> Holder | None:
    """The process that executes the run in a folder; None if none does.

    Raises:
        RunError: the lock is held by an unknown process.
    """
    try:
        file = (folder / LOCK).open("rb")
    except OSError:
        return None
    with file:
        if take(file.fileno(), shared=True):
            return None
        # The process writes its name right after it has locked the file.
        for _ in range(20):
            with suppress(ValueError, TypeError):
                return Holder(**json.loads((folder / LOCK).read_bytes()))
            time.sleep(0.1)
    raise RunError(
        f"{folder / LOCK} is locked but does not say by which process; end that process, which "
        "`fuser` names."
    )


def unwritable(folder: Path, error: OSError) -> RunError:
    """What to say of a run's folder that cannot be written."""
    return RunError(
        f"The run's folder {folder} cannot be written ({reason(error)}): make room, let this "
        "account write there, or choose another --dir."
    )


@contextmanager
def alone(folder: Path, file: str = LOCK) -> Iterator[None]:
    """Lock a run's folder, made if need be: two runs would overwrite each other's checkpoints.

    Args:
        folder: the run's.
        file: `LOCK` or `STARTER`.

    Raises:
        GoingOnError: another process holds the lock.
        RunError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / file).open("ab", buffering=0)  # appends, as another may hold it
    except OSError as error:
        raise unwritable(folder, error) from error
    deadline = time.monotonic() + LEAVE
    with lock:
        while not take(lock.fileno()):
            if time.monotonic() > deadline:
                raise still_going_on(folder)
            time.sleep(0.1)
        with suppress(OSError):  # a full disk must not keep a run from going on
            lock.truncate(0)
            lock.write(json.dumps(asdict(Holder.me())).encode())
        yield


@contextmanager
def only_server(folder: Path) -> Iterator[None]:
    """Lock the folder of `fedda superlink`: two servers would each say that theirs is the address.

    Raises:
        RunError: another server holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as lock:
        if not take(lock.fileno()):
            raise RunError(
                f"Another server runs from {folder}: stop it, or give this one its own --dir."
            )
        yield


def still_going_on(folder: Path) -> GoingOnError:
    """The error of a command that needs a folder in which a run goes on."""
    return GoingOnError(
        f"The run in {folder} is still going on; watch it with {typed('fedda', 'attach', folder)}, "
        f"end it with {typed('fedda', 'stop', folder)}, or choose another --name for a new run."
    )


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine's start; `ended` if it has ended.

    Empty on a system without /proc.
    """
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "ended"
    return "ended" if fields[0] in "ZX" else fields[19]
