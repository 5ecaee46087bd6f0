"""The processes that a test has started, by their numbers and by when each of them began.

Nothing here looks for a command line: a forked process has that of another one, and other programs
of the machine may have the same words in theirs.
"""

import contextlib
import json
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedda.ops.federation import Deployment

from .forked import OF
from .patience import wait_until

Hub = TypeVar("Hub", bound=Deployment)
ENDED = "ZX"  # states: a zombie is over, though nobody has waited for it


@dataclass(frozen=True)
class Member:
    """A process. Its number alone would not name it, as the kernel gives numbers again."""

    pid: int
    began: str


@dataclass(frozen=True)
class Line:
    """What the kernel says of a process."""

    member: Member
    parent: int
    session: int


def running() -> list[Line]:
    """The processes of this machine that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (line := _line(entry)) is not None:
            found.append(line)
    return found


def below(*roots: int) -> set[Member]:
    """These processes, those of their sessions, and all that they or those have started."""
    lines, known = running(), set(roots)
    sessions = set(roots)
    while new := {
        line.member.pid
        for line in lines
        if line.member.pid not in known and (line.parent in known or line.session in sessions)
    }:
        known |= new
        sessions |= {line.session for line in lines if line.member.pid in new} - {os.getsid(0)}
    return {line.member for line in lines if line.member.pid in known}


def members(hub: Deployment) -> set[Member]:
    """All processes of a federation: its programs, and those of its runs, as their journals say."""
    runs = {
        Member(event["pid"], event["began"])
        for journal in hub.directory.rglob("journal.jsonl")
        for event in map(json.loads, _whole_lines(journal))
        if event["event"] == "started" and "pid" in event  # a simulated run has none
    }
    return below(*(process.popen.pid for process in hub.processes.values())) | runs


def started(folder: Path) -> dict[str, Any]:
    """What a run's journal says of its present program, or of the last one; nothing if it had none.

    Its `run` is the server's number of the run, its `pid` the process.
    """
    journal = folder / "journal.jsonl"
    events = map(json.loads, _whole_lines(journal) if journal.exists() else [])
    return next((e for e in reversed([*events]) if e["event"] == "started"), {})


def program_of(folder: Path) -> int:
    """The process that executes a run, or did so last."""
    return started(folder)["pid"]


def wait_for_act(hub: Deployment, folder: Path, site: str, what: str) -> None:
    """Wait until a site misbehaves in a run as `tests.actor` says it: "hold in round 2"."""

    def acts() -> bool:
        process = hub.processes[site]
        assert process.alive, process.tail()
        run = started(folder).get("run")
        return f"acting: {what} of run {run}." in process.text()

    wait_until(acts, f"{site} does not {what} of the run in {folder}")


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def alive(known: Collection[Member]) -> set[Member]:
    """Those that have not ended."""
    return {line.member for line in running()} & set(known)


def is_alive(pid: int) -> bool:
    """Whether a process has not ended."""
    return _line(Path(f"/proc/{pid}")) is not None


def marked(text: str) -> set[Member]:
    """The processes in whose environment a text of this test alone is."""
    found = set()
    for line in running():
        with contextlib.suppress(OSError):
            if text.encode() in Path(f"/proc/{line.member.pid}/environ").read_bytes():
                found.add(line.member)
    return found


def kill(known: Collection[Member]) -> None:
    """End those that are left, by force."""
    for member in alive(known):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)


@contextlib.contextmanager
def leaving_nothing(federation: Hub) -> Iterator[Hub]:
    """Run a federation, and check in the end that none of its processes is left."""
    started: set[Member] = set()
    with federation as hub:
        try:
            yield hub
        finally:
            started = members(hub)
    assert len(started) > len(hub.sites), "the check would find nothing that is left"
    left = alive(started) | marked(str(hub.home))
    # What was killed may take the kernel a moment, longer where many programs want a processor.
    wait_until(lambda: not alive(left), f"processes of {hub.directory} are left: {left}")


def _line(entry: Path) -> Line | None:
    try:
        name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        state, parent, _, session, *more = rest.split()
    except (OSError, ValueError):
        return None
    if state in ENDED:
        return None
    starter = int(name.removeprefix(OF) if name.startswith(OF) else parent)
    return Line(Member(int(entry.name), more[15]), starter, int(session))
