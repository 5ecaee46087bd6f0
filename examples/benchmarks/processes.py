"""What the kernel says of processes: processor time, memory and open files; Linux only."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
# The server's processes by a word of their command lines.
ROLES = {"flwr-serverapp": "run", "flower-superexec": "superexec", " superlink ": "superlink"}


@dataclass(frozen=True)
class Usage:
    """What a process has used so far: seconds of processor, bytes, open files."""

    cpu: float
    rss: int
    pss: int
    files: int


def usage(pid: int) -> Usage | None:
    """What a process uses now; None if it has ended.

    PSS counts memory that n processes share as an n-th, so that sums over processes are right.
    """
    here = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, IndexError):
        memory = _table(here / "smaps_rollup")
        files = len(os.listdir(here / "fd"))
        return Usage(seconds(pid), memory.get("Rss", 0), memory.get("Pss", 0), files)
    return None


def seconds(pid: int) -> float:
    """Seconds of processor that a process has used.

    Raises:
        OSError: it has ended.
        IndexError: it is just ending.
    """
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICK


def resident(pid: int) -> int:
    """Bytes of a process in memory, shared ones too.

    The kernel has this at hand; for `usage` it visits every page.

    Raises:
        OSError: it has ended.
        IndexError: it is just ending.
    """
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def forget_peak(pid: int) -> int:
    """Let a process's highest resident memory count from now on -> bytes that it has now.

    Where the kernel refuses, the peak is that since the process began.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return resident(pid)


def peak(pid: int) -> int:
    """The highest resident memory of a process, in bytes."""
    return _table(Path(f"/proc/{pid}/status"))["VmHWM"]


class Spent:
    """Looks in a thread at the processor time of some processes and of all that they start.

    Args:
        pids: the processes; this one's own time does not count, even if it is among them.

    Attributes:
        looks: (seconds of `time.perf_counter`, seconds of processor since the block began).
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self.looks: list[tuple[float, float]] = []
        self._used: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def between(self, first: float, last: float) -> float:
        """Seconds of processor between two times of `time.perf_counter`."""
        at, used = zip(*self.looks, strict=True)
        before, after = np.interp([first, last], at, used)
        return float(after - before)

    def _watch(self) -> None:
        while True:
            for pid in {each for root in self._pids for each in server(root)} - {os.getpid()}:
                with contextlib.suppress(OSError, IndexError):
                    self._used[pid] = seconds(pid)
            self.looks.append((time.perf_counter(), sum(self._used.values())))
            if self._over.wait(0.2):
                return


def server(pid: int) -> dict[int, str]:
    """The processes of a server by their ids, the first of them the one given -> role of each."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for each in found:  # the list grows
        found += children.get(each, ())
    return {each: _role(each) for each in found}


def _role(pid: int) -> str:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return next((role for word, role in ROLES.items() if word in line), "other")
    return "other"


def _table(file: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file of the kernel, in bytes."""
    found = {}
    for line in file.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = 1024 * int(rest.split()[0])
    return found
