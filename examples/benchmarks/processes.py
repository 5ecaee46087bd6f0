"""What the kernel says of processes: processor time, memory and open files; Linux only."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
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
        words = (here / "stat").read_text().rpartition(")")[2].split()
        memory = _table(here / "smaps_rollup")
        files = len(os.listdir(here / "fd"))
        cpu = (int(words[11]) + int(words[12])) / TICK
        return Usage(cpu, memory.get("Rss", 0), memory.get("Pss", 0), files)
    return None


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
